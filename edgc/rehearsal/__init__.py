"""Rehearsal of data-parallel training: the replicas of a model on one device, in one process, without a network.

What compression does to *your* model at 8 replicas, before there is a cluster::

    rehearsal = Rehearsal(model, optimizer=optimizer, config=EDGCConfig(method="powersgd", rank=16), replicas=8)
    for batches in loader:  # one batch a replica
        loss = rehearsal.step(batches)
    print(rehearsal.report())
"""

from __future__ import annotations

from edgc.rehearsal.rehearsal import Rehearsal
from edgc.rehearsal.report import Report

__all__ = ["Rehearsal", "Report"]
