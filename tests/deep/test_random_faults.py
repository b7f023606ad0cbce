"""Faults drawn at random leave nothing that the judge objects to. `make soak` draws more."""

from pathlib import Path

import pytest
from faults import elastic_job, island_job, mailbox_job, memory_cgroup
from support.processes.pool import run_forked

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"


def soak(*arguments):
    """Output of a successful run of the program."""
    done = run_forked(SOAK, "--dry", *arguments, timeout=600)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.timeout(300)
def test_random_faults_leave_no_hang_no_divergence_and_no_unnamed_error():
    printed = soak("--faults", 12, "--seed", 5000)
    assert "12 cases: hang 0, silent divergence 0, unnamed error 0, crash 0" in printed


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", ["memory cgroup", "words"])
def test_full_cgroups_and_words_of_strangers_leave_none_either(fault):
    if fault == "memory cgroup" and not memory_cgroup.can_be_made():
        pytest.skip("no memory cgroup can be made here")
    assert "hang 0, silent divergence 0, unnamed error 0, crash 0" in soak(
        "--fault", fault, "--faults", 2, "--seed", 7000
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kind", "grace"), [(elastic_job.Job, ""), (island_job.IslandJob, "0.5")])
def test_random_kills_and_returns_leave_equal_bits_and_the_loss_of_an_undisturbed_job(
    monkeypatch, kind, grace
):
    monkeypatch.setenv("GRACE", grace)
    loss, rounds = elastic_job.soak(2, seed=2, kind=kind)
    without = elastic_job.reference(rounds, kind)
    assert loss <= elastic_job.MOST_RATIO * without


@pytest.mark.timeout(600)
def test_random_faults_of_islands_of_a_mailbox_leave_equal_anchors_and_the_loss_without_them():
    mailbox_job.check(6, seed=1)
