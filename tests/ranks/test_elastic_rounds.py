"""Outer rounds that fail on living ranks, and what an elastic job refuses."""

import datetime
import functools
import signal
import warnings

import bagua.torch_api as bagua
import pytest
import torch
import torch.distributed as dist
from bagua import BaguaError
from bagua._outer import elastic
from bagua._outer.elastic import ElasticRanks
from bagua.torch_api.algorithms import (
    DiLoCoAlgorithm,
    Elastic,
    OuterSGD,
)
from ranks.test_diloco import assert_outer_state_agrees, outer_state, own_step, torchs_adamw
from support import training

PLAIN = OuterSGD(1.0, 0.0)
SHORT = datetime.timedelta(seconds=30)
FORMS = {
    "one-fragment": {},
    "streaming": {"fragments": 2, "overlap_steps": 1},
    "8-bit": {"codec": "block_uint8"},
    "growing-momentum": {"outer_optimizer": None, "interval": 2},
    "optimizer-of-torch": {"outer_optimizer": torchs_adamw},
}


def in_elastic_job(function):
    """Inside `function` an elastic job has begun."""

    @functools.wraps(function)
    def run(*args):
        bagua.init_process_group(timeout=SHORT, elastic=True)
        try:
            return function(*args)
        finally:
            bagua.destroy_process_group()

    return run


def wrapped(algorithm):
    model = training.network()
    optimizer = training.sgd(model)
    return model.with_bagua([optimizer], algorithm), optimizer


def fail_round(number, rank, method):
    """Round `number` fails on `rank`: at its launch ("confirm"), or when the others have its result
    ("confirmed").
    """
    original, count = getattr(ElasticRanks, method), 0

    def failing(self, engine):
        nonlocal count
        count += 1
        fails = count == number and bagua.get_rank() == rank
        if (
            not fails or method == "confirmed"
        ):  # or the others could have met this rank before it fails
            original(self, engine)
        if fails:
            engine.abort("the network is gone")
            engine.wait()
            raise BaguaError("the network is gone")

    setattr(ElasticRanks, method, failing)
    return lambda: setattr(ElasticRanks, method, original)


@training.with_group
def first_round_fails():
    """Bits of the weights after two intervals, the first of whose rounds failed, and after one of
    the length of both."""
    found = []
    for interval, failing in ((3, 1), (6, 0)):
        model = training.network()
        optimizer = training.sgd(model)
        model.with_bagua([optimizer], DiLoCoAlgorithm(PLAIN, interval, elastic=True))
        restore = fail_round(failing, 1, "confirm")
        try:
            for step in range(6):
                own_step(model, optimizer, step)
        finally:
            restore()
        found.append(training.bits(model.parameters()))
        assert model.bagua_algorithm.outer_rounds == 1
        assert model.process_group.ranks == [0, 1, 2]
        assert_outer_state_agrees(model)
    return found


def test_after_a_failed_round_the_next_one_carries_all(ranks):
    for failed, longer in ranks(3, first_round_fails):
        assert failed == longer


def train_rounds(model, optimizer, rounds):
    step = 0
    while model.bagua_algorithm.outer_rounds < rounds:
        own_step(model, optimizer, step)
        step += 1
    return step


@training.with_group
def one_rank_misses_a_result(form, victim):
    """Rounds and anchors when one rank fails right after the others have used a round."""
    arguments = {"outer_optimizer": OuterSGD(0.7, 0.5), "interval": 4, **FORMS[form]}
    model, optimizer = wrapped(DiLoCoAlgorithm(elastic=True, **arguments))
    restore = fail_round(2, victim, "confirmed")
    change, caught_up = ElasticRanks.change, []

    def watched(self, *args):
        change(self, *args)
        if bagua.get_rank() == victim:
            anchors = outer_state(model)
            caught_up.append(
                all(torch.equal(p, anchors[f"anchor/{n}"]) for n, p in model.named_parameters())
            )

    ElasticRanks.change = watched
    try:
        steps = train_rounds(model, optimizer, 6)
    finally:
        restore()
        ElasticRanks.change = change
    if not arguments.get("overlap_steps") and bagua.get_rank() == victim:
        assert caught_up == [True], "its steps are in the anchor already"
    model.bagua_algorithm.sync()
    assert_outer_state_agrees(model)
    for name, p in model.named_parameters():
        assert torch.equal(p.detach(), outer_state(model)[f"anchor/{name}"]), name
    return steps, model.bagua_algorithm.outer_rounds, model.process_group.ranks


@pytest.mark.parametrize(("form", "victim"), [("one-fragment", 2), *((form, 0) for form in FORMS)])
def test_a_rank_that_missed_a_result_gets_it_from_another(ranks, form, victim):
    steps, rounds, members = zip(*ranks(3, one_rank_misses_a_result, form, victim), strict=True)
    assert len(set(rounds)) == 1
    assert members == ([0, 1, 2],) * 3
    rest = [own for rank, own in enumerate(steps) if rank != victim]
    # One may hear of the failure as it launches the next round, another as that round arrives.
    assert max(rest) - min(rest) <= FORMS[form].get("overlap_steps", 0)
    assert steps[victim] < min(rest), "it waited for the others"


