"""Every code block of README.md and the guide runs: see support/documented.py."""

import inspect
import json
import re
import subprocess
import sys
import textwrap

import pytest
from support import documented, training
from support.documented import REPOSITORY

#: Pages whose fragments need other packages: tests/integrations/test_documented_code.py.
ELSEWHERE = re.compile(r"peft|lightning|accelerate|transformers|accelerator|fabric")
NEEDS_NO_EXAMPLE = {
    "destroy_process_group",
    "init_process_group",
}  # every script of the guide has them
GETTING_STARTED = REPOSITORY / "docs/examples/getting_started.py"
#: Without those with arguments, which are files of docs/examples with tests of their own.
SCRIPTS = [
    block
    for block in documented.scripts()
    if "parse_args" not in block.text and block.text.strip() != GETTING_STARTED.read_text().strip()
]


def wraps(block):
    return re.search(
        r"\.wrap\(|with_bagua\(|DistributedDataParallel\(|fsdp\.compress\(", block.text
    )


def fresh():
    """A model with an optimizer, as fragments expect them."""
    import torch

    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)]
    model = torch.nn.Sequential(*layers)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.01)}


def public_objects():
    """What scripts call, by name; names of the job's environment explain themselves."""
    import bagua.torch_api as bagua
    from bagua import comm_hooks, fsdp
    from bagua.torch_api import algorithms, checkpoint
    from bagua.torch_api.algorithms import diloco, q_adam
    from bagua.torch_api.data_parallel import DistributedDataParallel

    registered = [entry["algorithm"] for entry in algorithms.GlobalAlgorithmRegistry.values()]
    functions = [
        value for name in bagua.__all__ if inspect.isfunction(value := getattr(bagua, name))
    ]
    others = [q_adam.QAdamOptimizer, diloco.OuterSGD, diloco.Elastic, bagua.Guard]
    others += [checkpoint.save_checkpoint, checkpoint.load_latest, checkpoint.PerRank]
    others += [comm_hooks.register, comm_hooks.everywhere, fsdp.compress]
    others += [DistributedDataParallel]
    found = {value.__name__: value for value in [*registered, *functions, *others]}
    return {
        n: v for n, v in found.items() if not n.startswith("get_") and n not in NEEDS_NO_EXAMPLE
    }


def example_of(value):
    """The code behind "Example::" in a docstring, or behind a sentence that ends with "::"."""
    text = inspect.getdoc(value)
    begin = re.search(r"^Example::\n\n|::\n\n(?=    state = )", text, re.M)
    assert begin, f"{value.__name__} has no example"
    return textwrap.dedent(re.match(r"(?:(?:    .*)?\n)+", text[begin.end() :] + "\n").group())


def take_steps(names, steps=3):
    """Train what a fragment has wrapped, as its reader would."""
    model, optimizer = names["model"], names["optimizer"]
    for _ in range(steps):
        optimizer.zero_grad()
        names["loss_function"](model(names["inputs"]), names["targets"]).backward()
        optimizer.step()


@training.with_group
def run_fragments(page, folder):
    """The fragments of a page in turn; how many there were."""
    import bagua.torch_api as bagua
    import torch
    from bagua.torch_api.algorithms import GradientAllReduceAlgorithm

    names = {"bagua": bagua, "torch": torch, "folder": folder, "step": 0}
    names |= {"algorithm": GradientAllReduceAlgorithm(), **fresh()}
    names |= {"inputs": torch.randn(16, 8), "targets": torch.randn(16, 1)}
    names["loss_function"] = torch.nn.functional.mse_loss
    blocks = [b for b in documented.fragments()[page] if not ELSEWHERE.search(b.text)]
    for block in blocks:
        names |= fresh() if wraps(block) else {}
        try:
            exec(compile(block.text, str(block), "exec"), names)
            if wraps(block):
                take_steps(names)
        except Exception as error:
            raise AssertionError(f"{block}: {type(error).__name__}: {error}") from error
    abort = getattr(getattr(names["model"], "bagua_algorithm", None), "abort", None)
    if abort:
        abort(names["model"])
    return len(blocks)


