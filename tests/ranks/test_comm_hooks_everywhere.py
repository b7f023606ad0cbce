"""``comm_hooks.everywhere``: a hook for each DistributedDataParallel that others construct."""

import warnings

import pytest
import torch
import torch.distributed as dist
from bagua import comm_hooks
from bagua.torch_api.algorithms import ByteGradAlgorithm
from bagua.torch_api.data_parallel import DistributedDataParallel as Own
from support import hooked, training
from support.cases import over
from torch.nn.parallel import DistributedDataParallel

TORCHS = DistributedDataParallel.__init__


class Subclass(DistributedDataParallel):
    def __init__(self, module):
        super().__init__(module, bucket_cap_mb=0.004)
        self.tag = "of the library"


def library(make=DistributedDataParallel, seed=0):
    """A library that constructs DistributedDataParallel, and takes no argument for it."""
    torch.manual_seed(seed)
    return make(hooked.network())


def trained(ddp):
    return hooked.train("default", ddp, training.sgd(ddp))


def bytegrad():
    return ByteGradAlgorithm(hierarchical=False)


ALGORITHMS = {"exact": lambda: "gradient_allreduce", "bytegrad": bytegrad}


@training.with_group
def beside_register(name, make):
    """Digests by `everywhere` and by `register`, and what both sent."""
    with comm_hooks.everywhere(ALGORITHMS[name]()) as handles:
        inside = library(make)
        made = len(handles)
    explicit = library(make)
    handle = comm_hooks.register(explicit, ALGORITHMS[name]())
    digests = trained(inside), trained(explicit)
    assert made == len(handles) == 1
    return digests, [h.stats()["total"]["bytes_sent"] for h in (handles[0], handle)]


@over(name=ALGORITHMS, make=[DistributedDataParallel, Subclass])
def test_everywhere_gives_the_bits_and_bytes_of_register(ranks, name, make):
    for (inside, explicit), (sent, expected) in ranks(2, beside_register, name, make):
        assert inside == explicit
        assert sent == expected > 0


@training.with_group
def several():
    """Handles, and the type of the algorithm, of objects made in, between and after contexts."""
    with comm_hooks.everywhere(bytegrad()) as outer:
        first = library()
        with comm_hooks.everywhere("gradient_allreduce") as inner:
            second = library(seed=1)
        third = library(Subclass, seed=2)
        own = Own(hooked.network(), algorithm="gradient_allreduce")
    after = library()
    for ddp in (first, second, third, after, own):
        trained(ddp)
    torchs = (first, second, third, after)
    named = [ddp._get_ddp_logging_data().get("comm_hook") for ddp in torchs]
    rounds = [handle.stats()["rounds"] for handle in (*outer, *inner)]
    return named, rounds, third.tag, DistributedDataParallel.__init__ is TORCHS


def test_each_object_made_inside_has_the_hook_of_the_innermost_context(ranks):
    for named, rounds, tag, restored in ranks(2, several):
        exact, compressed = "bagua.GradientAllReduceAlgorithm", "bagua.ByteGradAlgorithm"
        assert named == [compressed, exact, compressed, None]
        assert rounds == [hooked.STEPS] * 3
        assert tag == "of the library"
        assert restored


@training.with_group
def failing():
    """The error that ends a context, and whether the constructor is torch's afterwards."""
    found = []

    def attempt(kind, words, algorithm, body):
        with pytest.raises(kind, match=words), comm_hooks.everywhere(algorithm):
            body()
        found.append(DistributedDataParallel.__init__ is TORCHS)

    def own_error():
        with comm_hooks.everywhere("bytegrad"):
            raise KeyError("of the library")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attempt(KeyError, "of the library", "bytegrad", own_error)
        attempt(NotImplementedError, "DiLoCoAlgorithm does more than", "diloco", library)
        attempt(TypeError, "parameters|module", "bytegrad", DistributedDataParallel)
        attempt(ValueError, "unknown algorithm 'bytegrd'", "bytegrd", library)
        attempt(TypeError, "comm_hooks.everywhere", ByteGradAlgorithm, library)
    return found


def test_errors_leave_torchs_constructor_as_it_was_and_do_not_warn(ranks):
    assert ranks(2, failing) == [[True] * 5] * 2


def nothing_made(algorithm):
    with comm_hooks.everywhere(algorithm):
        Own(hooked.network())


@training.with_group
def unused():
    return training.warnings_of(lambda: nothing_made("bytegrad")), dist.get_world_size()


def test_a_context_in_which_nothing_was_made_warns_once_unless_alone(ranks):
    said = [text for texts, _ in ranks(2, unused) for text in texts]
    (text,) = said  # once per job
    assert "no DistributedDataParallel of torch's was constructed inside" in text
    assert "bagua.comm_hooks.register(ddp, algorithm)" in text
    assert ranks(1, unused) == [([], 1)]
