"""`bagua simulate` on a profile: its tables, its JSON, and what it refuses."""

import json
import re

import pytest
from bagua._foresight import profile_file
from bagua._foresight.candidate import Candidate
from bagua._foresight.cost import predict
from bagua._foresight.profile import BucketProfile, Link, Profile
from bagua._tools.command import main

PROFILE = Profile(
    ranks=4,
    nodes=(2, 2),
    compute=0.1,
    optimizer=0.02,
    buckets=(BucketProfile(1 << 20, 4 << 20, 0.08, ((1024, 1024),)),),
    between=Link(1e-4, 1.25e8),
    inside=Link(1e-6, 1e10),
)


@pytest.fixture
def path(tmp_path):
    profile_file.write_profile(PROFILE, tmp_path / "run.json")
    return str(tmp_path / "run.json")


def test_a_table_has_a_row_per_algorithm_and_a_column_per_number_of_ranks(path, capsys):
    words = ["--ranks", "8,64", "--gbps", "0.2,10", "--latency-ms", "0.05"]
    words += ["--algorithms", "gradient_allreduce", "bytegrad:codec=int4_block,hierarchical=False"]
    assert main(["simulate", "--profile", path, *words]) == 0
    text = capsys.readouterr().out
    assert re.findall(r".*between nodes", text) == [
        "0.2 Gbit/s, 0.05 ms between nodes",
        "10 Gbit/s, 0.05 ms between nodes",
    ]
    assert text.count("8 ranks") == text.count("64 ranks") == 2
    rows = [line for line in text.splitlines() if line.startswith("bytegrad")]
    assert len(rows) == 2
    exact, compressed = (
        predict(PROFILE, candidate, ranks=8, between=Link(5e-5, 2.5e7))
        for candidate in (
            Candidate("gradient_allreduce"),
            Candidate("bytegrad", {"codec": "int4_block", "hierarchical": False}),
        )
    )
    assert f"{exact.step / compressed.step:.2f}x" in rows[0]
    assert f"{compressed.step * 1e3:.0f} ms" in rows[0]


def test_json_has_the_predictions(path, capsys):
    words = ["--json", "--ranks", "16", "--algorithms", "power_sgd:rank=4", "--inside-gbps", "40"]
    assert main(["simulate", "--profile", path, *words, "--ranks-per-node", "8"]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    (algorithm,) = result["algorithms"]
    assert (result["gbps"], algorithm["arguments"]) == (1.0, {"rank": 4})
    (step,) = algorithm["steps"]
    assert step["step_seconds"] > PROFILE.compute
    assert step["speed_over_exact"] > 1
    assert step["bytes_sent"] == 2 * 4 * 4 * 1024 * 15 // 16 * 2


def test_every_algorithm_is_in_the_table_by_default(path, capsys):
    assert main(["simulate", "--profile", path]) == 0
    text = capsys.readouterr().out
    for name in ("gradient_allreduce", "bytegrad", "power_sgd", "sparse", "diloco", "async"):
        assert re.search(rf"^{name}\b", text, re.MULTILINE), name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "8,x"], "argument --ranks: 'x' is no positive number"),
        (["--ranks", "0"], "argument --ranks: '0' is no positive number"),
        (["--gbps", "-1"], "argument --gbps: '-1' is no positive number"),
        (["--algorithms", "magic"], "unknown algorithm 'magic'; known: async, bytegrad"),
        (["--algorithms", "bytegrad:bits=4"], "'bits=4' is no argument=value of bytegrad"),
        (["--profile", "nowhere.json"], "nowhere.json: No such file or directory"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_wrong_words_are_named(path, capsys, words, message):
    with pytest.raises(SystemExit) as caught:
        main(["simulate", "--profile", path, *words])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_file_that_is_no_profile_is_named(tmp_path, capsys):
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(SystemExit):
        main(["simulate", "--profile", str(tmp_path / "run.json")])
    assert "run.json: no profile of bagua" in capsys.readouterr().err
