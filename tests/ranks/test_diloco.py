"""Local training with an outer optimizer on ranks, against the oracle."""

import copy
import random
import re

import pytest
import torch
import torch.distributed as dist
from bagua import _C
from bagua._outer.optimizer import GrowingMomentum
from bagua.torch_api.algorithms import Algorithm, DiLoCoAlgorithm, OuterSGD
from oracle import diloco as oracle
from ranks.test_groups_and_nodes import environment_of_nodes
from support import training
from support.cases import over
from torch import nn

RULES = [OuterSGD(0.7, 0.9), OuterSGD(0.7, 0.3, nesterov=False), OuterSGD(1.0, 0.0)]
HALVES = [torch.bfloat16, torch.float16]


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def batches(step, dtype=torch.float32):
    return [
        tuple(t.to(dtype) for t in training.batch(step, rank))
        for rank in range(dist.get_world_size())
    ]


def own_step(model, optimizer, step, dtype=torch.float32, samples=None):
    optimizer.zero_grad()
    if samples is not None:
        model.bagua_samples(samples)
    training.squared_error(model, batches(step, dtype)[dist.get_rank()]).backward()
    optimizer.step()


def own_steps(model, optimizer, steps, dtype=torch.float32):
    for step in steps:
        own_step(model, optimizer, step, dtype)


def outer_state(model):
    """Anchors and the outer optimizer's state, by name."""
    state = model.bagua_algorithm.state_dict()
    own = ("mean/", *(f"rank{rank}/" for rank in range(dist.get_world_size())))
    return {key: value for key, value in state.items() if "/" in key and not key.startswith(own)}


def assert_outer_state_agrees(model):
    digests = training.gather(training.bits(outer_state(model).values()))
    assert len(set(digests)) == 1, f"ranks differ: {digests}"


def assert_weights_are_the_anchor(model):
    state = outer_state(model)
    for name, p in model.named_parameters():
        assert torch.equal(p.detach(), state[f"anchor/{name}"].to(p.dtype)), name


def layers():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(5, 5) for _ in range(3)], nn.Linear(5, 3))


def drawn(seed):
    """A number of ranks, a dtype, samples a step of each rank, arguments of the algorithm."""
    draw = random.Random(seed)
    size, fragments = draw.choice([2, 3, 4]), draw.choice([1, 2])
    apart = draw.choice([1, 2, 3])
    dtype = draw.choice([torch.float32, torch.float32, torch.float64, *HALVES])
    samples = draw.choice([None, [draw.randrange(9) for _ in range(size - 1)] + [4]])
    return (
        size,
        dtype,
        samples,
        {
            "outer_optimizer": draw.choice(RULES if dtype in HALVES else [*RULES, None]),
            "interval": fragments * apart,
            "fragments": fragments,
            "overlap_steps": draw.randrange(apart),
            "warmup_steps": draw.choice([0, 0, 3]),
        },
    )


@training.with_group
def train_as_drawn(dtype, samples, arguments):
    rank = dist.get_rank()
    model = layers().to(dtype)
    twins = [copy.deepcopy(model) for _ in range(dist.get_world_size())]
    # Adam's eps is zero in f16; in bf16 a gradient near zero may have either sign.
    inner = training.sgd if dtype in HALVES else adamw
    expected = oracle.Ranks(twins, inner, samples, **arguments)
    optimizer = inner(model)
    weight = "samples" if samples else "ranks"
    model.with_bagua([optimizer], DiLoCoAlgorithm(weight=weight, **arguments))
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12}.get(dtype, 1e-2)
    rounds = 3 if arguments["outer_optimizer"] else 20
    for step in range(arguments["warmup_steps"] + rounds * arguments["interval"]):
        own_step(model, optimizer, step, dtype, samples[rank] if samples else None)
        expected.step(training.squared_error, batches(step, dtype))
        training.assert_close(model, expected.models[rank], rtol=tolerance, atol=tolerance)
        assert_outer_state_agrees(model)
    outer = model.bagua_stats()["outer"]
    assert outer["rounds"] == expected.rounds
    assert outer["momentum"] == pytest.approx(expected.momentum, abs=1e-9)
    wanted = {f"anchor/{name}": anchor for name, anchor in expected.anchors.items()}
    wanted |= {f"momentum/{name}": momentum for name, momentum in expected.momenta.items()}
    for name, value in wanted.items():
        torch.testing.assert_close(outer_state(model)[name], value, rtol=tolerance, atol=tolerance)
    for _ in range(2):  # nothing is trained in between
        model.bagua_algorithm.sync()
    assert_weights_are_the_anchor(model)
    # Each fragment but the last, whose round was in the last step; or ends now.
    ended = arguments["fragments"] - 1 + len(expected.begun)
    assert model.bagua_stats()["outer"]["rounds"] == expected.rounds + ended


