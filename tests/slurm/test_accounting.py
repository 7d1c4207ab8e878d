"""With accounting: accounts are checked, and a job that was cancelled is noticed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm.cluster import output
from tests.slurm.study import RUNS, STUDY, Copy, job_of, make_copy, wait_for
from tests.slurm.test_slurm import OFTEN, SLURM, cluster_or_skip, end, refused, training_of

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.root]

RUN = RUNS[0]
TARGET = f"results/ci/{STUDY}/{RUN}/status"
SCALE = ("--config", "scale=ci")


@pytest.fixture(scope="module")
def slurm() -> Iterator[None]:
    yield from cluster_or_skip(accounting=True)


@pytest.fixture(scope="module")
def copy(slurm: None, tmp_path_factory: pytest.TempPathFactory) -> Copy:
    return make_copy(tmp_path_factory.mktemp("accounting") / "repository")


def test_an_unknown_account_is_refused(copy: Copy) -> None:
    copy.site(account="nobody")
    refused(*copy.run(*SLURM, TARGET, *SCALE), "account = 'nobody'")
    assert "rule_train" not in output("sacct", "--noheader", "--allusers", "--format=comment%50,jobname%50")


def test_a_cancelled_job_is_seen_and_its_run_goes_on(copy: Copy) -> None:
    copy.site(account="research")
    snakemake = copy.start(*SLURM, *OFTEN, TARGET, *SCALE)
    try:
        assert training_of(copy, snakemake) == RUN
        job = wait_for(lambda: job_of(RUN), "the job")
        output("scancel", job)
        assert snakemake.wait(600) == 0, copy.log()
    finally:
        end(snakemake)
    assert (copy.path / TARGET).read_text() == "ok\n"
    assert copy.resumed_at(RUN)
    states = output("sacct", "--noheader", "--allocations", "--format=jobid,state%20,account")
    assert any(line.split()[0] == job and "CANCELLED" in line for line in states.splitlines()), states
    assert "COMPLETED" in states
    assert all(line.split()[-1] == "research" for line in states.splitlines())
