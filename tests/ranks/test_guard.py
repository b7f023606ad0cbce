"""Guard: what a lossy algorithm loses is measured, told once with a remedy, and left as it is."""

import copy
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
from support import guard_training, training
from support.every_algorithm import wrapped
from torch import nn

TOUCHY = Guard(every=2, relative_error=1e-9, residual=1e-9, consensus=1e-9)
WATCHING = Guard(every=2)
FAILING = {
    "residual": (lambda: SparseAlgorithm(0.01), 1.0),
    "relative_error": (lambda: ByteGradAlgorithm(False, codec="minmax_uint8"), 100.0),
}


def stats_of(model):
    return model.bagua_stats()["guard"]


def step(model, optimizer, number):
    optimizer.zero_grad()
    training.squared_error(model, training.batch(number, dist.get_rank())).backward()
    optimizer.step()


@training.with_group
def train_with_and_without(figure):
    make, outlier = FAILING[figure]
    bits, texts = [], []
    for guard in (Guard(), None):

        def wrap(model, guard=guard):
            optimizer = guard_training.adamw(model)
            return model.with_bagua([optimizer], make(), guard=guard), optimizer

        def train(wrap=wrap):
            model, _ = guard_training.train(wrap, steps=60, outlier=outlier)
            bits.append(training.model_bits(model))
            return model

        texts.append([text for text in training.warnings_of(train) if "threshold" in text])
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
    def wrap(model):
        return wrapped(name, model, lr=0.05, guard=Guard(every=10))

    models = [guard_training.train(wrap, steps=40, seed=seed)[0] for seed in range(3)]
    return [stats_of(model) for model in models]


@pytest.mark.parametrize("name", ["gradient_allreduce", "bytegrad", "qadam"])
def test_a_healthy_run_has_no_breach(ranks, name):
    for of_rank in ranks(2, train_healthy, name):
        for stats in of_rank:
            assert stats["breaches"] == []
            figures = [bucket["relative_error"] for bucket in stats["buckets"].values()]
            assert all(0 < figure < 0.2 for figure in figures), (name, figures)
            assert (stats["checks"] > 0) == (name != "gradient_allreduce") == bool(figures)


@training.with_group
def breach(name):
    model, optimizer = guard_training.wrapped(name, training.network(), guard=TOUCHY)

    def train():
        for number in range(6):
            step(model, optimizer, number)

    texts = [text for text in training.warnings_of(train) if "threshold" in text]
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
def error_of_codecs():
    found = {}
    for codec in ("block_uint8", "int4_block"):
        model = training.network()
        optimizer = training.sgd(model)
        model.with_bagua([optimizer], ByteGradAlgorithm(False, codec=codec), guard=Guard())
        step(model, optimizer, 0)
        step(model, optimizer, 1)
        found[codec] = stats_of(model)["buckets"]["0"]["relative_error"]
        assert model.bagua_stats()["communicators"]["guard"]["bytes_sent"] > 0
    return found


def test_the_error_of_the_first_round_tells_codecs_apart(ranks):
    results = ranks(3, error_of_codecs)
    assert results[0] == results[1] == results[2]
    assert 0 < results[0]["block_uint8"] < 0.05 < results[0]["int4_block"] < 0.3


