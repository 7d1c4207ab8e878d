"""Imported once by the server that forks a CPU machine's ranks; a rank that is spawned imports it itself.

The server ends with the launcher that started it. By itself it would outlive a killed launcher for as long as a rank
lives, and the ranks as long as the server: each forked rank holds a copy of the pipe by whose end the server notices
that it is no longer needed. Ctrl-C reaches every process of a terminal; the server and its ranks leave it to the
launcher.
"""

from __future__ import annotations

import signal

from experiments.common.processes import die_with_parent

die_with_parent(signal.SIGKILL)()
signal.signal(signal.SIGINT, signal.SIG_IGN)

from experiments.training.preload import work as work  # noqa: E402 (takes seconds; a launcher may be killed before)
