"""CQM and the other policies: what measurements say, made into ranks. Plain arithmetic, the same on every rank."""
