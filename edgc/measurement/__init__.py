"""Measurements that a rank makes of its reductions, and the report that follows from those of all ranks."""