@training.with_group
def under_a_scaler(scale):
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    model, optimizer = wrapped(
        "bytegrad-feedback", training.network(), grad_scaler=scaler, guard=Guard()
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
    for number in range(8):
        step(model, optimizer, number)
    return stats_of(model)


def test_residuals_are_measured_but_not_judged_under_sgd(ranks):
    for stats in ranks(2, keep_residuals_under_sgd):
        assert stats["buckets"]["0"]["residual"] > TOUCHY.residual
        assert stats["breaches"] == []


@training.with_group
def refuse(name):
    model = training.network()
    return training.error_of(lambda: wrapped(name, model, guard=Guard()), ValueError)


@pytest.mark.parametrize("name", ["async", "diloco"])
def test_algorithms_without_common_rounds_say_what_to_do_instead(ranks, name):
    for message in ranks(2, refuse, name):
        assert "Leave guard= out" in message


class _WithOwnGuard(Algorithm):
    def reify(self, process_group):
        implementation = ByteGradAlgorithm(False).reify(process_group)
        implementation.traits = replace(implementation.traits, default_guard=TOUCHY)
        return implementation


@training.with_group
def bring_a_guard():
    model = training.network()
    optimizer = training.sgd(model)
    model.with_bagua([optimizer], _WithOwnGuard())
    for number in range(5):
        step(model, optimizer, number)
    assert stats_of(model)["breaches"]
    model.with_bagua([optimizer], GradientAllReduceAlgorithm())
    assert "guard" not in model.bagua_stats()


def test_an_algorithm_may_bring_its_guard_and_another_wrap_forgets_it(ranks):
    ranks(2, bring_a_guard)


@training.with_group
def guard_the_class():
    model, twin = training.network(), training.network()
    optimizer, of_twin = guard_training.adamw(model), guard_training.adamw(twin)
    ddp = DistributedDataParallel(
        model, optimizers=[optimizer], algorithm=ByteGradAlgorithm(False), guard=TOUCHY
    )
    twin.with_bagua([of_twin], ByteGradAlgorithm(False), guard=TOUCHY)
    for number in range(4):
        step(ddp, optimizer, number)
        step(twin, of_twin, number)
    assert training.model_bits(model) == training.model_bits(twin)
    copied = copy.deepcopy(ddp)
    of_copy = torch.optim.SGD(copied.parameters(), lr=0.1)
    for number in range(4):
        step(copied, of_copy, number)
    return [stats_of(each) for each in (ddp, twin, copied)]


def test_the_class_is_guarded_as_a_module_is_and_so_is_its_copy(ranks):
    for of_class, of_twin, of_copy in ranks(3, guard_the_class):
        assert of_class == of_twin
        assert of_class["rounds"] == of_copy["rounds"] == 4
        assert of_class["breaches"]
        assert of_copy["breaches"]


@training.with_group
def train_with_uneven_inputs():
    model = training.network()
    optimizer = training.sgd(model)
    algorithm = ByteGradAlgorithm(False)
    ddp = DistributedDataParallel(model, optimizers=[optimizer], algorithm=algorithm, guard=TOUCHY)
    with ddp.join():
        for number in range(4 + 3 * dist.get_rank()):
            step(ddp, optimizer, number)
    weights = training.gather(training.bits(list(model.parameters())))
    assert len(set(weights)) == 1, weights
    return stats_of(ddp)


def test_ranks_without_inputs_take_part_in_the_checks_of_the_others(ranks):
    stats = ranks(3, train_with_uneven_inputs)
    assert stats[0] == stats[1] == stats[2]
    assert stats[0]["rounds"] == 10
    assert stats[0]["breaches"]


@training.with_group
def accumulate(name):
    model, optimizer = wrapped(name, training.network(), guard=WATCHING)
    for number in range(12):
        optimizer.zero_grad()
        with model.no_sync():
            training.squared_error(model, training.batch(number, dist.get_rank())).backward()
        training.squared_error(model, training.batch(99 + number, dist.get_rank())).backward()
        optimizer.step()
        training.assert_ranks_agree(model)
    return stats_of(model)


@pytest.mark.parametrize("name", ["bytegrad", "qadam"])
def test_accumulated_gradients_are_compared_once_per_round(ranks, name):
    for stats in ranks(2, accumulate, name):
        assert stats["rounds"] == 12
        assert stats["checks"] > 0
        assert stats["breaches"] == []
        assert 0 < stats["buckets"]["0"]["relative_error"] < 0.3


@training.with_group
def overflow(name, rounds):
    """A loss scale that overflows in `rounds`, which the scaler skips."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model, optimizer = wrapped(name, training.network(), grad_scaler=scaler, guard=WATCHING)

    def train():
        for number in range(20):
            optimizer.zero_grad()
            loss = training.squared_error(model, training.batch(number, dist.get_rank()))
            factor = math.inf if number in rounds and dist.get_rank() == 0 else 1.0
            scaler.scale(loss * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            training.assert_ranks_agree(model)

    texts = training.warnings_of(train)
    return stats_of(model), [text for text in texts if "NaN" in text]


@pytest.mark.parametrize("name", ["bytegrad", "bytegrad-feedback"])
def test_a_skipped_step_is_no_breach(ranks, name):
    for stats, texts in ranks(2, overflow, name, (0, 3, 5, 9, 12)):
        assert stats["breaches"] == []
        assert stats["checks"] > 0
        assert "relative_error" in stats["buckets"]["0"]
        assert texts == []


def test_rounds_without_end_that_are_not_finite_warn_once(ranks):
    results = ranks(2, overflow, "bytegrad", tuple(range(3, 20)))
    for stats, _ in results:
        assert stats["breaches"] == []
        assert stats["nonfinite_share"] == 1.0
    assert [len(texts) for _, texts in results] == [1, 0]


class _Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(training.FEATURES, training.OUTPUTS)
        self.second = nn.Linear(training.FEATURES, training.OUTPUTS)

    def forward(self, x):
        return self.first(x)


@training.with_group
def leave_unused():
    torch.manual_seed(0)
    model = _Halves()
    optimizer = training.sgd(model, lr=0.02)
    algorithm = ByteGradAlgorithm(False)
    model.with_bagua([optimizer], algorithm, find_unused_parameters=True, guard=WATCHING)
    for number in range(8):
        step(model, optimizer, number)
        training.assert_ranks_agree(model)
    return stats_of(model)


def test_parameters_without_gradient_are_not_counted(ranks):
    for stats in ranks(2, leave_unused, env=training.SMALL_BUCKETS):
        assert stats["breaches"] == []
        figures = [bucket.get("relative_error") for bucket in stats["buckets"].values()]
        assert any(figure is not None for figure in figures)


@training.with_group
def unfreeze():
    model = training.network()
    model[0].weight.requires_grad_(False)
    model, optimizer = wrapped("bytegrad", model, guard=TOUCHY)
    before = []

    def train():
        for number in range(8):
            if number == 4:
                before.extend(stats_of(model)["breaches"])
                model[0].weight.requires_grad_(True)
            step(model, optimizer, number)

    texts = [text for text in training.warnings_of(train) if "threshold" in text]
    return before, stats_of(model)["breaches"], len(texts)


def test_new_buckets_are_watched_from_their_first_round_on_and_told_of_once(ranks):
    for rank, (before, after, texts) in enumerate(ranks(2, unfreeze)):
        assert [found["round"] for found in before] == [2]
        assert [found["round"] for found in after] == [2, 6]
        assert texts == (1 if rank == 0 else 0)


@training.with_group
def train_over_nodes(hierarchical, feedback):
    model = training.network()
    optimizer = guard_training.adamw(model)
    algorithm = ByteGradAlgorithm(hierarchical, codec="int4_block", error_feedback=feedback)
    model.with_bagua([optimizer], algorithm, guard=WATCHING)
    for number in range(4):
        step(model, optimizer, number)
        training.assert_ranks_agree(model)
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
        step(model, optimizer, number)
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
