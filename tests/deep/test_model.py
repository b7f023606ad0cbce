"""The model of an engine's launch order, agreement, failure and end, searched by spin in full."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

MODEL = Path(__file__).resolve().parents[1] / "model" / "engine.pml"
# The large configurations take hours and several GiB.
LARGE = os.environ.get("BAGUA_TEST_LARGE_MODELS") == "1"
SECONDS = 3600 if LARGE else 300

pytestmark = [
    pytest.mark.timeout(SECONDS + 60),
    pytest.mark.skipif(
        shutil.which("spin") is None or shutil.which("gcc") is None,
        reason="the model is not checked: spin (Debian package spin) or gcc is missing",
    ),
]

FAULTS = ("NONE", "ABORT", "THROW", "LEAVE", "UNFINISHED", "OTHER_PLAN")
TRANSPORTS = ("HUB", "LOCAL", "DEAF")
SHORT = ("BUCKETS=2", "ROUNDS=1")


def search(folder, *definitions, cycles=False):
    """(errors, states, spin's words) of all executions; raises if the search was not complete.

    cycles: look for executions without end, not for invalid end states and broken assertions.
    """
    names = [f"-D{definition}" for definition in definitions]
    subprocess.run(
        ["spin", "-a", *names, MODEL], cwd=folder, check=True, capture_output=True, timeout=60
    )
    kind = "-DNP" if cycles else "-DSAFETY"
    # Short searches take less time than an optimising compiler.
    flags = ["-O2" if LARGE else "-O0", kind, "-DCOLLAPSE", "-DNOFAIR", "-DMEMLIM=8000"]
    subprocess.run(
        ["gcc", *flags, "-o", "pan", "pan.c"],
        cwd=folder,
        check=True,
        capture_output=True,
        timeout=120,
    )
    done = subprocess.run(
        ["./pan", *(["-l"] if cycles else []), "-n", "-m2000000"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    words = done.stdout + done.stderr
    found = re.search(r"errors: (\d+)\s+(\d\S*) states, stored", words)
    assert found, words
    errors, states = int(found[1]), int(float(found[2]))
    assert errors or ("not completed" not in words and "max search depth" not in words), words
    print(f"{' '.join(definitions)}: {states} states, {errors} errors")
    return errors, states, words


@pytest.mark.parametrize(
    ("fault", "transport"),
    [
        ("NONE", "HUB"),
        ("ABORT", "HUB"),
        ("ABORT", "DEAF"),
        ("THROW", "LOCAL"),
        ("LEAVE", "LOCAL"),
        ("UNFINISHED", "HUB"),
        ("OTHER_PLAN", "LOCAL"),
    ],
)
def test_every_wait_of_two_ranks_with_two_lanes_ends(fault, transport, tmp_path):
    definitions = (f"FAULT={fault}", f"TRANSPORT={transport}", "ROUNDS=1")
    errors, states, words = search(tmp_path, *definitions)
    assert errors == 0, words
    assert states > 10_000


def test_failures_reach_every_rank_of_a_hub_without_a_board(tmp_path):
    errors, _, words = search(tmp_path, "FAULT=THROW", "BOARD=0", "ROUNDS=1")
    assert errors == 0, words


@pytest.mark.parametrize("fault", ["NONE", "ABORT"])
def test_no_execution_goes_on_for_ever(fault, tmp_path):
    errors, states, words = search(tmp_path, f"FAULT={fault}", *SHORT, cycles=True)
    assert errors == 0, words
    assert states > 5_000


@pytest.mark.parametrize(
    ("mistake", "definitions", "seen"),
    [
        ("BUCKETS_LAUNCH_WHEN_READY", [], "invalid end state"),
        ("ROUNDS_START_WITHOUT_AGREEMENT", ["FAULT=OTHER_PLAN"], "invalid end state"),
        ("ROUNDS_OVERLAP", ["ROUNDS=2"], "of_round=="),
        ("WAIT_DOES_NOT_LOOK_AT_FAILURE", ["FAULT=THROW"], "invalid end state"),
        ("LANES_WAIT_FOR_AGREEMENT_ONLY", ["FAULT=ABORT"], "invalid end state"),
        ("FAILURE_WAKES_NOBODY", ["FAULT=ABORT"], "invalid end state"),
        ("FAILURE_IS_NOT_PUBLISHED", ["FAULT=ABORT", "TRANSPORT=LOCAL"], "invalid end state"),
        ("ABORT_FORGETS_A_LANE", ["FAULT=THROW"], "invalid end state"),
        ("STOPPING_ABORTS_NOTHING", ["FAULT=LEAVE", "TRANSPORT=LOCAL"], "invalid end state"),
        ("LEAVING_IS_NOT_PUBLISHED", ["FAULT=LEAVE"], "invalid end state"),
        (
            "ROUNDS_COUNT_BEFORE_THEY_WERE_WAITED_FOR",
            ["FAULT=LEAVE", "EXCHANGE"],
            "invalid end state",
        ),
    ],
)
def test_a_mistake_in_the_model_is_found(mistake, definitions, seen, tmp_path):
    rounds = [] if "ROUNDS=2" in definitions else ["ROUNDS=1"]
    errors, _, words = search(tmp_path, f"MISTAKE_{mistake}", *definitions, *rounds)
    assert errors == 1
    assert seen in words


@pytest.mark.skipif(not LARGE, reason="takes hours: BAGUA_TEST_LARGE_MODELS=1")
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    ("definitions", "cycles"),
    [
        *((["EXCHANGE", f"TRANSPORT={transport}"], False) for transport in TRANSPORTS),
        (["RANKS=3", *SHORT, "IN_ORDER"], False),
        (["FINE", *SHORT], False),  # without the steps that are merged elsewhere
        (["ROUNDS=1"], True),
    ],
    ids=str,
)
def test_every_wait_ends_in_larger_models(fault, definitions, cycles, tmp_path):
    errors, _, words = search(tmp_path, f"FAULT={fault}", *definitions, cycles=cycles)
    assert errors == 0, words
