"""What a rank measures of its reductions, and what all ranks make of it together."""
