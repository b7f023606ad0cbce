"""Shared by all benchmarks: the machine's description, timing and the results folder."""

import json
import os
import platform
import statistics
import subprocess
import time
from pathlib import Path

import torch

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "build" / "benchmarks"  # not committed: tables in docs/ have the figures


def _commit():
    def git(*arguments):
        return subprocess.run(
            ["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False
        ).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no")
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + ("+changes" if changed else "")


def _processor():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def machine():
    """The machine, the software and the commit that a result belongs to."""
    return {
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda_device": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def timed(function, repeats, warmup):
    """Seconds per call: ``{"median": ..., "min": ...}`` of `repeats` calls after `warmup` calls."""
    for _ in range(warmup):
        function()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return {"median": statistics.median(seconds), "min": min(seconds)}


def timed_in_turns(functions, repeats, warmup):
    """As `timed` for a dict of functions that take turns: what disturbs one disturbs all.

    In its turn a function is called twice and timed the second time: it finds the caches as it
    leaves them itself, and does not pay for writing back what the one before it wrote.
    """
    seconds = {name: [] for name in functions}
    for turn in range(warmup + repeats):
        for name, function in functions.items():
            function()
            start = time.perf_counter()
            function()
            elapsed = time.perf_counter() - start
            if turn >= warmup:
                seconds[name].append(elapsed)
    return {
        name: {"median": statistics.median(values), "min": min(values)}
        for name, values in seconds.items()
    }


def keep_cases(name, cases, keys, **more):
    """Writes build/benchmarks/<name>.json: `cases`, in place of those of equal `keys`, beside the
    others that are there. more: further entries.
    """

    def identity(case):
        return tuple(case.get(key) for key in keys)

    path, mine = RESULTS / f"{name}.json", {identity(case) for case in cases}
    before = json.loads(path.read_text())["cases"] if path.exists() else []
    others = [case for case in before if identity(case) not in mine]
    write_results(name, {"machine": machine(), **more, "cases": others + cases})


def write_results(name, payload):
    """Writes ``build/benchmarks/<name>.json`` and returns its path."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(payload, indent=2) + "\n")
    return path
