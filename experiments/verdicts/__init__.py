"""Results, held against the paper and against earlier results."""
