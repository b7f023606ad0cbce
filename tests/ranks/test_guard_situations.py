"""Guard in the situations of training: accumulation, overflow, uneven inputs, checkpoints."""

import warnings

import bagua.torch_api as bagua
import pytest
import torch
import torch.distributed as dist
from bagua.torch_api import Guard
from bagua.torch_api.algorithms import ByteGradAlgorithm, QAdamAlgorithm, QAdamOptimizer
from bagua.torch_api.data_parallel import DistributedDataParallel
from ranks.test_groups_and_nodes import environment_of_nodes
from support import guard_training, training
from support.every_algorithm import wrapped
from torch import nn

TOUCHY = Guard(every=2, relative_error=1e-9, residual=1e-9, exact_rounds=3)
WATCHING = Guard(every=2)


def guard_stats(model):
    return model.bagua_stats()["guard"]


def quietly(function):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function()


def step(model, optimizer, number):
    optimizer.zero_grad()
    training.squared_error(model, training.batch(number, dist.get_rank())).backward()
    optimizer.step()


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
    return guard_stats(model)


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
            factor = float("inf") if number in rounds and dist.get_rank() == 0 else 1.0
            scaler.scale(loss * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            training.assert_ranks_agree(model)

    texts = training.warnings_of(train)
    return guard_stats(model), [text for text in texts if "NaN" in text]


@pytest.mark.parametrize("name", ["bytegrad", "bytegrad-feedback"])
def test_a_skipped_step_is_no_breach(ranks, name):
    for stats, texts in ranks(2, overflow, name, (1, 5, 9, 12)):
        assert stats["breaches"] == []
        assert stats["checks"] > 0
        assert texts == []


def test_rounds_without_end_that_are_not_finite_warn_once(ranks):
    results = ranks(2, overflow, "bytegrad", tuple(range(3, 20)))
    for stats, _ in results:
        assert stats["breaches"] == []
        assert stats["nonfinite_share"] == 1.0
    assert [len(texts) for _, texts in results] == [1, 0]


class _Touchy(ByteGradAlgorithm):
    def reify(self, process_group):
        implementation = super().reify(process_group)
        implementation.default_guard = TOUCHY
        return implementation


@training.with_group
def join_unevenly():
    model = training.network()
    optimizer = training.sgd(model, lr=0.02)
    ddp = DistributedDataParallel(model, optimizers=[optimizer], algorithm=_Touchy(False))

    def train():
        with ddp.join():
            for number in range(4 + 4 * dist.get_rank()):
                optimizer.zero_grad()
                training.squared_error(ddp, training.batch(number, dist.get_rank())).backward()
                optimizer.step()

    quietly(train)
    assert len(set(training.gather(training.bits(model.parameters())))) == 1
    return ddp.bagua_ddp.stats()["guard"]


def test_ranks_without_inputs_decide_with_the_others(ranks):
    first, second = ranks(2, join_unevenly)
    assert first == second
    assert first["breaches"]


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
    return guard_stats(model)


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

    def train():
        for number in range(4):
            step(model, optimizer, number)
        before = guard_stats(model)["breaches"]
        model[0].weight.requires_grad_(True)
        step(model, optimizer, 5)
        return before

    before = quietly(train)
    assert before
    stats = guard_stats(model)
    assert stats["breaches"] == before
    assert stats["buckets"]["0"]["exact"], "its tensors were exact in the bucket before"


def test_new_buckets_stay_exact(ranks):
    ranks(2, unfreeze)


def exact_buckets(model):
    return [bucket["exact"] for bucket in guard_stats(model)["buckets"].values()]


@training.with_group
def resume(name, folder, at):
    """Training with and without a checkpoint after `at` steps ends with the same bits."""

    def start():
        model, optimizer = guard_training.wrapped(name, training.network(), guard=TOUCHY)
        parts = {"model": model, "optimizer": optimizer, "algorithm": model.bagua_algorithm}
        return model, optimizer, parts | {"guard": model.bagua_guard}

    def train():
        model, optimizer, parts = start()
        for number in range(20):
            if number == at:
                assert any(exact_buckets(model))
                bagua.checkpoint.save_checkpoint(folder, parts, number)
            step(model, optimizer, number)
        straight = training.model_bits(model)
        model, optimizer, parts = start()
        step(model, optimizer, 77)  # is to be forgotten
        assert bagua.checkpoint.load_latest(folder, parts) == at
        for number in range(at, 20):
            step(model, optimizer, number)
        assert training.model_bits(model) == straight

    quietly(train)


@pytest.mark.parametrize("name", ["bytegrad", "bytegrad-feedback", "sparse"])
def test_training_resumes_to_the_bit_inside_exact_rounds(ranks, tmp_path, name):
    ranks(2, resume, name, str(tmp_path), 5)


@training.with_group
def train_over_nodes(algorithm):
    model = training.network()
    optimizer = guard_training.adamw(model)
    model.with_bagua([optimizer], algorithm, guard=TOUCHY)
    modes, errors = [], []

    def train():
        for number in range(12):
            mine = training.batch(number, dist.get_rank())
            local = training.local_gradients(model, training.squared_error, mine)
            step(model, optimizer, number)
            training.assert_ranks_agree(model)
            modes.append(exact_buckets(model)[0])
            means = {name: training.mean_over_ranks(gradient) for name, gradient in local.items()}
            found = [(p.grad - means[name]).abs().max() for name, p in model.named_parameters()]
            errors.append(float(max(found)))

    quietly(train)
    return modes, errors


OVER_NODES = {
    "leaders": ByteGradAlgorithm(True, codec="int4_block"),
    "sharded": ByteGradAlgorithm("sharded", codec="int4_block"),
    "leaders with residuals": ByteGradAlgorithm(True, codec="int4_block", error_feedback=True),
}


@pytest.mark.parametrize("way", OVER_NODES)
def test_nodes_become_exact_together(ranks, way):
    results = ranks(4, train_over_nodes, OVER_NODES[way], env=environment_of_nodes((3, 1)))
    modes = [modes for modes, _ in results]
    assert all(mode == modes[0] for mode in modes)
    assert True in modes[0]
    assert modes[0][0] is False
    for mode, error in zip(*results[0], strict=True):
        settles = "residuals" in way  # the first exact round sends residuals too
        assert mode == (error < 1e-5) or settles


@training.with_group
def send_momentum():
    model = training.network()
    optimizer = QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=3)
    algorithm = QAdamAlgorithm(optimizer, False, codec="bit2_block", error_feedback=True)
    model.with_bagua([optimizer], algorithm, guard=TOUCHY)
    residuals = []

    def train():
        for number in range(20):
            step(model, optimizer, number)
            training.assert_ranks_agree(model)
            state = model.bagua_algorithm.state_dict()
            errors = [value for key, value in state.items() if "/error/" in key]
            residuals.append((exact_buckets(model), any(bool(e.any()) for e in errors)))

    quietly(train)
    return residuals, guard_stats(model)["breaches"]


def test_momentum_and_its_residuals_are_watched_after_the_warm_up(ranks):
    first, second = ranks(2, send_momentum)
    assert first == second
    residuals, breaches = first
    assert [breach["figure"] for breach in breaches] == ["residual", "residual"]
    assert residuals[0] == ([], False), "in the warm-up there is nothing to watch"
    for exact, remains in residuals[4:]:
        assert remains == (exact == [False])


@training.with_group
def load_something_else():
    model, _ = wrapped("bytegrad", training.network(), guard=WATCHING)
    messages = [
        training.error_of(lambda s=state: model.bagua_guard.load_state_dict(s), ValueError)
        for state in ({"steps": 3}, {"rounds": 1, "other": 2}, {"rounds": -1})
    ]
    assert "'rounds'" in messages[0]
    assert "'other'" in messages[1]


def test_a_state_of_something_else_is_refused(ranks):
    ranks(1, load_something_else)
