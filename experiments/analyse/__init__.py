"""Tables of one study from its run folders: ``python -m experiments.analyse --study S --scale ci``.

A study names the module here that makes its tables (``analysis:``). Such a module has ``tables(runs)``, the rows of
each table by its name, and says which tables these are: ``RESULTS``, which are committed with the results of a study,
and ``DETAILS``, which are too long for that. Files without ``RESULTS`` hold what analyses share.
"""
