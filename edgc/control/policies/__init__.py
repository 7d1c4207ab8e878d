"""Policies: by what the rank of stage 0 moves, each with its settings in one file.

Their contract is :mod:`edgc.control.policies.base`.

A file here is a policy if it has a type of settings (:class:`edgc.control.settings.PolicyConfig`) with a ``policy``:
its name, its settings, and its ``rule``. There is no list to add it to.
"""
