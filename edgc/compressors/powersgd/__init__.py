"""PowerSGD: low-rank approximation by power iteration, with error feedback and warm start."""
