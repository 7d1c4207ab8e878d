"""What every program here shares: exit codes, Ctrl-C, processes, files written whole."""
