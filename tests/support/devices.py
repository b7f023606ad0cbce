"""The devices that tests run on: each device-independent body on CPU too, which proves the body."""

import contextlib
import itertools

import pytest
import torch
from bagua import _C
from support.cases import looped
from support.processes.pool import MAX_RANKS

NEEDS_CUDA = pytest.mark.needs_cuda
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)]
each_device = pytest.mark.parametrize("device", DEVICES)
# The two, and "nccl": each rank has a separate GPU.
each_place = pytest.mark.parametrize("place", [*DEVICES, pytest.param("nccl", marks=NEEDS_CUDA)])


def over_on_each_device(**axes):
    """As :func:`support.cases.over`, on a GPU; the last combination alone on CPU, where the test
    would compare the CPU with itself: it proves the body."""

    def decorate(test):
        def combinations(fixtures):
            every = list(itertools.product(*axes.values()))
            return every if fixtures["device"] == "cuda" else every[-1:]

        return each_device(looped(test, axes, combinations))

    return decorate


def cases_on_each(place, **axes):
    """Every combination as a separate test on GPUs, for tests of processes; the last on CPU.

    place: the argument that names where: "device", or "place" of :data:`each_place`.
    """
    every = list(itertools.product(*axes.values()))
    others = ["cuda", "nccl"] if place == "place" else ["cuda"]
    cases = [pytest.param(gpu, *values, marks=NEEDS_CUDA) for gpu in others for values in every]
    return pytest.mark.parametrize((place, *axes), [("cpu", *every[-1]), *cases])


def missing_for_cuda():
    """Why tests of CUDA cannot run here; empty where they can."""
    if not torch.cuda.is_available():
        return f"no CUDA device (torch {torch.__version__})"
    if not _C.has_cuda_codecs():
        return "no CUDA kernels in this build: -C cmake.define.BAGUA_CUDA=ON says why"
    return ""


def gpus():
    """How many there are, which asks for no context."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def ranks_on(place, fewest=2, most=MAX_RANKS):
    """How many ranks a test has at that place, which is as many as there are GPUs for "nccl", and 3
    elsewhere; fewest, most: that it can have. Skips it where there are too few GPUs."""
    if place != "nccl":
        return min(max(fewest, 3), most)
    if gpus() < fewest:
        pytest.skip(f"{gpus()} GPU(s): NCCL takes one rank on each, and this needs {fewest}")
    return min(gpus(), most)


def delay(device, cycles=200_000_000):
    """The device's current stream has nothing done for about a tenth of a second; none on CPU."""
    if torch.device(device).type == "cuda":
        torch.cuda._sleep(cycles)


def side_stream(device):
    """A context in which work goes to a stream that is not the default one; none on CPU."""
    if torch.device(device).type == "cpu":
        return contextlib.nullcontext()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)