@over(seed=range(16), env=({}, training.SMALL_BUCKETS))
def test_training_as_drawn_is_the_oracles(ranks, seed, env):
    size, *drawn_arguments = drawn(seed)
    print(size, drawn_arguments)
    ranks(size, train_as_drawn, *drawn_arguments, env=env)


class CountingSteps(torch.optim.SGD):
    """Keeps a number that is not a tensor."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p]["steps"] = 1 + self.state[p].get("steps", 0)


class CountingAll(torch.optim.SGD):
    """Keeps a number under a key that is not a parameter."""

    def step(self, closure=None):
        self.state["steps"] = 1


def torchs_sgd(params):
    return torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)


def torchs_adamw(params):
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


ADAMS_STATE = {"exp_avg", "exp_avg_sq", "step"}


@training.with_group
def train_with_an_optimizer_of_torch(factory):
    """Compares each round with `factory`'s steps on the mean of the ranks; figures, and keys."""
    model = training.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    anchors = {name: p.detach().clone() for name, p in model.named_parameters()}
    outer = factory(list(anchors.values()))
    model.with_bagua([optimizer], DiLoCoAlgorithm(factory, 2))
    for step in range(8):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        own_step(model, optimizer, step)
        if step % 2:
            for name, p in model.named_parameters():
                trained = before[name] - 0.1 * p.grad
                anchors[name].grad = training.mean_over_ranks(anchors[name] - trained)
            outer.step()
            for name, p in model.named_parameters():
                torch.testing.assert_close(p.detach(), anchors[name], rtol=1e-5, atol=1e-6)
            assert_outer_state_agrees(model)
            assert_weights_are_the_anchor(model)
    keys = {key.split("/")[0] for key in model.bagua_algorithm.state_dict() if "/" in key}
    return model.bagua_stats()["outer"], keys - {"anchor", f"rank{dist.get_rank()}"}


def test_any_optimizer_of_torch_steps_on_the_anchors(ranks):
    cases = {torchs_sgd: (0.9, {"momentum_buffer"}), torchs_adamw: (None, ADAMS_STATE)}
    for factory, (momentum, keys) in cases.items():
        for outer, found in ranks(3, train_with_an_optimizer_of_torch, factory):
            assert outer["momentum"] == momentum
            assert outer["correlation"] is outer["gain"] is None
            assert outer["rounds"] == 4
            assert outer["agreement"] > 0
            assert found == keys


def test_momentum_grows_only_while_rounds_keep_a_direction():
    rule, momentum, seen = GrowingMomentum(), 0.0, []
    for correlation in [None, 1.0, 0.2, 1.0, 1.0, 1.0, 1.0, 1.0, None, -1.0, -1.0, -1.0, -1.0]:
        step = rule.step_after(momentum, correlation)
        momentum = step.momentum
        seen.append(round(momentum, 2))
    assert seen == [0, 0.16, 0.16, 0.32, 0.48, 0.64, 0.8, 0.8, 0.8, 0.56, 0.32, 0.08, 0]
    assert rule.step_after(0.3, 0.5) == rule.step_after(0.3, 0.5 + 1e-9), "sums of another order"
    assert OuterSGD(0.7, 0.5).step_after(0.1, 0.9) == OuterSGD(0.7, 0.5), "given rates stay"


@training.with_group
def idle_rounds(dtype):
    """Whether 50 rounds in which nobody trains move the anchor or the weights."""
    model = training.network().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.with_bagua([optimizer], DiLoCoAlgorithm(OuterSGD(0.7, 0.0), interval=1))
    for step in range(2):  # so that the anchor has bits that the weights do not have
        own_step(model, optimizer, step, dtype)
    anchors = [value for key, value in outer_state(model).items() if key.startswith("anchor/")]
    optimizer.param_groups[0]["lr"] = 0.0
    own_step(model, optimizer, 2, dtype)
    before = training.bits([*outer_state(model).values(), *model.parameters()])
    assert training.bits(anchors) == training.bits(
        [value for key, value in outer_state(model).items() if key.startswith("anchor/")]
    )
    own_steps(model, optimizer, range(50), dtype)
    assert model.bagua_algorithm.outer_rounds == 53
    assert model.bagua_algorithm.gain is None
    return before == training.bits([*outer_state(model).values(), *model.parameters()])


