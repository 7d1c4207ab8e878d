"""A network of chosen bandwidth on one machine: a network namespace per host, joined by a bridge.

Every host has one interface, ``eth0``, with an address of 10.77.0.0/24, whose cable ends in a bridge that lies in a
namespace of its own; a token bucket at both ends of each cable limits both directions. Nothing outside these namespaces
is changed, and they are gone when the ``with`` block is left. Needs root.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from edgc.errors import UserError

INTERFACE = "eth0"
COMMAND_SECONDS = 20
CONGESTION_CONTROLS = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
_COUNT = itertools.count()
_NAME = re.compile(r"edgc-(\d+)-")


def missing() -> str | None:
    """Reason why no testbed can be made here, in a few words; None if one can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"the program `{program}` is missing (package iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with Testbed(1) as testbed:
            testbed.limit(100)
    except UserError as error:
        return error.message
    return None


class Testbed:
    """``hosts`` network namespaces joined by a bridge; a context manager."""

    def __init__(self, hosts: int) -> None:
        self.hosts = hosts
        self._prefix = f"edgc-{os.getpid()}-{next(_COUNT)}"
        self._switch = f"{self._prefix}-switch"
        self._limited = False

    def host(self, index: int) -> str:
        """Name of the namespace of a host."""
        return f"{self._prefix}-{index}"

    @staticmethod
    def address(index: int) -> str:
        return f"10.77.0.{index + 1}"

    def inside(self, index: int) -> list[str]:
        """Words to put before a command that is to run on a host."""
        return ["ip", "netns", "exec", self.host(index)]

    def __enter__(self) -> Testbed:
        """Raises UserError with what the kernel or `ip` says if it cannot be made."""
        remove_left_over()
        # So that the namespaces are removed also when somebody ends the program.
        self._handler = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _build(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _in(self._switch, "link", "add", "br0", "type", "bridge")
        _in(self._switch, "link", "set", "br0", "up")
        for index in range(self.hosts):
            host, port, address = self.host(index), f"p{index}", self.address(index)
            _run("ip", "netns", "add", host)
            _in(host, "link", "set", "lo", "up")
            veth = ("type", "veth", "peer", "name", port, "netns", self._switch)
            _run("ip", "link", "add", INTERFACE, "netns", host, *veth)
            _in(host, "addr", "add", f"{address}/24", "dev", INTERFACE)
            _in(host, "link", "set", INTERFACE, "up")
            _in(self._switch, "link", "set", port, "up", "master", "br0")
            # The same control everywhere, whatever the machine's default is.
            if "cubic" in CONGESTION_CONTROLS.read_text(encoding="ascii").split():
                route = ("10.77.0.0/24", "dev", INTERFACE, "src", address, "congctl", "cubic")
                _in(host, "route", "change", *route)

    def _remove(self) -> None:
        for name in [*(self.host(index) for index in range(self.hosts)), self._switch]:
            _run("ip", "netns", "del", name, check=False)
        signal.signal(signal.SIGTERM, self._handler or signal.SIG_DFL)

    def limit(self, megabits: float | None) -> None:
        """Limit every cable, both directions, to so many Mbit/s; None takes the limit away.

        Raises:
            UserError: if the kernel has no token bucket filter.
        """
        ends = [(self.host(index), INTERFACE) for index in range(self.hosts)]
        for namespace, device in [*ends, *((self._switch, f"p{index}") for index in range(self.hosts))]:
            inside = ["tc", "-n", namespace, "qdisc"]
            if self._limited:
                _run(*inside, "del", "dev", device, "root", check=False)
            if megabits is not None:
                rate = f"tbf rate {megabits * 1e6:.0f}bit burst {burst(megabits)} latency 50ms".split()
                _run(*inside, "add", "dev", device, "root", *rate)
        self._limited = megabits is not None


def burst(megabits: float) -> int:
    """Bytes that a cable lets through at once after a pause: those of a millisecond, but some packets at least.

    Messages smaller than that travel as if there were no limit; with much less the kernel misses the rate.
    """
    return max(8192, int(megabits * 1e6 / 8 * 1e-3))


def sent_bytes() -> int:
    """Bytes that the interface of this process's namespace has sent, as the kernel counts them, headers included."""
    for line in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            return int(numbers.split()[8])
    raise UserError(f"there is no interface {INTERFACE}", where="/proc/self/net/dev")


def remove_left_over() -> None:
    """Remove namespaces of testbeds whose process was killed."""
    for line in _run("ip", "netns", "list").splitlines():
        owner = _NAME.match(line)
        if owner and not Path(f"/proc/{owner.group(1)}").exists():
            _run("ip", "netns", "del", line.split()[0], check=False)


def _in(namespace: str, *words: str) -> None:
    _run("ip", "-n", namespace, *words)


def _run(*command: str, check: bool = True) -> str:
    """Output of a command; UserError with the first line of its complaint if it fails and that matters."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    if check and done.returncode != 0:
        lines: Sequence[str] = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise UserError(f"`{' '.join(command)}` failed: {lines[0]}", fix="run as root on a kernel that allows it")
    return done.stdout