@training.with_group
def without_a_forward():
    """The error of steps that follow a failed round without a training forward."""
    model, optimizer = wrapped(DiLoCoAlgorithm(PLAIN, 2, elastic=True))
    restore = fail_round(1, 0, "confirm")
    try:
        own_step(model, optimizer, 0)
        own_step(model, optimizer, 1)
        optimizer.step()
        return training.error_of(optimizer.step)
    finally:
        restore()


def test_nobody_trains_on_alone_without_noticing(ranks):
    for error in ranks(2, without_a_forward):
        assert "the network is gone" in error


@in_elastic_job
def one_leaves(given, overlap):
    """How a rank ends that is told to leave, and what the others make then.

    Its status, steps, rounds, members, warnings.
    """
    arguments = {"interval": 4, "overlap_steps": overlap, "elastic": Elastic(**given)}
    model, optimizer = wrapped(DiLoCoAlgorithm(PLAIN, **arguments))
    outer, rank, step = model.bagua_algorithm, bagua.get_rank(), 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        status = None
        try:
            while outer.outer_rounds < 5:
                if rank == 2 and step == 5:
                    signal.raise_signal(signal.SIGTERM)
                own_step(model, optimizer, step)
                step += 1
        except SystemExit as left:
            status = left.code
    told = [str(each.message) for each in caught if "outer round" in str(each.message)]
    return status, step, outer.outer_rounds, model.process_group.ranks, told


@pytest.mark.parametrize("given", [{}, {"grace": 60.0}])
@pytest.mark.parametrize("overlap", [0, 2])
def test_a_rank_that_is_told_to_leave_makes_its_round_and_the_others_lose_none(
    ranks, given, overlap
):
    *others, left = ranks(3, one_leaves, given, overlap, init=False)
    assert left[:3] == (0, 7, 2), "its second round is the last, and it does not wait for its end"
    for status, steps, rounds, members, told in others:
        assert (status, rounds, members) == (None, 5, [0, 1])
        assert steps == 5 * 4 + overlap, "no round has failed"
        assert told == [
            "module 'Sequential': rank(s) 2 left before outer round 3, rank(s) 0, 1 go on"
        ]


@in_elastic_job
def one_leaves_without_a_round():
    """How a rank ends that is told to leave, where no round comes in time."""
    model, optimizer = wrapped(DiLoCoAlgorithm(PLAIN, 4, elastic=Elastic(leave_within=1.0)))
    if bagua.get_rank() == 1:
        bagua.leave()
        own_step(model, optimizer, 0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(elastic, "_OF_A_NOTICE", 0.0)
            with pytest.raises(SystemExit) as left:
                own_step(model, optimizer, 1)
        return left.value.code
    train_rounds(model, optimizer, 2)
    return model.process_group.ranks


def test_a_rank_that_is_told_to_leave_does_not_wait_for_a_round_beyond_its_notice(ranks):
    assert ranks(3, one_leaves_without_a_round, init=False) == [[0, 2], 0, [0, 2]]


@in_elastic_job
def refusals():
    found = {}
    for name, call in {
        "all_reduce": lambda: dist.all_reduce(torch.zeros(1)),
        "barrier": dist.barrier,
        "objects": lambda: dist.broadcast_object_list([1]),
        "gather": lambda: dist.all_gather_object([None, None], 1),
    }.items():
        found[name] = training.error_of(call)
    model, optimizer = wrapped(DiLoCoAlgorithm(elastic=True))
    other = training.network()
    found["second"] = training.error_of(
        lambda: other.with_bagua([training.sgd(other)], DiLoCoAlgorithm(elastic=True))
    )
    model.with_bagua([optimizer], DiLoCoAlgorithm(elastic=True))  # again is allowed
    own_step(model, optimizer, 0)
    total = torch.ones(3)
    bagua.allreduce_inplace(total)
    assert (dist.get_rank(), dist.get_world_size()) == (bagua.get_rank(), 2)
    return found, total.tolist()


def test_what_an_elastic_job_cannot_do_is_refused(ranks):
    for found, total in ranks(2, refusals, init=False):
        for name in ("all_reduce", "barrier", "objects", "gather"):
            assert "do not work in an elastic job" in found[name], found
        assert "another module of this process group" in found["second"]
        assert total == [2.0] * 3


def over_torchs_group():
    return training.error_of(lambda: bagua.init_process_group(elastic=True))


def test_an_elastic_job_begins_without_torchs_group(ranks):
    for error in ranks(2, over_torchs_group):
        assert "makes torch.distributed's default group itself" in error


def test_a_quorum_is_at_least_one():
    with pytest.raises(ValueError, match="quorum=0"):
        Elastic(quorum=0)
    with pytest.raises(ValueError, match="Elastic: leave_within=0 must be positive"):
        Elastic(leave_within=0)
    with pytest.raises(TypeError, match=r"elastic is True, False or Elastic\(quorum=2\)"):
        DiLoCoAlgorithm(elastic=2)