def run_cells():
    """The cells of all tables, each with a separate model."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    count = 0
    for page, cells in documented.cells().items():
        for cell in cells:
            names = documented.imports_of_readme() | fresh()
            names["bagua"].init_process_group()
            if "(ddp" in cell:
                names["ddp"] = DistributedDataParallel(names["model"])
            if "fsdp" in cell:
                fully_shard(names["model"])
            try:
                if "init_process_group" not in cell:
                    exec(cell, names)
                names.get("ddp", names["model"])(torch.randn(4, 8)).sum().backward()
                dist.barrier()
            except Exception as error:
                raise AssertionError(f"{page}: {cell}: {type(error).__name__}: {error}") from error
            names["bagua"].destroy_process_group()
            count += 1
    return count


@training.with_group
def run_example(name, folder):
    import bagua.torch_api as bagua
    import torch
    import torch.distributed.checkpoint
    import torch.utils.tensorboard
    from bagua.torch_api import algorithms
    from torch.distributed.fsdp import fully_shard

    value = public_objects()[name]
    names = {**vars(algorithms), **public_objects(), "bagua": bagua, "torch": torch}
    names |= {"fully_shard": fully_shard, "dcp": torch.distributed.checkpoint, "folder": folder}
    names |= {"path": folder, "step": 1, "loss_function": torch.nn.functional.mse_loss, **fresh()}
    names |= {"inputs": torch.randn(16, 8), "targets": torch.randn(16, 1)}
    names["algorithm"] = algorithms.DecentralizedAlgorithm()
    if name in ("save_checkpoint", "PerRank"):
        names["model"].with_bagua([names["optimizer"]], names["algorithm"])
    exec(compile(example_of(value), name, "exec"), names)
    if hasattr(getattr(names["model"], "bagua_algorithm", None), "abort"):
        names["model"].bagua_algorithm.abort(names["model"])
    promised = re.search(r"#.* (\[[\d, ]+\])$", example_of(value), re.M)
    tensors = [v.flatten() for n, v in names.items() if isinstance(v, torch.Tensor)]
    wanted = torch.tensor(json.loads(promised.group(1)), dtype=torch.float32) if promised else None
    return wanted is None or any(t[: len(wanted)].equal(wanted) for t in tensors)


@pytest.mark.parametrize("name", public_objects())
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_example_of_a_docstring_runs(ranks, tmp_path, name):
    """And a rank has the numbers that a comment behind it promises."""
    assert any(ranks(2, run_example, name, str(tmp_path)))


@pytest.mark.parametrize("page", documented.fragments())
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_fragments_of_a_page_run_on_two_ranks(ranks, tmp_path, page):
    first, second = ranks(2, run_fragments, page, str(tmp_path))
    assert first == second <= len(documented.fragments()[page])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_cells_of_tables_run_below_the_imports_of_the_readme(ranks):
    count = sum(map(len, documented.cells().values()))
    assert ranks(2, run_cells, init=False) == [count, count]
    assert len(documented.cells()["README.md"]) >= 7


@pytest.mark.parametrize("block", SCRIPTS, ids=str)
def test_a_script_runs_on_two_ranks(run_script, block):
    for end in run_script(2, block.text):
        assert end.returncode == 0, f"{block}: {end.stderr}"


def test_the_first_script_learns_and_counts_its_bytes(run_script):
    first, second = run_script(2, GETTING_STARTED)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", first.stdout)]
    assert len(losses) == 4
    assert losses[-1] < min(0.01, losses[0])
    sent = [int(number) for number in re.findall(r"(\d+) bytes sent", first.stdout)]
    parameters = 64 * 3 + 65
    assert sent == sorted(sent)
    assert 0 < sent[-1] < 200 * parameters * 4
    assert second.stdout == ""


def test_the_training_example_learns_and_resumes(run_script, tmp_path):
    path = REPOSITORY / "docs/examples/train.py"
    first, second = run_script(2, path, ["--folder", tmp_path])
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    accuracies = [float(a) for a in re.findall(r"accuracy ([\d.]+)", first.stdout)]
    assert len(accuracies) == 4
    assert accuracies[-1] > 0.9
    assert re.search("^ByteGrad, 2 ranks, 20. rounds", first.stdout, re.M)
    again, _ = run_script(2, path, ["--folder", tmp_path, "--steps", "250"])
    assert re.findall(r"step (\d+)", again.stdout) == ["250"]


def test_every_command_is_run_by_a_test_that_is_there():
    for page in documented.pages():
        for block in documented.blocks(page):
            if block.language != "bash" or block.text.startswith("#!"):
                continue
            for command in block.commands():
                owners = [test for rule, test in documented.COMMANDS if re.fullmatch(rule, command)]
                assert owners, f"{block}: no test runs {command!r}"
                assert (REPOSITORY / owners[0]).exists(), owners[0]


def test_every_block_has_a_language():
    for page in documented.pages():
        for block in documented.blocks(page):
            assert block.language in {"python", "bash", "text", "diff", "dockerfile"}, block


def test_the_job_of_the_slurm_page_starts_both_nodes(tmp_path):
    """With stand-ins for Slurm's programs and torchrun, which writes its arguments."""
    job = REPOSITORY / "docs/examples/job.sbatch"
    programs = {
        "scontrol": 'test "$1 $2 $3" = "show hostnames a,b" && printf "a\\nb\\n"',
        "srun": 'for n in 0 1; do SLURM_NODEID=$n "$@"; done',
        "torchrun": 'echo "$GLOO_SOCKET_IFNAME: $@"',
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "a,b", "SLURM_NNODES": "2"}
    end = subprocess.run(["bash", job], env=env, capture_output=True, text=True, check=True)
    line = (
        "eth0: --nnodes=2 --nproc_per_node=2 --node_rank={} --master_addr=a --master_port=29500 "
        "--max-restarts=3 docs/examples/train.py --folder checkpoints"
    )
    assert end.stdout.splitlines() == [line.format(0), line.format(1)]


def test_the_table_of_the_scaling_page_is_what_its_command_prints():
    page = (REPOSITORY / "docs/scaling.md").read_text()
    command = re.search(r"^python (benchmarks/scaling.*)$", page, re.M).group(1).split()
    end = subprocess.run(
        [sys.executable, *command], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert re.findall(r"\d+\.\d\d|\d+ ms", end.stdout)
    for figure in re.findall(r"\b\d+\.\d\d\b", end.stdout):
        assert f"| {figure} |" in page, figure
