"""Training that is saved in a folder and goes on from it: what the tests of checkpoints share."""

import torch
import torch.distributed as dist
from bagua.torch_api.checkpoint import load_latest, save_checkpoint
from support import every_algorithm, training
from torch import nn

HIDDEN = 20


def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(training.FEATURES, HIDDEN),
        nn.BatchNorm1d(HIDDEN),
        nn.Linear(HIDDEN, training.OUTPUTS),
    )


def wrapped(name, seed=0):
    """A model with that algorithm, its optimizer, and the state to save."""
    model, optimizer = every_algorithm.wrapped(name, network(seed))
    state = {"model": model, "optimizer": optimizer, "algorithm": model.bagua_algorithm}
    return model, optimizer, state


def steps(model, optimizer, numbers):
    """The steps with those numbers, on this rank's data."""
    data = [training.batch(number, dist.get_rank(), rows=8) for number in numbers]
    training.train(model, optimizer, data)


@training.with_group
def train_and_save(name, folder, upto, seed=0):
    """Goes on from what is in the folder; saves every second step."""
    model, optimizer, state = wrapped(name, seed)
    first = load_latest(folder, state) or 0
    loaded = model.bagua_algorithm.state_dict()
    for step in range(first, upto):
        steps(model, optimizer, [step])
        if (step + 1) % 2 == 0:
            save_checkpoint(folder, state, step + 1)
    if name in every_algorithm.SYNCHRONOUS and name not in every_algorithm.OWN_WEIGHTS:
        training.assert_ranks_agree(model)
    if name == "async":
        model.bagua_algorithm.abort(model)
    return first, training.bits(model.parameters()), loaded, model.bagua_algorithm.state_dict()


@training.with_group
def refusal(name, folder):
    """The exception of loading from the folder."""
    _, _, state = wrapped(name, seed=3)
    return training.error_of(lambda: load_latest(folder, state))


def file(folder, step, rank, name="__0_0.distcp"):
    """A file of a checkpoint: by default the one with a rank's tensors."""
    return folder / f"step-{step:09d}" / f"rank-{rank}" / name
