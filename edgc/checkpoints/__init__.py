"""State of a run in files, one a rank, which are whole or refused."""
