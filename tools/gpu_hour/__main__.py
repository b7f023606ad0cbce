"""Builds, tries, checks and measures bagua on a machine with one NVIDIA GPU, in 15 minutes or more.

    python3 tools/gpu_hour [STEP...]   see docs/cuda-evidence.md, "A quarter of an hour with a GPU"

Needs nvcc, and a Python with torch for CUDA, cmake, ninja and pytest; no network and no virtual
environment. Each step has a limit of seconds, and those after a failed one run too, except after
the build. A step that has passed is not repeated by a later call, unless it is named.
"""

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "gpu"
EXTENSION = "_C" + sysconfig.get_config_var("EXT_SUFFIX")
PROGRAMS = Path(__file__).with_name("programs_on_gpu.py")
CALLS = Path(__file__).with_name("nccl_calls.py")
FATES = Path(__file__).with_name("fates.py")
# Ids of tests on a GPU; "cuda" alone is the name of their folder.
ON_GPU = "cuda] or cuda-"
NO_TOOL = 127
OUT_OF_TIME = 124
SECONDS_TO_END = 8
SECONDS_FOR_A_STEP = 25
KERNELS = "regex:_tiles|_slices|count_|move_chosen|read_|sum_values|orthonormalise|_bands|indices"
SECTIONS = ("SpeedOfLight", "LaunchStats", "Occupancy", "WarpStateStats")
IS_THERE = "from bagua import _C; assert _C.has_cuda_codecs() and _C.has_nccl"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "steps",
        nargs="*",
        metavar="STEP",
        help="these only, also if they have passed; without names, those that have not passed yet. "
        f"Of: {', '.join(STEPS)}",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=WORK / "results",
        help="folder of the results, at most 8 files (default: build/gpu/results)",
    )
    parser.add_argument(
        "--seconds",
        type=int,
        default=560,
        help="for this call (default: 560); several calls one after the other do the same as a "
        "long one",
    )
    parser.add_argument("--build", type=Path, default=WORK / "cmake", help="CMake's folder")
    parser.add_argument(
        "--prebuilt",
        type=Path,
        help="extension.tar.gz of an earlier call with the same Python, torch and GPU, in place of "
        "a build",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="the CPU in the GPU's place: programs run small, tests are collected",
    )
    known = parser.parse_args()
    if unknown := set(known.steps) - set(STEPS):
        parser.error(f"there is no step {', '.join(sorted(unknown))}")
    return known


