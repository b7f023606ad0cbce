"""Ranks that Ray Train and Spark start, recipes of their page; and trainers with many dependencies.

They run in the environment of `make engines`.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from integrations.test_trainers import assert_as_own_with_fewer_bytes

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/integrations/ray-spark.md"
PROGRAM = Path(__file__).with_name("other_trainers.py")
PYTHON = ROOT / "build/engines/bin/python"
SECONDS = 150  # Ray needs ten to start

LOOP = """
    import os, pathlib, signal, time

    rank = bagua.get_rank()
    batches = torch.Generator().manual_seed(rank)
    for step in range(config.get("steps", 20)):
        if step == 10 and rank == config.get("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(torch.randn(16, 64, generator=batches)).square().mean().backward()
        optimizer.step()
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    pathlib.Path(os.environ["WEIGHTS"], str(rank)).write_bytes(weights)
    return "trained"
"""
KILLED = '{"killed": 1, "steps": 100000}'

RAY = """
import sys
import ray

try:
    ray.init(num_cpus=2, include_dashboard=False)
except Exception as error:
    print(error)
    sys.exit(77)
"""


def recipe(word):
    """The block of the page that has this word, with a loop."""
    blocks = re.findall(r"^```text\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    (block,) = [block for block in blocks if word in block]
    assert "    ...  # the loop\n" in block
    seeded = block.replace("    import torch\n", "    import torch\n\n    torch.manual_seed(0)\n")
    return seeded.replace("    ...  # the loop\n", LOOP)


SPARK_ARGUMENTS = "--master local[2] --conf spark.ui.enabled=false pyspark-shell"


def run(python, folder, text, *arguments, **env):
    """Status and output of a script, which is ended with its children after SECONDS."""
    script = folder / "script.py"
    script.write_text(text)
    of_launchers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    inherited = {name: value for name, value in os.environ.items() if name not in of_launchers}
    inherited["PATH"] = f"{PYTHON.parent}:{inherited['PATH']}"
    settings = {"WEIGHTS": str(folder), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0",
                "PYSPARK_PYTHON": str(PYTHON), "PYSPARK_SUBMIT_ARGS": SPARK_ARGUMENTS}  # fmt: skip
    process = subprocess.Popen(
        [str(python), *arguments, str(script)],
        env=inherited | settings | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output


def trained(folder):
    weights = [(folder / str(rank)).read_bytes() for rank in range(2)]
    assert weights[0] == weights[1]
    return weights[0]


@pytest.fixture(scope="module")
def by_torchrun(tmp_path_factory):
    """The weights of the function of the page, started by torchrun."""
    folder = tmp_path_factory.mktemp("torchrun")
    function = recipe("pyspark").partition("\n\nSparkSession.")[0].partition("\n\n\n")[2]
    torchrun = ("-m", "torch.distributed.run", "--nproc_per_node=2")
    code, output = run(sys.executable, folder, f"{function}\n\ntrain({{}})\n", *torchrun)
    assert code == 0, output
    return trained(folder)


def needs(package):
    found = list((ROOT / "build/engines").glob(f"lib/*/site-packages/{package}"))
    return pytest.mark.skipif(not found, reason=f"no {package} beside .venv: make engines")


def by_ray(folder, config, **env):
    text = recipe("ray.train").replace("TorchTrainer(train,", f"TorchTrainer(train, {config},")
    text = text.replace("(train, {", "(train, train_loop_config={")
    code, output = run(PYTHON, folder, RAY + text, **env)
    if code == 77:
        pytest.skip(f"Ray did not start: {output.splitlines()[-1]}")
    return code, output


@needs("ray")
@pytest.mark.timeout(400)
def test_ray_trains_as_torchrun(tmp_path, by_torchrun):
    code, output = by_ray(tmp_path, "{}")
    assert code == 0, output
    assert trained(tmp_path) == by_torchrun


@needs("ray")
@pytest.mark.timeout(400)
def test_fit_of_ray_names_a_killed_worker(tmp_path):
    code, output = by_ray(tmp_path, KILLED, RAY_TRAIN_HEALTH_CHECK_INTERVAL_S="10")
    assert code == 1, output
    (_, error) = output.rsplit("WorkerGroupError", 1)
    assert "[Rank 1 Error Snippet]" in error
    assert "The actor is dead because its worker process has died" in error
    assert "[Rank 0 Error Snippet]" in error
    assert re.search(r"BaguaError: rank 1 was killed, stopped or cut off", error)


#: local_mode of TorchDistributor, and the words of the error of a killed rank.
SPARK = {
    True: "TorchDistributor failed during training",
    False: "barrier task ResultTask(1, 1) finished unsuccessfully",
}


@needs("pyspark")
@pytest.mark.skipif(shutil.which("java") is None, reason="no Java: install default-jre-headless")
@pytest.mark.parametrize("local_mode", SPARK)
@pytest.mark.timeout(400)
def test_spark_trains_as_torchrun_and_names_a_killed_rank(tmp_path, by_torchrun, local_mode):
    text = recipe("pyspark").replace("local_mode=False", f"local_mode={local_mode}")
    call = text[text.index("TorchDistributor(num") :].strip()
    text = text.replace(call, f"print('returned', {call})\n")
    code, output = run(PYTHON, tmp_path, text + call.replace("{}", KILLED))
    assert "returned trained" in output, output
    assert trained(tmp_path) == by_torchrun
    assert code == 1
    assert "rank      : 1 (local_rank:" in output
    assert "(SIGKILL)" in output
    assert SPARK[local_mode] in output


@needs("fastai")
@needs("ultralytics")
@pytest.mark.parametrize("trainer", ["by_fastai", "by_ultralytics", "by_ultralytics_inside"])
@pytest.mark.timeout(400)
def test_fastai_and_ultralytics_train_as_by_their_own_wrapper(tmp_path, trainer):
    torchrun = ("-m", "torch.distributed.run", "--nproc_per_node=2")
    arguments = f"import sys, runpy\nsys.argv = {[str(PROGRAM), trainer, str(tmp_path)]}\n"
    text = f"{arguments}runpy.run_path({str(PROGRAM)!r}, run_name='__main__')\n"
    code, output = run(PYTHON, tmp_path, text, *torchrun, YOLO_CONFIG_DIR=str(tmp_path))
    assert code == 0, output
    results = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert_as_own_with_fewer_bytes(*results, trainer)
