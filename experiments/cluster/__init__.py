"""The machines that a run is sent to: Slurm, its description, runs over several nodes."""
