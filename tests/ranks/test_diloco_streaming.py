"""Fragments, and rounds that last several steps."""

import copy
import time

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import DiLoCoAlgorithm, OuterSGD
from ranks.test_diloco import adamw, assert_outer_state_agrees, outer_state, own_step, own_steps
from support import training
from torch import nn

PLAIN, HALF, PAPER = OuterSGD(1.0, 0.0), OuterSGD(0.5, 0.0), OuterSGD(0.7, 0.9)


@training.with_group
def steps_of_minus_one(rule, overlap, steps):
    """The weight after each step."""
    model = nn.ParameterDict({"x": nn.Parameter(torch.zeros(1, dtype=torch.float64))})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    algorithm = DiLoCoAlgorithm(rule, interval=4, overlap_steps=overlap)
    model.with_bagua([optimizer], algorithm)
    seen = []
    for _ in range(steps):
        model["x"].grad = torch.ones(1, dtype=torch.float64)
        optimizer.step()
        seen.append(model["x"].item())
    model.bagua_algorithm.sync()  # a round is under way, and ranks may end more than 10 s apart
    return seen


TABLE = {
    "half": (HALF, [-1, -2, -3, -4, -5, -4, -5, -6, -7, -6, -7, -8]),
    "plain": (PLAIN, [-float(t) for t in range(1, 13)]),
}


@pytest.mark.parametrize(("rule", "expected"), TABLE.values(), ids=TABLE.keys())
@pytest.mark.parametrize("n", [1, 3], ids=lambda n: f"{n}-ranks")
def test_late_anchors_meet_the_weights_as_calculated_by_hand(ranks, n, rule, expected):
    for seen in ranks(n, steps_of_minus_one, rule, 2, 12):
        assert seen == pytest.approx(expected, abs=1e-12)


def test_momentum_with_late_anchors_is_as_calculated_by_hand(ranks):
    ((*_, x6, _, _, _, x10),) = ranks(1, steps_of_minus_one, PAPER, 2, 10)
    assert (x6, x10) == pytest.approx((-7.32, -14.908), abs=1e-10)


def layers(count=5):
    torch.manual_seed(0)
    blocks = [nn.Linear(5, 5) for _ in range(count)]
    return nn.Sequential(*blocks, nn.Linear(5, 3))


@training.with_group
def fragment_by_fragment(fragments):
    """The number of different versions of each layer among the ranks, after each step."""
    model = layers(3)
    optimizer = adamw(model)
    model.with_bagua([optimizer], DiLoCoAlgorithm(PAPER, interval=4, fragments=fragments))
    versions, sent, before = [], [], 0
    for step in range(8):
        own_step(model, optimizer, step)
        versions.append(
            "".join(
                str(len(set(training.gather(training.bits(layer.parameters()))))) for layer in model
            )
        )
        now = model.bagua_stats()["total"]["bytes_sent"]
        sent.append(now - before)
        before = now
    assert_outer_state_agrees(model)
    assert model.bagua_algorithm.outer_rounds == 4
    return versions, sent


def layer_modulo_two(name):
    return int(name.split(".")[0]) % 2


@pytest.mark.parametrize(
    "fragments",
    [2, [["0", "2"], ["1", "3"]], layer_modulo_two],
    ids=["number", "names", "function"],
)
def test_fragments_are_averaged_in_turn(ranks, fragments):
    for versions, sent in ranks(2, fragment_by_fragment, fragments):
        assert versions == ["2222", "1212", "2222", "2121"] * 2
        assert sent[0] == sent[2] == sent[4] == sent[6] == 0
        assert 0 < sent[1] == sent[5]
        assert 0 < sent[3] == sent[7]


