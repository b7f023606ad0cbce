"""The benchmark of codecs on a GPU: refused without one; what it makes of its timings."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from bagua import _C
from support.devices import each_device

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def program(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import codec_on_cuda

    return codec_on_cuda


def test_it_is_refused_without_a_gpu():
    ended = subprocess.run(
        [sys.executable, str(BENCHMARKS / "bench_codec.py"), "--device", "cuda"],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("bench_codec --device cuda: no CUDA device (torch ")
    assert "Traceback" not in ended.stderr


@each_device
def test_every_candidate_runs_and_is_given_its_share(program, monkeypatch, capsys, device):
    if device == "cpu":  # where there are no events: each call takes 1 ms

        def seconds(calls, repeats):
            for call in calls:
                call()
            return 1e-3, True

        monkeypatch.setattr(program, "device_seconds", seconds)
    rows, missing = program.measure([1], 2, device, bytes_in_turn=2 * program.MIB)
    names = [row["what"] for row in rows]
    assert len(names) == len(set(names)) >= 6 * len(_C.codec_names()) + 4 + len(program.OP_CODECS)
    for row in rows:
        assert row["share"] == pytest.approx(row["gb_per_s"] / row["copy_gb_per_s"])
        assert 0 < row["share"] < 100
    block = next(row for row in rows if row["what"] == "block_uint8 encode")
    assert 1.25 < block["moved_bytes"] / program.MIB < 1.26
    ranged = next(row for row in rows if row["what"] == "minmax_uint8 encode")
    assert 2.25 < ranged["moved_bytes"] / program.MIB < 2.26, "it reads its input twice"
    of_bf16 = next(row for row in rows if row["what"] == "block_uint8 encode of bf16")
    assert 0.75 < of_bf16["moved_bytes"] / program.MIB < 0.76
    # A rank has parts of 0.25 MiB. It encodes or decodes 6, sums 1 from 3 payloads, has 6 messages.
    whole = next(row for row in rows if row["what"] == "all-reduce block_uint8")
    assert 13.5 < whole["moved_bytes"] / program.MIB < 13.6
    assert program.targets(rows) == [], "1 MiB has no target"
    rows = [row | {"mib": 32} for row in rows]
    wanted = program.targets(rows)
    assert len(wanted) == 2 * len(_C.codec_names())
    gpu = {"gpu": "none", "driver": "0", "torch": "0", "cuda": "0"}
    program.show({"gpu": gpu, "rows": rows, "missing": missing, "targets": wanted})
    printed = capsys.readouterr().out
    assert f"target {program.TARGET:.2f}" in printed
    for name in missing:
        assert name in printed