def test_nothing_moves_while_nobody_trains(ranks):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert ranks(2, idle_rounds, dtype) == [True, True], dtype


@training.with_group
def equal_weights(weight, samples):
    model = training.network()
    optimizer = adamw(model)
    algorithm = DiLoCoAlgorithm(interval=2, codec="int4_block", weight=weight)
    model.with_bagua([optimizer], algorithm)
    for step in range(6):
        own_step(model, optimizer, step, samples=samples)
    return training.bits(model.parameters())


def test_equal_weights_have_the_bits_of_the_plain_mean(ranks):
    assert ranks(3, equal_weights, "samples", 12) == ranks(3, equal_weights, "ranks", None)


@training.with_group
def samples_that_cannot_be():
    """Errors of a round for which nobody has said any, and of a negative number."""
    model = training.network()
    optimizer = adamw(model)
    model.with_bagua([optimizer], DiLoCoAlgorithm(interval=1, weight="samples"))
    return (
        training.error_of(lambda: own_step(model, optimizer, 0)),
        training.error_of(lambda: model.bagua_samples(-1)),
    )


def test_samples_that_cannot_be_are_an_error_with_the_remedy(ranks):
    errors = ranks(2, samples_that_cannot_be)
    for nobody, negative in errors:
        assert "rank" in nobody  # one of them may see the other one's end
        assert "bagua_samples(-1)" in negative
    assert any("model.bagua_samples() before the forward" in e for e, _ in errors)


@training.with_group
def count_bytes(codec, interval):
    """Bytes sent after each step, and by the round's formula."""
    model = training.network(outputs=500)
    optimizer = adamw(model)
    algorithm = DiLoCoAlgorithm(interval=interval, codec=codec)
    model.with_bagua([optimizer], algorithm)
    sent = []
    for step in range(2 * interval):
        optimizer.zero_grad()
        model(batches(step)[dist.get_rank()][0]).square().mean().backward()
        optimizer.step()
        stats = model.bagua_stats()
        main = model.process_group.connections.main_traffic()
        sent.append(
            stats["total"]["bytes_sent"] + stats["control"]["bytes_sent"] + main["bytes_sent"]
        )
    (bucket,) = model.bagua_buckets
    return sent, bucket.backend_tensor.numel(), model.bagua_stats()["total"]["bytes_sent"]


