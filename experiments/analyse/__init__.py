"""From run folders to the tables of one study: ``python -m experiments.analyse --study S --scale ci``.

A study names the module here that makes its tables (``analysis:``). Such a module has ``analyse(runs, folder)`` and
says which files that writes: ``RESULTS``, which are committed with the results of a study, and ``DETAILS``, which are
too long for that. Files without ``RESULTS`` hold what analyses share.
"""
