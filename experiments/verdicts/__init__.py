"""What came out, held against the paper and against earlier results."""
