"""Every algorithm in turn, trained from its last checkpoint; ranks die where a plan says so.

Started by torchrun: `restarting.py FOLDER PLAN`. PLAN is JSON, one entry per start that ends badly:
{"rank": which dies, "step": at the latest at this one, "where": "backward", "saving" or "any",
"seconds": for "any", after which time}. The start after the last entry trains to the end and leaves
`end-<rank>.json`: by algorithm the bits of the weights, and where it began.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import bagua.torch_api as bagua
from bagua._core.state import step_folder as _step_folder
from bagua.torch_api.checkpoint import load_latest, save_checkpoint
from support import every_algorithm, training
from support.checkpoint_training import network

STEPS, SAVE_EVERY = 20, 5
#: The last one is in its middle when a rank dies at a step.
ALGORITHMS = [
    "async",
    "gradient_allreduce",
    "bytegrad",
    "qadam",
    "power_sgd",
    "decentralized-all",
    "decentralized-shift-one",
    "low_precision_decentralized",
    "sparse",
]


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_while_saving(step):
    """The next saving of that step gets as far as this rank's files."""
    write = _step_folder.write

    def write_and_die(part, *args, **kwargs):
        lines = write(part, *args, **kwargs)
        if f"step-{step:09d}" in str(part):
            die()
        return lines

    _step_folder.write = write_and_die


class Death:
    """When and where this process dies, if it does."""

    def __init__(self, plan, start):
        entry = plan[start] if start < len(plan) else None
        mine = entry is not None and entry["rank"] == bagua.get_rank()
        self.last_step = STEPS if entry is None else entry["step"]
        self.in_backward = mine and entry["where"] == "backward"
        if mine and entry["where"] == "saving":
            die_while_saving(entry["step"])
        if mine and entry["where"] == "any":
            timer = threading.Timer(entry["seconds"], die)
            timer.daemon = True
            timer.start()

    def comes_in(self, name, step):
        return self.in_backward and name == ALGORITHMS[-1] and step == self.last_step - 1


def train(name, folder, death=None):
    """(the step it began with, the bits that it ended with); saves where a death may come."""
    model, optimizer = every_algorithm.wrapped(name, network(0))
    state = {"model": model, "optimizer": optimizer, "algorithm": model.bagua_algorithm}
    first = load_latest(folder, state) or 0
    for step in range(first, STEPS if death is None else death.last_step):
        optimizer.zero_grad()
        data = training.batch(step, bagua.get_rank(), rows=8)
        loss = training.squared_error(model, data)
        if death is not None and death.comes_in(name, step):
            next(model.parameters()).register_hook(lambda gradient: die())
        loss.backward()
        optimizer.step()
        if death is not None and (step + 1) % SAVE_EVERY == 0:
            save_checkpoint(folder, state, step + 1)
    if name == "async":
        model.bagua_algorithm.abort(model)
    return first, training.bits([*model.parameters(), *model.buffers()])


def train_all(folder, death=None):
    """By algorithm what :func:`train` returns."""
    return {name: train(name, Path(folder) / name, death) for name in ALGORITHMS}


@training.with_group
def uninterrupted(folder):
    return train_all(folder)


def main():
    folder, plan = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(1)
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    bagua.init_process_group()
    results = train_all(folder, Death(plan, start))
    if start < len(plan):
        threading.Event().wait(60)  # for the end that the plan has for this start
    Path(folder, f"end-{bagua.get_rank()}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
