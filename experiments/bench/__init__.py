"""Benchmarks of the compression engine: on one machine, and over a network of a chosen bandwidth.

``python -m experiments.bench engine`` times engines beside each other; ``step`` says where the time of a training step
goes with and without a hook; ``network`` times training steps between two network namespaces (root only); ``stages``
notes when pipeline stages finish over links with injected delays. What they write lies in ``results/bench/<machine>/``.
"""
