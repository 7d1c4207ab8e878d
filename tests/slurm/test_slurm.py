"""The workflow as typed on a real Slurm of two emulated nodes; then faults, after which the tables are the same."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.slurm import cluster
from tests.slurm.cluster import output
from tests.slurm.study import INTERVAL, RUNS, STUDY, Copy, job_of, make_copy, send, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.root]

TABLE = f"results/ci/{STUDY}/table.csv"
# As typed; tests of faults ask Slurm more often.
SLURM = ("--profile", "slurm")
OFTEN = ("--slurm-init-seconds-before-status-checks", "3")


@pytest.fixture(scope="module")
def slurm() -> Iterator[None]:
    why = cluster.obstacle()
    if why:
        pytest.skip(f"no Slurm here: {why}")
    try:
        with cluster.slurm():
            yield
    except cluster.Unavailable as error:
        pytest.skip(f"no Slurm here: {error}")


@pytest.fixture(scope="module")
def finished(slurm: None, tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """A copy in which the command, as typed, has made everything without a disturbance."""
    copy = make_copy(tmp_path_factory.mktemp("slurm") / "repository")
    code, text = copy.run(*SLURM, "all", "--config", "scale=ci")
    assert code == 0, text
    return copy


@pytest.fixture
def disturbed(finished: Copy, tmp_path: Path) -> Copy:
    """A copy of it without runs and tables; the data are there."""
    path = tmp_path / "repository"
    shutil.copytree(finished.path, path, symlinks=True, ignore=shutil.ignore_patterns(".snakemake"))
    shutil.copytree(finished.path / ".snakemake" / "metadata", path / ".snakemake" / "metadata")
    copy = Copy(path)
    copy.forget(*RUNS)
    return copy


def test_the_command_as_typed_makes_everything(finished: Copy) -> None:
    assert (finished.results / "report.html").is_file()
    assert (finished.results / "figures" / f"{STUDY}.png").is_file()
    for run in RUNS:
        assert (finished.results / STUDY / run / "status").read_text() == "ok\n"
        assert finished.resumed_at(run) == []
    jobs = output("scontrol", "--oneliner", "show", "job").splitlines()
    trained = [line for line in jobs if " BatchFlag=1" in line and f"rule_train/{STUDY}_" in line]
    nodes = {name: line for line in trained for name in (*RUNS, "none-s1") if f"_{name}/" in line}
    assert " NumNodes=1 " in nodes.pop("none-s1")
    assert set(nodes) == set(RUNS)
    for line in nodes.values():
        assert " NumNodes=2 " in line
        assert "gres:gpu:1" in line
        assert " Requeue=1 " in line
        assert f" Account={cluster.ACCOUNT} " in line


def test_tables_are_those_of_a_run_without_slurm(finished: Copy, tmp_path: Path) -> None:
    path = tmp_path / "repository"
    shutil.copytree(finished.path, path, symlinks=True)
    copy = Copy(path)
    copy.forget(RUNS[0])
    code, text = copy.run("-c2", TABLE)
    assert code == 0, text
    trained = re.findall(r"^train rank_sweep ", text, re.MULTILINE)
    assert len(trained) == 1, "runs of Slurm are not made again because there is none now"
    assert copy.table() == finished.table()


def kill_a_rank(copy: Copy, run: str, job: str) -> None:
    send(signal.SIGKILL, copy.ranks(run)[-1:])


def cancel(copy: Copy, run: str, job: str) -> None:
    output("scancel", job)


def preempt(copy: Copy, run: str, job: str) -> None:
    """A job of a partition with priority takes the nodes for a moment."""
    urgent = ["--partition=urgent", "--nodes=2", "--exclusive", "--time=5"]
    assert output("srun", *urgent, "true") == ""
    assert "Restarts=1" in output("scontrol", "show", "job", job)


def run_out_of_time(copy: Copy, run: str, job: str) -> None:
    send(signal.SIGSTOP, copy.ranks(run))
    output("scontrol", "update", f"JobId={job}", "TimeLimit=1")
    wait_for(lambda: "JobState=TIMEOUT" in output("scontrol", "show", "job", job), "the time limit")


def node_down(copy: Copy, run: str, job: str) -> None:
    output("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    wait_for(lambda: job_of(run) != job, "the end of the job")
    output("scontrol", "update", "NodeName=n2", "State=RESUME")


def damage_the_newest_checkpoint(copy: Copy, run: str, job: str) -> None:
    """And kill a rank; there is an older checkpoint."""
    wait_for(lambda: len(copy.checkpoints(run)) == 2, "two checkpoints")
    send(signal.SIGSTOP, copy.ranks(run))
    newest = copy.checkpoints(run)[-1]
    for path in newest.glob("*.distcp"):
        path.write_bytes(b"\0" * path.stat().st_size)
    kill_a_rank(copy, run, job)
    send(signal.SIGCONT, copy.ranks(run))


# Of each run, one after another; each after another checkpoint.
FAULTS: dict[str, list[Callable[[Copy, str, str], None]]] = {
    RUNS[0]: [damage_the_newest_checkpoint, preempt, kill_a_rank],
    RUNS[1]: [cancel, node_down, run_out_of_time],
}


def test_after_every_fault_the_run_goes_on_and_the_tables_are_the_same(finished: Copy, disturbed: Copy) -> None:
    disturbed.site(jobs=1, retries=4)
    left, newest = {run: [*faults] for run, faults in FAULTS.items()}, dict[str, list[Path]]()
    snakemake = disturbed.start(*SLURM, *OFTEN, TABLE, "--config", "scale=ci")
    try:
        while any(left.values()):
            run = training_of(disturbed, snakemake)
            last = disturbed.checkpoints(run)[-1:]
            if left[run] and last > newest.get(run, []) and (job := job_of(run)):
                left[run].pop(0)(disturbed, run, job)
                newest[run] = disturbed.checkpoints(run)[-1:]
        assert snakemake.wait(1200) == 0, disturbed.log()
    finally:
        end(snakemake)
    for run in RUNS:
        assert len(disturbed.resumed_at(run)) >= len(FAULTS[run]), f"{run} did not go on from a checkpoint each time"
        assert all(iteration % INTERVAL == 0 for iteration in disturbed.resumed_at(run))
    assert disturbed.table() == finished.table()


def training_of(copy: Copy, snakemake: subprocess.Popen[bytes]) -> str:
    """A run that has written a checkpoint."""
    run = wait_for(lambda: snakemake.poll() is not None or copy.training(), "training")
    assert snakemake.poll() is None, copy.log()
    return str(run)


def end(snakemake: subprocess.Popen[bytes]) -> None:
    """End Snakemake and its jobs."""
    if snakemake.poll() is None:
        snakemake.kill()
        snakemake.wait()
        output("scancel", "--user=root")


def test_killed_snakemake_is_started_again_while_its_job_runs(finished: Copy, disturbed: Copy) -> None:
    disturbed.site(account=None)  # that of the user, then
    for run in RUNS[1:]:
        shutil.copytree(finished.results / STUDY / run, disturbed.results / STUDY / run)
    run = RUNS[0]
    # First by hand, which needs --unlock; the old job is cancelled by the new one that makes the same run.
    by_hand = disturbed.start(*SLURM, *OFTEN, TABLE, "--config", "scale=ci")
    training_of(disturbed, by_hand)
    by_hand.kill()
    by_hand.wait()
    old = wait_for(lambda: job_of(run), "the job that Snakemake has left")
    send(signal.SIGSTOP, disturbed.ranks(run))  # it shall not end by itself
    assert disturbed.run("--unlock", *SLURM, "--config", "scale=ci")[0] == 0
    again = disturbed.start(*SLURM, *OFTEN, TABLE, "--config", "scale=ci")
    wait_for(lambda: "JobState=CANCELLED" in output("scontrol", "show", "job", old), "the new job")
    # Then with the workflow, which clears up by itself.
    training_of(disturbed, again)
    again.kill()
    again.wait()
    code, text = disturbed.run("--scale", "ci", TABLE, *SLURM, *OFTEN, program="workflows.program")
    assert code == 0, text
    assert "cancelled 1 jobs of a killed workflow" in text
    assert disturbed.resumed_at(run)
    assert disturbed.table() == finished.table()


def test_what_the_cluster_does_not_have_is_refused_in_its_words(disturbed: Copy) -> None:
    disturbed.site(partition="gpus", retries=0)
    code, text = disturbed.run(*SLURM, TABLE, "--config", "scale=ci")
    assert code == 1 and "invalid partition specified: gpus" in text, text


def test_full_disk_ends_after_the_retries_and_goes_on_when_there_is_space(
    finished: Copy, disturbed: Copy, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)], check=True)
    try:
        shutil.copytree(finished.results / "data", disk / "ci" / "data")
        used = sum(path.stat().st_size for path in disk.rglob("*") if path.is_file()) // 1024
        subprocess.run(["mount", "-o", f"remount,size={used + 700}k", str(disk)], check=True)
        status = f"{disk}/ci/{STUDY}/{RUNS[0]}/status"
        disturbed.site(retries=1)
        config = ("--config", "scale=ci", f"results={disk}")
        code, text = disturbed.run(*SLURM, *OFTEN, status, *config)
        assert code == 1, text
        # There is no space for the run's own log: that of Slurm says it.
        logs = (disturbed.path / ".snakemake" / "slurm_logs" / "rule_train").rglob("*.log")
        assert all("no space left" in log.read_text(errors="replace").lower() for log in logs)
        assert text.count("has been submitted with SLURM jobid") == 2
        assert not Path(status).exists()
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        code, text = disturbed.run(*SLURM, *OFTEN, status, *config)
        assert code == 0, text
        assert Path(status).read_text() == "ok\n"
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
