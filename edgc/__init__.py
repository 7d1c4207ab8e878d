"""Entropy-driven dynamic gradient compression for distributed training."""
