"""Guard: what a lossy algorithm loses is measured, told once with a remedy, and left as it is."""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api import Guard
from bagua.torch_api.algorithms import (
    Algorithm,
    ByteGradAlgorithm,
    GradientAllReduceAlgorithm,
    QAdamAlgorithm,
    QAdamOptimizer,
    SparseAlgorithm,
)
from bagua.torch_api.data_parallel import DistributedDataParallel
from ranks.test_groups_and_nodes import environment_of_nodes
from support import training
from support.every_algorithm import made, wrapped
from torch import nn

TOUCHY = Guard(every=2, relative_error=1e-9, residual=1e-9, consensus=1e-9)
WATCHING = Guard(every=2)
FAILING = {
    "residual": lambda: SparseAlgorithm(0.01),
    "relative_error": lambda: ByteGradAlgorithm(False, codec="bit2_block"),
}


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def stats_of(model):
    return model.bagua_stats()["guard"]


def steps(model, optimizer, numbers):
    data = [training.batch(number, dist.get_rank()) for number in numbers]
    training.train(model, optimizer, data)


def told(function):
    return [text for text in training.warnings_of(function) if "threshold" in text]


@training.with_group
def train_with_and_without(figure):
    bits, texts = [], []
    for guard in (Guard(every=2), None):
        model = training.network()
        optimizer = adamw(model)
        model.with_bagua([optimizer], FAILING[figure](), guard=guard)
        texts.append(told(lambda m=model, o=optimizer: training.train_on_ranks(m, o, steps=20)))
        bits.append(training.model_bits(model))
    assert bits[0] == bits[1], "a guard changes nothing"
    return texts


@pytest.mark.parametrize("figure", FAILING)
def test_compression_that_fails_is_told_once_on_rank_0_with_the_remedy(ranks, figure):
    first, second = ranks(2, train_with_and_without, figure)
    assert second == [[], []]
    ((text,), without) = first
    assert without == []
    assert f"above the threshold of {figure}={getattr(Guard(), figure):g}. What helps: " in text
    assert "bucket '0'" in text


@training.with_group
def train_healthy(name):
    model, optimizer = wrapped(name, training.wide_network(), guard=Guard(every=10))
    steps(model, optimizer, range(40))
    return stats_of(model)


@pytest.mark.parametrize("name", ["gradient_allreduce", "bytegrad", "qadam"])
def test_a_healthy_run_has_no_breach(ranks, name):
    for stats in ranks(2, train_healthy, name):
        assert stats["breaches"] == []
        figures = [bucket["relative_error"] for bucket in stats["buckets"].values()]
        assert all(0 < figure < 0.2 for figure in figures), (name, figures)
        assert (stats["checks"] > 0) == (name != "gradient_allreduce") == bool(figures)


@training.with_group
def breach(name):
    model = training.wide_network()
    optimizer = adamw(model)
    model.with_bagua([optimizer], made(name), guard=TOUCHY)
    texts = told(lambda: steps(model, optimizer, range(6)))
    return stats_of(model), len(texts)


BREACHES = {
    "bytegrad": "relative_error",
    "bytegrad-feedback": "residual",
    "power_sgd": "residual",
    "low_precision_decentralized": "consensus",
    "decentralized-shift-one": "consensus",
}


@pytest.mark.parametrize("name", BREACHES)
def test_all_ranks_find_the_same_breach_after_two_samples_in_a_row(ranks, name):
    stats, texts = zip(*ranks(3, breach, name), strict=True)
    assert stats[0] == stats[1] == stats[2]
    (found,) = stats[0]["breaches"]
    assert (found["figure"], found["bucket"], found["round"]) == (BREACHES[name], "0", 2)
    assert found["value"] > found["threshold"] == 1e-9
    assert texts == (1, 0, 0)


@training.with_group
def under_a_scaler(scale):
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    model, optimizer = wrapped(
        "bytegrad-feedback", training.wide_network(), grad_scaler=scaler, guard=Guard()
    )
    for number in range(2):
        optimizer.zero_grad()
        loss = training.squared_error(model, training.batch(number, dist.get_rank()))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return stats_of(model)["buckets"]["0"]


