"""A real Slurm of two emulated nodes on this machine: ``python -m tests.slurm.cluster``, which ends at Ctrl-D.

Everything listens on the loopback interface, has a key of its own, and lives in one folder. The daemons are children of
one keeper process and are killed when it ends, however it ends; the keeper ends when its standard input is closed, so a
test that is killed leaves nothing running. Slurm's clients find the configuration through links in ``/etc/slurm``
(Snakemake's jobs drop the variable ``SLURM_CONF``); a Slurm that is configured there already is never touched.

Needs root; installs Debian's packages where they are missing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from experiments.common.processes import die_with_parent, stop

STATE = Path(tempfile.gettempdir(), "edgc-slurm")
ETC = Path("/etc/slurm")
LINKS = ("slurm.conf", "gres.conf", "cgroup.conf")
PACKAGES = {"slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client", "munged": "munge"}
ACCOUNT = "research"
NODES, CPUS, MEMORY, GPUS = ("n1", "n2"), 4, 8000, 2
START_SECONDS = 120.0


class Unavailable(Exception):
    """Why there can be no Slurm here."""


def obstacle() -> str | None:
    """Why a Slurm cannot be started here, as far as that is known without trying."""
    if os.geteuid() != 0:
        return "needs root"
    for name in LINKS:
        path = ETC / name
        if (path.exists() or path.is_symlink()) and not _ours(path):
            return f"this machine has a Slurm of its own ({path})"
    return None


def _ours(path: Path) -> bool:
    return path.is_symlink() and path.readlink().parent.parent == STATE


def install() -> None:
    """Install the packages whose programs are missing, without letting them start their services.

    Raises:
        Unavailable: if that fails.
    """
    missing = [package for program, package in PACKAGES.items() if shutil.which(program) is None]
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise Unavailable(f"{', '.join(missing)} not installed, and no apt-get")
    policy = Path("/usr/sbin/policy-rc.d")  # what Debian asks whether a service may start
    made = not policy.exists()
    if made:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    try:
        for command in (["update", "-qq"], ["install", "-qq", "-y", "--no-install-recommends", *missing]):
            done = subprocess.run(
                ["apt-get", *command],
                env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        if done.returncode != 0:
            raise Unavailable(f"apt-get install {' '.join(missing)} failed: {done.stdout[-500:]}")
    finally:
        if made:
            policy.unlink()


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that nobody listens on, below those that the system gives away."""
    found: list[int] = []
    for port in range(16817, 17817):
        with contextlib.closing(socket.socket()) as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise Unavailable("no free ports")


def wait_until(condition: Callable[[], bool], what: str, seconds: float = START_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise Unavailable(f"{what}: not after {seconds:.0f} s, see {STATE / 'log'}")
        time.sleep(0.2)


def output(*command: str) -> str:
    """What a client of Slurm says; nothing when it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def start(daemons: contextlib.ExitStack, name: str, *command: str) -> None:
    """Start a process of the cluster, a child of this process that dies with it."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    with (STATE / "log" / f"{name}.out").open("ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | {"PATH": path},
            preexec_fn=die_with_parent(signal.SIGKILL),
        )
    daemons.callback(stop, process)


def configuration(ports: Sequence[int]) -> dict[str, str]:
    """The files of Slurm, by name. Ports: controller, then one for each node."""
    host = socket.gethostname().partition(".")[0]
    munge = STATE / "munge" / "socket"
    settings = {
        "ClusterName": "one_machine",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmctldPort": ports[0],
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "AuthType": "auth/munge",
        # Also how long a requeued job waits.
        "AuthInfo": f"socket={munge},cred_expire=10",
        "CommunicationParameters": "NoCtldInAddrAny,NoInAddrAny",
        "StateSaveLocation": STATE / "controller",
        "SlurmdSpoolDir": f"{STATE}/spool-%n",
        "SlurmctldPidFile": STATE / "slurmctld.pid",
        "SlurmdPidFile": f"{STATE}/slurmd-%n.pid",
        "SlurmctldLogFile": STATE / "log" / "slurmctld.log",
        "SlurmdLogFile": f"{STATE}/log/slurmd-%n.log",
        # No cgroups: the machine may be a container. What a job asks for is counted, not enforced.
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/linux",
        "SwitchType": "switch/none",
        "MpiDefault": "none",
        # More cores than the machine may have.
        "SlurmdParameters": "config_overrides",
        "ReturnToService": 2,
        "SlurmdTimeout": 20,
        "InactiveLimit": 0,
        "KillWait": 5,
        "CompleteWait": 0,
        # squeue shows an ended job for that long; Snakemake relies on it.
        "MinJobAge": 600,
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": "sched_interval=2,bf_interval=2,batch_sched_delay=0",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core_Memory",
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
        "GresTypes": "gpu",
    }
    lines = [f"{key}={value}" for key, value in settings.items()]
    for name, port in zip(NODES, ports[1:], strict=True):
        lines.append(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS} CoresPerSocket={CPUS} "
            f"RealMemory={MEMORY} Gres=gpu:{GPUS} State=UNKNOWN"
        )
    everywhere = f"Nodes={','.join(NODES)} MaxTime=120 DefaultTime=30 State=UP"
    lines.append(f"PartitionName=main Default=YES PriorityTier=10 {everywhere}")
    lines.append(f"PartitionName=urgent PriorityTier=100 PreemptMode=OFF {everywhere}")
    # A GPU without a file counts as none.
    gres = [f"NodeName={name} Name=gpu File={STATE}/gpu{index}" for name in NODES for index in range(GPUS)]
    contents = (lines, gres, ["CgroupPlugin=cgroup/v1"])
    files = dict(zip(LINKS, contents, strict=True))
    return {name: "\n".join(content) + "\n" for name, content in files.items()}


