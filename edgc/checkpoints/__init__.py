"""What is written of a run's state, one file a rank, and whether it is whole."""