@pytest.mark.parametrize(
    ("codec", "most"), [(None, 1.0), ("block_uint8", 0.3), ("int4_block", 0.16)], ids=str
)
def test_steps_without_a_round_send_nothing(ranks, codec, most):
    interval = 4
    for sent, numel, total in ranks(3, count_bytes, codec, interval):
        start = sent[0]
        assert sent[:3] == [start] * 3
        assert sent[3] > start
        assert sent[4:7] == [sent[3]] * 3
        assert sent[7] - sent[6] == sent[3] - sent[2]
        if codec is None:
            assert total == 2 * (2 * 2 * numel * 4 // 3), "two rounds of 2 S (P - 1) / P"
        else:
            assert 0 < total < most * 2 * (2 * 2 * numel * 4 // 3)


def test_between_nodes_only_leaders_send(ranks):
    for stats in ranks(3, hierarchical_training, env=environment_of_nodes((2, 1))):
        assert stats["buckets"][0]["ops"][0].startswith("Hierarchical(")


@training.with_group
def hierarchical_training():
    model = training.network()
    optimizer = adamw(model)
    model.with_bagua(
        [optimizer], DiLoCoAlgorithm(interval=2, hierarchical=True, codec="block_uint8")
    )
    own_steps(model, optimizer, range(4))
    assert_outer_state_agrees(model)
    assert_weights_are_the_anchor(model)
    return model.bagua_stats()


@training.with_group
def statistics(rule, same_data):
    model = training.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.with_bagua([optimizer], DiLoCoAlgorithm(rule, 2))
    seen = []
    for _ in range(4):
        optimizer.zero_grad()
        rank = 0 if same_data else dist.get_rank()
        training.squared_error(model, training.batch(0, rank)).backward()
        optimizer.step()
        seen.append(model.bagua_stats()["outer"])
    assert model.bagua_algorithm.gain == seen[-1]["gain"]
    assert model.bagua_algorithm.correlation == seen[-1]["correlation"]
    return seen


def test_statistics_say_how_the_ranks_and_the_rounds_agree(ranks):
    for before, first, between, second in ranks(2, statistics, OuterSGD(0.7, 0.5), True):
        assert before == {
            "rounds": 0,
            "skipped_rounds": 0,
            "steps": 1,
            "correlation": None,
            "gain": None,
            "agreement": None,
            "lr": None,
            "momentum": None,
        }
        assert (first["rounds"], between["steps"], second["rounds"]) == (1, 1, 2)
        assert (first["lr"], first["momentum"]) == (0.7, 0.5)
        assert first["agreement"] == pytest.approx(1.0)
        assert first["gain"] == pytest.approx(0.7 * 1.5), "the first step has no momentum yet"
        assert 0.9 < second["correlation"] < 1
        assert second["gain"] > first["gain"]
    for _, first, *_ in ranks(4, statistics, OuterSGD(0.7, 0.5), False):
        assert 0.2 < first["agreement"] < 1.5


def test_it_is_registered_with_the_documented_defaults():
    made = Algorithm.init("diloco")
    assert isinstance(made, DiLoCoAlgorithm)
    assert isinstance(made.outer_optimizer, GrowingMomentum)
    assert made.interval == 100


def test_arguments_out_of_their_range_are_refused_by_name():
    cases = [
        ({"interval": 0}, "interval=0 must be at least 1"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"codec": "nonsense"}, "nonsense"),
        ({"codec": "int4_block", "error_feedback": "x"}, "error_feedback='x' must be True"),
        ({"weight": "tokens"}, 'weight=\'tokens\' must be "ranks" or "samples"'),
        ({"outer_optimizer": 0.7}, "outer_optimizer is an OuterSGD"),
        ({"outer_optimizer": torch.optim.SGD([torch.zeros(1)])}, "a function that makes an opt"),
        ({"outer_optimizer": lambda params: 3}, "outer_optimizer made 3, no torch.optim.Opt"),
        ({"outer_optimizer": torch.optim.LBFGS}, "LBFGS.step() needs a closure"),
        ({"outer_optimizer": CountingSteps}, "CountingSteps keeps 'steps' as a int, no tensor"),
        ({"outer_optimizer": CountingAll}, "CountingAll keeps state['steps'], which is of no para"),
        ({"fragments": 0}, "fragments=0 must be at least 1"),
        ({"fragments": []}, "no list of module names"),
        ({"fragments": "0"}, "fragments is a number"),
        ({"fragments": ["0", "1"]}, "'0' is not a list of module names"),
        ({"interval": 3, "fragments": 4}, "not interval=3"),
        ({"interval": 4, "overlap_steps": 4}, "overlap_steps=4 must be below 4"),
        ({"interval": 7, "fragments": 2, "overlap_steps": 3}, "overlap_steps=3 must be below 3"),
        ({"overlap_steps": -1}, "overlap_steps=-1"),
    ]
    for arguments, text in cases:
        with pytest.raises((TypeError, ValueError), match=re.escape(text)):
            DiLoCoAlgorithm(**arguments)
    for rate in ({"lr": 0.0}, {"lr": float("inf")}, {"momentum": 1.0}, {"momentum": -0.1}):
        ((name, value),) = rate.items()
        with pytest.raises(ValueError, match=f"{name}={value}"):
            OuterSGD(**rate)


def test_the_outer_step_rounds_each_product_and_sum():
    generator = torch.Generator().manual_seed(0)
    anchor, momentum, mean = (torch.randn(100_003, generator=generator) for _ in range(3))
    expected = momentum * 0.9 + mean
    moved = anchor - (mean + expected * 0.9) * 0.7
    _C.outer_step([anchor], [momentum], [mean], lr=0.7, mu=0.9, nesterov=True)
    assert torch.equal(momentum, expected)
    assert torch.equal(anchor, moved)