def bring_up(daemons: contextlib.ExitStack) -> None:
    """Start all daemons and wait until both nodes take jobs."""
    shutil.rmtree(STATE, ignore_errors=True)
    for name in ("etc", "log", "munge", "controller", *(f"spool-{node}" for node in NODES)):
        (STATE / name).mkdir(parents=True)
    STATE.chmod(0o755)
    (STATE / "munge").chmod(0o711)
    for index in range(GPUS):
        (STATE / f"gpu{index}").touch()
    key = STATE / "munge" / "key"
    key.touch(0o600)
    key.write_bytes(secrets.token_bytes(1024))
    ports = free_ports(1 + len(NODES))
    for name, content in configuration(ports).items():
        path = STATE / "etc" / name
        path.write_text(content)
        ETC.mkdir(exist_ok=True)
        (ETC / name).unlink(missing_ok=True)
        (ETC / name).symlink_to(path)
    munge = [f"--{name}-file={STATE}/munge/{name}" for name in ("key", "pid", "seed")]
    munge += [f"--socket={STATE}/munge/socket", f"--log-file={STATE}/log/munged.log"]
    start(daemons, "munged", "munged", "--foreground", *munge)
    wait_until((STATE / "munge" / "socket").exists, "munged")
    start(daemons, "slurmctld", "slurmctld", "-D", "-c")
    wait_until(lambda: "is UP" in output("scontrol", "ping"), "slurmctld")
    for name in NODES:
        start(daemons, f"slurmd-{name}", "slurmd", "-D", "-N", name)
    ready = ["sinfo", "--noheader", "--Node", "--partition=main", "--states=idle", "--format=%N"]
    wait_until(lambda: set(output(*ready).split()) == set(NODES), "nodes")


def clear_up() -> None:
    """End all jobs, while there still is a controller."""
    if "is UP" not in output("scontrol", "ping"):
        return
    output("scancel", "--user=root")
    with contextlib.suppress(Unavailable):
        wait_until(lambda: not output("squeue", "--noheader", "--states=R,CG,PD").strip(), "jobs", 20)


def remove_links() -> None:
    for name in LINKS:
        if _ours(ETC / name):
            (ETC / name).unlink()


def _lock() -> IO[str] | None:
    """The right to be the keeper; None while another one is."""
    handle = STATE.with_suffix(".lock").open("a+")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return None
    return handle


def keep() -> None:
    """Bring the cluster up, say ``ready``, and take it down at the end of standard input or on SIGTERM."""
    why = obstacle()
    if why:
        raise Unavailable(why)
    handle = _lock()
    if handle is None:
        raise Unavailable("another one is up")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    with contextlib.ExitStack() as daemons:
        daemons.callback(shutil.rmtree, STATE, ignore_errors=True)
        daemons.callback(remove_links)
        try:
            install()
            bring_up(daemons)
            print("ready", flush=True)
            while sys.stdin.read(1):
                pass
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            clear_up()


@contextlib.contextmanager
def slurm() -> Iterator[None]:
    """A cluster for the time of a ``with`` block.

    Raises:
        Unavailable: saying why there can be none here.
    """
    command, root = [sys.executable, "-m", "tests.slurm.cluster"], Path(__file__).resolve().parents[2]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=root, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as keeper:
        assert keeper.stdout is not None and keeper.stderr is not None
        if keeper.stdout.readline() != "ready\n":
            raise Unavailable(keeper.stderr.read().strip().rpartition("\n")[2])
        yield


if __name__ == "__main__":
    try:
        keep()
    except Unavailable as error:
        sys.exit(f"error: no Slurm here: {error}")
