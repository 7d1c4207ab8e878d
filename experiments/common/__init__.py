"""Shared by every program here: exit codes, Ctrl-C, processes, files written whole."""