@training.with_group
def streaming_against_the_oracle(overlap):
    size, rank = dist.get_world_size(), dist.get_rank()
    model = layers(3)
    twins = [copy.deepcopy(model) for _ in range(size)]
    own = [torch.optim.SGD(twin.parameters(), lr=0.1) for twin in twins]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rule = OuterSGD(0.7, 0.6)
    model.with_bagua(
        [optimizer],
        DiLoCoAlgorithm(rule, 6, fragments=2, overlap_steps=overlap),
    )
    state = {
        name: (p.detach().clone(), torch.zeros_like(p)) for name, p in model.named_parameters()
    }
    parts = [[n for n in state if int(n.split(".")[0]) % 2 == part] for part in (0, 1)]
    launched = {}
    for step in range(24):
        own_step(model, optimizer, step)
        for twin, of_twin, batch in zip(
            twins, own, [training.batch(step, other) for other in range(size)], strict=True
        ):
            training.train(twin, of_twin, [batch])
        now = (step + 1) % 6
        if now in (3, 0):
            names = parts[0] if now == 3 else parts[1]
            launched = {
                name: [dict(twin.named_parameters())[name].detach().clone() for twin in twins]
                for name in names
            }
        if step > overlap and (now - overlap) % 6 in (3, 0):
            names = list(launched)
            with torch.no_grad():
                for name in names:
                    a, m = state[name]
                    mean = torch.stack([a - x for x in launched[name]]).mean(0)
                    m.mul_(rule.momentum).add_(mean)
                    a.sub_((mean + m * rule.momentum) * rule.lr)
                    for twin, x in zip(twins, launched[name], strict=True):
                        dict(twin.named_parameters())[name].add_(a - x)
        training.assert_close(model, twins[rank])
        assert_outer_state_agrees(model)
    for name, (a, m) in state.items():
        torch.testing.assert_close(outer_state(model)[f"anchor/{name}"], a, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(outer_state(model)[f"momentum/{name}"], m, rtol=1e-5, atol=1e-6)
    return model.bagua_algorithm.outer_rounds


@pytest.mark.parametrize("n", [2, 3], ids=lambda n: f"{n}-ranks")
def test_fragments_in_flight_are_the_oracles(ranks, n):
    assert ranks(n, streaming_against_the_oracle, 2) == [7] * n


@training.with_group
def a_step_too_many():
    """Rank 1 makes two steps that the others do not."""
    model = layers(3)
    optimizer = adamw(model)
    model.with_bagua([optimizer], DiLoCoAlgorithm(interval=4, fragments=2))

    def train():
        for step in range(8):
            own_step(model, optimizer, step)
            if step == 0 and dist.get_rank() == 1:
                model.bagua_algorithm._loop.state.steps += 2  # as if it had been loaded wrongly

    return training.error_of(train)


def test_ranks_at_different_fragments_are_told(ranks):
    for error in ranks(2, a_step_too_many):
        assert error.startswith("BaguaMismatchError")
        assert "ranks differ in the fragment that they average (rank 0: 1, rank 1: 2)" in error


@training.with_group
def end_in_flight(how):
    """Whether ranks can end while a round is under way, one of them much later."""
    model = layers(3)
    optimizer = adamw(model)
    model.with_bagua([optimizer], DiLoCoAlgorithm(interval=4, overlap_steps=2))
    own_steps(model, optimizer, range(4))
    assert model.bagua_algorithm.state_dict()["in_flight"] == 1
    if how == "sync":
        model.bagua_algorithm.sync()
        for name, p in model.named_parameters():
            assert torch.equal(p.detach(), outer_state(model)[f"anchor/{name}"])
        return model.bagua_algorithm.outer_rounds
    if how == "again":
        model.with_bagua([optimizer], DiLoCoAlgorithm(interval=4))
        own_steps(model, optimizer, range(4))
        return model.bagua_algorithm.outer_rounds
    model.bagua_ddp.close()
    return 0


@pytest.mark.parametrize(("how", "rounds"), [("sync", 1), ("again", 1), ("close", 0)])
def test_a_round_under_way_is_ended_first(ranks, how, rounds):
    assert ranks(2, end_in_flight, how) == [rounds] * 2


@training.with_group
def close_before_the_other_launches():
    """Rank 0 closes with a round under way, which rank 1 joins later than a lane is waited for."""
    model = layers(3)
    optimizer = adamw(model)
    model.with_bagua([optimizer], DiLoCoAlgorithm(interval=4, overlap_steps=2))
    late = dist.get_rank() == 1
    for step in range(6 if late else 4):
        if late and step == 3:
            time.sleep(2.5)
        own_step(model, optimizer, step)
    rounds = model.bagua_algorithm.outer_rounds
    model.bagua_ddp.close()
    return rounds


def test_a_rank_that_closes_answers_the_round_under_way(ranks):
    assert ranks(2, close_before_the_other_launches) == [0, 1]


def from_one(name):
    return 1


def negative(name):
    return -1


MISFITS = [
    (6, "no ModuleList or Sequential of that many layers with trained parameters, only of 4"),
    ([["0", "1"], ["2"]], "parameter '3.weight' is in no fragment"),
    ([["0", "1"], ["1", "2", "3"]], "parameter '1.weight' is in fragments [0, 1]"),
    ([["0", "1"], ["2", "3"], ["nothing"]], "fragment(s) [2] of 3 have no parameter"),
    (from_one, "fragment(s) [0] of 2 have no parameter"),
    (negative, "fragments('0.weight') is -1, not a number from 0"),
]


@training.with_group
def refused():
    errors = []
    for fragments, _ in MISFITS:
        model = layers(3)
        wrap = [adamw(model)], DiLoCoAlgorithm(interval=8, fragments=fragments)
        errors.append(training.error_of(lambda m=model, w=wrap: m.with_bagua(*w), ValueError))
    return errors


def test_fragments_that_do_not_fit_the_module_are_refused(ranks):
    (errors,) = ranks(1, refused)
    for error, (_, text) in zip(errors, MISFITS, strict=True):
        assert text in error