def test_figures_do_not_depend_on_the_loss_scale(ranks):
    plain, scaled = (ranks(2, under_a_scaler, scale)[0] for scale in (1.0, 64.0))
    assert plain == pytest.approx(scaled, rel=1e-4)
    assert 0 < plain["residual"] < 0.3


@training.with_group
def keep_residuals_under_sgd():
    model, optimizer = wrapped("sparse", training.network(), guard=TOUCHY)
    steps(model, optimizer, range(8))
    return stats_of(model)


def test_residuals_are_measured_but_not_judged_under_sgd(ranks):
    for stats in ranks(2, keep_residuals_under_sgd):
        assert stats["buckets"]["0"]["residual"] > TOUCHY.residual
        assert stats["breaches"] == []


@training.with_group
def refuse():
    return [
        training.error_of(
            lambda name=name: wrapped(name, training.network(), guard=Guard()), ValueError
        )
        for name in ("async", "diloco")
    ]


def test_algorithms_without_common_rounds_say_what_to_do_instead(ranks):
    for messages in ranks(2, refuse):
        assert all("Leave guard= out" in message for message in messages)


class _WithOwnGuard(Algorithm):
    def reify(self, process_group):
        implementation = ByteGradAlgorithm(False).reify(process_group)
        implementation.traits = replace(implementation.traits, default_guard=TOUCHY)
        return implementation


@training.with_group
def bring_a_guard():
    model = training.wide_network()
    optimizer = training.sgd(model)
    model.with_bagua([optimizer], _WithOwnGuard())
    steps(model, optimizer, range(5))
    assert stats_of(model)["breaches"]
    model.with_bagua([optimizer], GradientAllReduceAlgorithm())
    assert "guard" not in model.bagua_stats()


def test_an_algorithm_may_bring_its_guard_and_another_wrap_forgets_it(ranks):
    ranks(2, bring_a_guard)


@training.with_group
def train_with_uneven_inputs():
    model = training.wide_network()
    optimizer = training.sgd(model)
    algorithm = ByteGradAlgorithm(False)
    ddp = DistributedDataParallel(model, optimizers=[optimizer], algorithm=algorithm, guard=TOUCHY)
    with ddp.join():
        steps(ddp, optimizer, range(4 + 3 * dist.get_rank()))
    weights = training.gather(training.bits(list(model.parameters())))
    assert len(set(weights)) == 1, weights
    return stats_of(ddp)


def test_ranks_without_inputs_take_part_in_the_checks_of_the_others(ranks):
    stats = ranks(3, train_with_uneven_inputs)
    assert stats[0] == stats[1] == stats[2]
    assert stats[0]["rounds"] == 10
    assert stats[0]["breaches"]


class _Halves(nn.Module):
    """Half of it is not used."""

    def __init__(self):
        super().__init__()
        self.first, self.second = training.wide_network(), training.wide_network()

    def forward(self, x):
        return self.first(x)


