"""A small model on ranks, with bagua initialised around it, and what was raised."""

import datetime
import functools
import time

import bagua.torch_api as bagua
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import GradientAllReduceAlgorithm
from torch import nn

#: Seconds after which a rank that does not answer is given up, where a test does not say otherwise.
TIMEOUT = 20.0


def with_bagua_group(function, timeout=TIMEOUT):
    """Inside `function` bagua is initialised; afterwards it is not, whatever happened."""

    @functools.wraps(function)
    def run(*args):
        bagua.init_process_group(timeout=datetime.timedelta(seconds=timeout))
        dist.barrier()  # or a rank might be through before another has connected
        try:
            return function(*args)
        finally:
            bagua.destroy_process_group()

    return run


def network(outputs=3):
    """Three layers and a buffer, equal on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 20), nn.BatchNorm1d(20), nn.Linear(20, outputs))


def wrapped(model=None, algorithm=None, **options):
    """`model` (default: a new one) with an optimizer and an algorithm."""
    model = network() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    algorithm = GradientAllReduceAlgorithm() if algorithm is None else algorithm
    return model.with_bagua([optimizer], algorithm, **options), optimizer


def loss_of(model):
    """The loss of a random batch, in the dtype of the model."""
    dtype = next(model.parameters()).dtype
    return model(torch.randn(4, 5, dtype=dtype)).square().mean()


def step(model, optimizer):
    """One training step."""
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()


def steps_until_error(model, optimizer, most=100):
    """The error, as "Type: message", that ended training, and the seconds its step took."""
    for _ in range(most):
        start = time.monotonic()
        try:
            step(model, optimizer)
        except Exception as error:  # noqa: BLE001 - the tests look at it
            return f"{type(error).__name__}: {error}", time.monotonic() - start
    raise AssertionError(f"nothing was raised in {most} steps")


def error_of(function, *args, **options):
    """ "Type: message" of the exception that the call raises; fails if there is none."""
    try:
        function(*args, **options)
    except Exception as error:  # noqa: BLE001 - the tests look at it
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")


def is_last():
    """Whether this rank is the one that does something else."""
    return dist.get_rank() == dist.get_world_size() - 1


def barrier_of_store(name):
    """All ranks meet, through the store: also after communication has failed."""
    store = dist.distributed_c10d._get_default_store()
    store.add(f"barrier/{name}", 1)
    while store.add(f"barrier/{name}", 0) < dist.get_world_size():
        time.sleep(0.01)


#: Statements for scripts that `told` judges.
KILLED, STOPPED = (f"os.kill(os.getpid(), signal.{name})" for name in ("SIGKILL", "SIGSTOP"))


def told(ends, victim, most, least=0.0):
    """By rank what those beside the victim have printed: scripts that write the seconds of a wait
    and its error, and exit with 7. The seconds are between `least` and `most`."""
    texts = {}
    for rank, end in enumerate(ends):
        if rank != victim:
            assert end.returncode == 7, f"rank {rank}: {end.stdout}{end.stderr}"
            seconds, texts[rank] = end.stdout.split(" ", 1)
            assert least <= float(seconds) < most, end.stdout
    return texts
