"""Offline lm-eval tasks made from the held-out text; see :mod:`experiments.evaluation.tasks.make`."""