@training.with_group
def train_irregularly(name, overflows):
    """Accumulates gradients, leaves parameters out, and skips steps whose loss scale overflows."""
    torch.manual_seed(0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    arguments = {"find_unused_parameters": True, "grad_scaler": scaler, "guard": WATCHING}
    model, optimizer = wrapped(name, _Halves(), **arguments)

    def train():
        for number in range(20):
            optimizer.zero_grad()
            with model.no_sync():
                data = training.batch(99 + number, dist.get_rank())
                scaler.scale(training.squared_error(model, data)).backward()
            loss = training.squared_error(model, training.batch(number, dist.get_rank()))
            factor = math.inf if number in overflows and dist.get_rank() == 0 else 1.0
            scaler.scale(loss * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            training.assert_ranks_agree(model)

    texts = training.warnings_of(train)
    return stats_of(model), [text for text in texts if "NaN" in text]


@pytest.mark.parametrize("name", ["bytegrad", "bytegrad-feedback"])
def test_accumulated_unused_and_skipped_gradients_are_no_breach(ranks, name):
    results = ranks(2, train_irregularly, name, (0, 3, 5, 9, 12), env=training.SMALL_BUCKETS)
    for stats, texts in results:
        assert stats["rounds"] == 20
        assert stats["checks"] > 0
        assert stats["breaches"] == []
        figures = [bucket.get("relative_error") for bucket in stats["buckets"].values()]
        assert any(figures)
        assert all(figure is None or 0 < figure < 0.3 for figure in figures)
        assert texts == []


def test_rounds_without_end_that_are_not_finite_warn_once(ranks):
    results = ranks(2, train_irregularly, "bytegrad", tuple(range(3, 20)))
    for stats, _ in results:
        assert stats["breaches"] == []
        assert stats["nonfinite_share"] == 1.0
    assert [len(texts) for _, texts in results] == [1, 0]


@training.with_group
def unfreeze():
    model = training.wide_network()
    model[0].weight.requires_grad_(False)
    model, optimizer = wrapped("bytegrad", model, guard=TOUCHY)
    texts = told(lambda: steps(model, optimizer, range(4)))
    before = stats_of(model)["breaches"]
    model[0].weight.requires_grad_(True)
    texts += told(lambda: steps(model, optimizer, range(4, 8)))
    return before, stats_of(model)["breaches"], len(texts)


def test_new_buckets_are_watched_from_their_first_round_on_and_told_of_once(ranks):
    for rank, (before, after, texts) in enumerate(ranks(2, unfreeze)):
        assert [found["round"] for found in before] == [2]
        assert [found["round"] for found in after] == [2, 6]
        assert texts == (1 if rank == 0 else 0)


@training.with_group
def train_over_nodes(hierarchical, feedback):
    model = training.wide_network()
    optimizer = adamw(model)
    algorithm = ByteGradAlgorithm(hierarchical, codec="int4_block", error_feedback=feedback)
    model.with_bagua([optimizer], algorithm, guard=WATCHING)
    training.train_on_ranks(model, optimizer, steps=4)
    return stats_of(model)["buckets"]["0"]


@pytest.mark.parametrize(
    ("hierarchical", "feedback"), [(True, False), ("sharded", False), (True, True)]
)
def test_the_mean_over_nodes_is_compared_with_that_of_all_ranks(ranks, hierarchical, feedback):
    env = environment_of_nodes((3, 1))
    results = ranks(4, train_over_nodes, hierarchical, feedback, env=env)
    assert all(figures == results[0] for figures in results)
    assert 0.01 < results[0]["relative_error"] < 0.4
    assert ("residual" in results[0]) == feedback


@training.with_group
def send_momentum():
    model = training.network()
    optimizer = QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=3)
    algorithm = QAdamAlgorithm(optimizer, False, codec="bit2_block", error_feedback=True)
    model.with_bagua([optimizer], algorithm, guard=TOUCHY)
    watched = []
    for number in range(8):
        steps(model, optimizer, [number])
        watched.append(bool(stats_of(model)["buckets"]))
    return watched, stats_of(model)["breaches"]


def test_momentum_and_its_residuals_are_watched_after_the_warm_up(ranks):
    first, second = ranks(2, send_momentum)
    assert first == second
    watched, breaches = first
    assert not watched[0], "in the warm-up there is nothing to watch"
    assert watched[-1]
    assert [found["figure"] for found in breaches] == ["residual"]


def test_arguments_are_checked():
    for bad in ({"every": 0}, {"elements": 1.5}, {"residual": 0.0}, {"consensus": float("nan")}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            Guard(**bad)
    with pytest.raises(TypeError, match="Guard or None"):
        nn.Linear(1, 1).with_bagua([], GradientAllReduceAlgorithm(), guard=True)
    with pytest.raises(TypeError, match="DistributedDataParallel: guard is a"):
        DistributedDataParallel(nn.Linear(1, 1), guard=TOUCHY.every)
