"""What every benchmark shares: the machine's description, timing and the results folder."""

import json
import os
import platform
import statistics
import subprocess
import time
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


def _commit():
    def git(*arguments):
        return subprocess.run(
            ["git", *arguments], cwd=RESULTS.parent, capture_output=True, text=True, check=False
        ).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":!benchmarks/results")
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
    return timed_in_turns({"": function}, repeats, warmup)[""]


def timed_in_turns(functions, repeats, warmup):
    """As `timed` for a dict of functions that take turns: what disturbs one disturbs all."""
    seconds = {name: [] for name in functions}
    for turn in range(warmup + repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            elapsed = time.perf_counter() - start
            if turn >= warmup:
                seconds[name].append(elapsed)
    return {
        name: {"median": statistics.median(values), "min": min(values)}
        for name, values in seconds.items()
    }


def write_results(name, payload):
    """Writes ``results/<name>.json`` next to this file and returns its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(payload, indent=2) + "\n")
    return path