class Hour:
    """The steps of one call: where they write, and what they run."""

    def __init__(self, options):
        self.options = options
        self.out = options.out.resolve()
        self.package = options.build.resolve() / "python"
        self.out.mkdir(parents=True, exist_ok=True)
        self.cores = len(os.sched_getaffinity(0))
        folders = ("tests", "tests/cuda", "benchmarks", "tools/gpu_hour")
        paths = [self.package, *(ROOT / folder for folder in folders)]
        tools = ["/usr/local/cuda/bin", *Path("/opt/nvidia/nsight-compute").glob("*")]
        self.environment = {
            **os.environ,
            "PATH": os.pathsep.join([*map(str, tools), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "OMP_NUM_THREADS": "1",
            "GPU_HOUR_OUT": str(self.out),
            "GPU_HOUR_DEVICE": "cpu" if options.dry_run else "cuda",
        }
        if not options.dry_run:
            self.environment["FAIL_WITHOUT_CUDA"] = "1"
        for name in ("NCCL_COMM_BLOCKING", "BAGUA_COMM", "BAGUA_LANES"):
            self.environment.pop(name, None)

    def run(self, *command, environment=None, seconds):
        """The command's status and output; its processes are ended after `seconds`."""
        with subprocess.Popen(
            list(map(str, command)),
            cwd=ROOT,
            env={**self.environment, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process:
            try:
                output, status = process.communicate(timeout=max(seconds, 1))[0], process.returncode
            except subprocess.TimeoutExpired:
                output, status = self._end(process), OUT_OF_TIME
        return status, output.decode(errors="replace")

    def _end(self, process):
        for sent in (signal.SIGTERM, signal.SIGKILL):
            os.killpg(process.pid, sent)
            try:
                return process.communicate(timeout=SECONDS_TO_END)[0]
            except subprocess.TimeoutExpired:
                continue
        return b"(a process outlives its group; its output is lost)"

    def tool(self, name):
        return shutil.which(name, path=self.environment["PATH"])

    def program(self, name):
        return (sys.executable, PROGRAMS, name)

    def pytest(self, *files, matching=ON_GPU, workers=1):
        """A command for tests; in a dry run they are collected only: `make test` runs them on
        CPU."""
        # Without --strict-markers no plug-in is needed, neither pytest-timeout nor another.
        own = ("-o", "addopts=--import-mode=importlib", "-p", "no:cacheprovider")
        command = [sys.executable, "-m", "pytest", *own, "-q", "--tb=short", "-rfE"]
        if self.options.dry_run:
            command.append("--collect-only")
        elif workers > 1 and importlib.util.find_spec("xdist"):
            command += ["-n", str(min(workers, self.cores)), "--dist", "load"]
        return [*command, *(f"tests/cuda/{file}" for file in files), "-k", matching]


# ---- the steps: each is given the hour and its seconds, and returns a status and an output ----


def machine(hour, seconds):
    said = []
    for command in (
        ("nvidia-smi",),
        ("nvcc", "--version"),
        ("g++", "--version"),
        ("cmake", "--version"),
        (sys.executable, "-m", "torch.utils.collect_env"),
    ):
        there = hour.tool(command[0])
        said.append(hour.run(*command, seconds=seconds)[1] if there else f"no {command[0]}\n")
    said.append(f"{hour.cores} cores\n")
    return 0, "".join(said)


def build(hour, seconds):
    end = time.monotonic() + seconds
    shutil.copytree(ROOT / "python", hour.package, dirs_exist_ok=True)
    package = hour.package / "bagua"
    if hour.options.prebuilt:
        with tarfile.open(hour.options.prebuilt) as built:
            built.extractall(package, filter="data")
        return hour.run(sys.executable, "-c", IS_THERE, seconds=seconds)
    query = ("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    said = hour.run(*query, seconds=30)[1].split() if hour.tool("nvidia-smi") else []
    own = [f"-DCMAKE_CUDA_ARCHITECTURES={said[0].replace('.', '')}-real"] if said else []
    status, log = hour.run(
        *("cmake", "-S", ROOT, "-B", hour.options.build, "-G", "Ninja"),
        *("-DBAGUA_CUDA=ON", "-DBAGUA_NCCL=ON", f"-DPython_EXECUTABLE={sys.executable}"),
        f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={package}",
        *own,
        seconds=seconds,
    )
    if status == 0:
        make = ("cmake", "--build", hour.options.build, "-j", hour.cores, "--", "-k", "0")
        status, more = hour.run(*make, seconds=end - time.monotonic())
        log += more
    if status == 0:
        status, more = hour.run(sys.executable, "-c", IS_THERE, seconds=end - time.monotonic())
        log += more
    if status == 0 and not hour.options.dry_run:
        stripped = WORK / "stripped.so"
        subprocess.run(["strip", "-o", stripped, package / EXTENSION], check=True)
        with tarfile.open(hour.out / "extension.tar.gz", "w:gz") as built:
            built.add(stripped, EXTENSION)
            built.add(package / "_build.py", "_build.py")
    return status, log


def calls_of_torch(hour, seconds):
    return hour.run(sys.executable, CALLS, "torch", seconds=seconds)


def calls(hour, seconds):
    return hour.run(sys.executable, CALLS, "ours", seconds=seconds)


def fates(hour, seconds):
    return hour.run(sys.executable, FATES, seconds=seconds)


def smoke(hour, seconds):
    return hour.run(*hour.program("smoke"), seconds=seconds)


def nccl(hour, seconds):
    """Also what has no case on the CPU, and one GPU is enough for."""
    matching = f"{ON_GPU} or group_of_one or two_hosts"
    files = ("test_nccl_alone.py", "test_communicators.py")
    return hour.run(*hour.pytest(*files, matching=matching), seconds=seconds)


def codecs(hour, seconds):
    return hour.run(*hour.pytest("test_codecs.py", "test_graphs.py", workers=6), seconds=seconds)


def ops(hour, seconds):
    return hour.run(*hour.pytest("test_ops.py", workers=6), seconds=seconds)


def ranks(hour, seconds):
    """Three processes a test, and some measure time: few at once."""
    own = ("test_codecs.py", "test_graphs.py", "test_ops.py", "test_nccl_alone.py")
    own += ("test_communicators.py", "test_bench_codec.py")
    files = [file.name for file in sorted((ROOT / "tests/cuda").glob("test_*.py"))]
    others = [file for file in files if file not in own]
    return hour.run(*hour.pytest(*others, workers=4), seconds=seconds)


def bench(hour, seconds):
    if hour.options.dry_run:
        return hour.run(*hour.pytest("test_bench_codec.py", matching="cuda"), seconds=seconds)
    sizes = ("--device", "cuda", "--mib", "8", "128", "--repeats", "10")
    done = hour.run(sys.executable, "benchmarks/bench_codec.py", *sizes, seconds=seconds)
    measured = ROOT / "build/benchmarks/bench_codec_cuda.json"
    if measured.exists():
        shutil.copy(measured, hour.out / "bench_codec.json")
    return done


def two(hour, seconds):
    return hour.run(*hour.program("two"), seconds=seconds)


def steps(hour, seconds):
    return hour.run(*hour.program("steps"), seconds=seconds)


def kernels(hour, seconds):
    command = hour.program("kernels")
    if hour.options.dry_run:
        return hour.run(*command, seconds=seconds)
    if not hour.tool("ncu"):
        return NO_TOOL, "no ncu"
    sections = [word for section in SECTIONS for word in ("--section", section)]
    status, said = hour.run(
        *("ncu", "--clock-control", "none", "--target-processes", "all", "--launch-count", "200"),
        *("--kernel-name", KERNELS, *sections, "--csv", "--page", "details"),
        *command,
        seconds=seconds,
    )
    (hour.out / "kernels.txt").write_text(said)
    wanted = ("DRAM Throughput", "Duration", "Achieved Occupancy")
    lines = [line for line in said.splitlines() if any(f'"{each}"' in line for each in wanted)]
    return status, "\n".join(line[:300] for line in lines)


def sanitizer(tool):
    """The step that runs ops of thread ranks, and some of the codecs' tests, under that tool.

    racecheck takes a hundred times as long as the others: it has every kernel on small data.
    """

    def run(hour, seconds):
        if tool == "racecheck":
            command = hour.program("small")
        else:
            matching = f"({ON_GPU}) and not 16_bit"
            command = hour.pytest("test_ops.py", "test_codecs.py", matching=matching)
            command += ["-o", "timeout=0"]
        if not hour.options.dry_run:
            if not hour.tool("compute-sanitizer"):
                return NO_TOOL, "no compute-sanitizer"
            watched = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9")
            command = [*watched, "--print-limit", "20", *command]
        # Without torch's cache each tensor is an allocation of its own, whose ends are watched.
        environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        status, said = hour.run(*command, environment=environment, seconds=seconds)
        with (hour.out / "sanitizer.txt").open("a") as file:
            file.write(f"==== {tool}: {status}\n{said[-100_000:]}\n")
        return status, said

    return run


# Name -> the step and its seconds, the most valuable first. Those up to "fates" fill a call of 560
# seconds, "steps" to "bench" one of 240.
STEPS = {
    "machine": (machine, 30),
    "torch": (calls_of_torch, 60),
    "build": (build, 260),
    "smoke": (smoke, 70),
    "calls": (calls, 40),
    "fates": (fates, 200),
    "steps": (steps, 110),
    "racecheck": (sanitizer("racecheck"), 75),
    "bench": (bench, 80),
    "two": (two, 400),
    "nccl": (nccl, 240),
    "codecs": (codecs, 200),
    "ranks": (ranks, 400),
    "memcheck": (sanitizer("memcheck"), 200),
    "kernels": (kernels, 200),
    "ops": (ops, 150),
    "synccheck": (sanitizer("synccheck"), 200),
    "initcheck": (sanitizer("initcheck"), 200),
}


def run_steps(hour):
    """A row for each step of this call: name, status, seconds, limit."""
    options, end = hour.options, time.monotonic() + hour.options.seconds
    passed = hour.out / "results.json"
    known = json.loads(passed.read_text()) if passed.exists() and not options.dry_run else {}
    done = {row["step"] for call in known.get("calls", []) for row in call if row["status"] == 0}
    rows = []
    for name, (step, limit) in STEPS.items():
        if name not in (options.steps or STEPS) or (name in done and not options.steps):
            continue
        seconds = min(limit, end - time.monotonic())
        if seconds < SECONDS_FOR_A_STEP:
            rows.append({"step": name, "status": "left out", "seconds": 0, "limit": limit})
            continue
        print(f"\n==== {name} (at most {seconds:.0f} s)", flush=True)
        begin = time.monotonic()
        try:
            status, said = step(hour, seconds)
        except Exception as error:  # noqa: BLE001 - reported, and the next step runs
            status, said = 1, f"{type(error).__name__}: {error}"
        with (hour.out / "log.txt").open("a") as log:
            log.write(f"\n==== {name}\n{said[-400_000:]}\n")
        print("\n".join(line[:300] for line in said.splitlines()[-12:]), flush=True)
        spent = round(time.monotonic() - begin, 1)
        rows.append({"step": name, "status": status, "seconds": spent, "limit": limit})
        if name == "build" and status != 0:
            print("without the extension nothing else can run")
            break
    known = json.loads(passed.read_text()) if passed.exists() else {}
    known["calls"] = [*known.get("calls", []), rows]
    passed.write_text(json.dumps(known, indent=1))
    return rows


def main():
    hour = Hour(arguments())
    if hour.options.dry_run:
        shutil.rmtree(hour.out)
        hour.out.mkdir()
    rows = run_steps(hour)
    lines = [f"{'step':12}{'status':>10}{'seconds':>10}{'limit':>8}"]
    lines += ["{step:12}{status!s:>10}{seconds:>10}{limit:>8}".format(**row) for row in rows]
    lines.append(f"0: passed, {OUT_OF_TIME}: out of time, {NO_TOOL}: a tool is missing")
    summary = "\n".join(lines)
    print(f"\n{summary}\nResults are in {hour.out}.")
    (hour.out / "summary.txt").write_text(summary + "\n")
    sys.exit(any(row["status"] != 0 for row in rows))


if __name__ == "__main__":
    main()
