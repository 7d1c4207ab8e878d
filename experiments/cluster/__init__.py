"""Machines that a run is sent to: Slurm and its description."""
