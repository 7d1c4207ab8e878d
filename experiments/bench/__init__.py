"""Benchmarks of the compression engine, of training steps and of whole runs, one file each: plan, worker, table.

``engine`` times engines beside each other, ``step_profile`` says where the time of a training step goes on one device;
``network`` times training steps over limited links, ``steps`` compares them with predictions, ``race`` trains over such
links (root only); ``pipeline`` predicts steps of pipeline stages that were measured earlier.

What they share: ``terminal`` (options, tables, what is kept), ``machine`` (what a timing was taken on), ``workers``
(processes), ``testbed`` (network namespaces), ``collectives``, ``kernels`` (times of a call), ``engines`` and ``gpt``
(what is timed). Results lie in ``results/bench/<machine>/``.
"""
