"""Local training and what surrounds a step: scalers, buffers, dtypes, evaluation, logs."""

from functools import partial

import bagua.torch_api as bagua
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import (
    AsyncModelAverageAlgorithm,
    DiLoCoAlgorithm,
    OuterSGD,
)
from ranks.test_diloco import (
    adamw,
    assert_outer_state_agrees,
    assert_weights_are_the_anchor,
    outer_state,
    own_step,
    own_steps,
)
from support import training
from support.cases import over
from torch import nn


def wrapped(model=None, interval=3, **arguments):
    model = training.network() if model is None else model
    optimizer = adamw(model)
    algorithm = DiLoCoAlgorithm(interval=interval, **arguments)
    return model.with_bagua([optimizer], algorithm), optimizer


@training.with_group
def skipped_steps():
    """Rank 1's second step overflows: its scaler skips it."""
    model, optimizer = wrapped(interval=3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    rounds = []
    for step in range(6):
        optimizer.zero_grad()
        loss = training.squared_error(model, training.batch(step, dist.get_rank()))
        if step == 1 and dist.get_rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        before = training.bits(model.parameters())
        scaler.step(optimizer)
        if step == 1:
            assert (training.bits(model.parameters()) == before) == (dist.get_rank() == 1)
        scaler.update()
        rounds.append(model.bagua_algorithm.outer_rounds)
    assert_outer_state_agrees(model)
    assert_weights_are_the_anchor(model)
    return rounds


def test_a_step_that_the_scaler_skips_counts(ranks):
    assert ranks(2, skipped_steps) == [[0, 0, 1, 1, 1, 2]] * 2


@training.with_group
def last_of_two_optimizers():
    model = training.network()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.SGD(model[2].parameters(), lr=0.1)
    model.with_bagua([first, second], DiLoCoAlgorithm(interval=2))
    for step in range(4):
        training.train(model, [first, second], [training.batch(step, dist.get_rank())])
    assert_weights_are_the_anchor(model)
    return model.bagua_algorithm.outer_rounds


def test_steps_of_the_last_optimizer_count(ranks):
    assert ranks(2, last_of_two_optimizers) == [2, 2]


def normalised():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


@training.with_group
def buffers():
    model, optimizer = wrapped(normalised(), interval=2)
    model[1].running_mean.fill_(float(dist.get_rank()))
    model[1].num_batches_tracked.fill_(3 + dist.get_rank())
    model.eval()
    seen = []
    for step in range(2):
        own_step(model, optimizer, step)
        seen.append((model[1].running_mean.unique().tolist(), int(model[1].num_batches_tracked)))
    return seen


def test_a_round_gives_statistics_their_mean_and_other_buffers_the_first_ranks_values(ranks):
    for rank, (before, after) in enumerate(ranks(4, buffers)):
        assert before == ([rank], 3 + rank)
        assert after == ([1.5], 3)


class Contrastive(nn.Module):
    """A queue of unit vectors, a statistic of its user, and a momentum encoder."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(5, 3), nn.Linear(5, 3).requires_grad_(False)
        self.still = nn.Parameter(torch.ones(4), requires_grad=False)
        for name in ("queue", "statistic"):
            self.register_buffer(name, torch.zeros(2))
        self.register_buffer("place", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        return self.query(x)


@training.with_group
def share_untrained(mean_buffers, broken):
    model, optimizer = wrapped(Contrastive(), interval=2, mean_buffers=mean_buffers)
    own_step(model, optimizer, 0)
    rank = dist.get_rank()
    for tensor in (model.queue, model.statistic, model.place, *model.key.parameters()):
        tensor.data = torch.full_like(tensor, rank + 1)  # torch counts no version
    if rank == 0 and broken:
        model.state_dict()[broken].fill_(float("nan"))
    own_step(model, optimizer, 1)
    shared = (model.queue, model.statistic, model.place, model.key.weight, model.key.bias)
    return [tensor.unique().item() for tensor in shared]


def test_a_round_shares_buffers_without_a_mean_and_frozen_weights_that_training_moves(ranks):
    assert ranks(2, share_untrained, None, None) == [[1, 1, 1, 1.5, 1.5]] * 2
    assert ranks(2, share_untrained, ["stat*"], None) == [[1, 1.5, 1, 1.5, 1.5]] * 2


@over(broken=["queue", "statistic", "key.weight"])
def test_nan_in_what_nobody_trains_stays_on_its_rank(ranks, broken):
    assert ranks(2, share_untrained, ["statistic"], broken) == [[2] * 5] * 2


class PartlyMoved(nn.Linear):
    """Frozen tensors of many elements, one of which training moves, and a buffer with a history."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(5, 3)
        for dtype in (torch.float32, torch.int8, torch.complex64, torch.float8_e4m3fn):
            frozen = nn.Parameter(torch.ones(5000).to(dtype), requires_grad=False)
            self.register_parameter(str(dtype).split(".")[1], frozen)
        self.register_buffer("mean", torch.zeros(3))

    def move(self):
        for frozen in (p for p in self.parameters() if not p.requires_grad):
            frozen.data[1] = torch.tensor(1.0 + 2 * dist.get_rank()).to(frozen.dtype)

    def moved(self):
        return [complex(p[1]).real for p in self.parameters() if not p.requires_grad]

    def forward(self, x):
        outputs = super().forward(x)
        self.mean = 0.9 * self.mean + 0.1 * outputs.mean(0)
        return outputs


@training.with_group
def share_one_element():
    model, optimizer = wrapped(PartlyMoved(), interval=2)
    own_step(model, optimizer, 0)
    model.move()
    mean = bagua.average_weights(model)
    own_step(model, optimizer, 1)
    return mean.moved(), model.moved(), mean.mean.tolist()


def test_a_frozen_weight_of_which_training_moves_one_element_is_shared(ranks):
    first, second = ranks(2, share_one_element)
    assert first == second
    assert first[:2] == ([2, 1, 2, 2],) * 2


CHANGES = {
    "replaced": lambda model: setattr(model, "weight", nn.Parameter(model.weight.detach().clone())),
    "float64": lambda model: model.double(),
    "reshaped": lambda model: setattr(model.weight, "data", torch.ones(3, 1)),
}


def change_at(algorithm, change, place):
    """Train, with a change before a step or after the last one."""
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model.with_bagua([optimizer], algorithm)
    for step in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 5)).sum().backward()
        if (place, step) == ("step", 1):
            change(model)
            model.zero_grad()  # gradients are of the weights before
        optimizer.step()
    if place == "end":
        change(model)
    if isinstance(algorithm, DiLoCoAlgorithm):
        model.bagua_algorithm.sync()
    else:
        model.bagua_algorithm.abort(model)


@training.with_group
def errors_of_changes():
    errors = {
        (name, place, type(algorithm).__name__): training.error_of(
            partial(change_at, algorithm, change, place)
        )
        for name, change in CHANGES.items()
        for place in ("step", "end")
        for algorithm in (DiLoCoAlgorithm(interval=2), AsyncModelAverageAlgorithm())
    }
    bagua.barrier()
    return errors


def test_weights_that_change_between_the_last_forward_and_an_average_are_named(ranks):
    for errors in ranks(2, errors_of_changes):
        for situation, error in errors.items():
            assert "module 'Linear': 'weight' " in error, situation
            assert "Call bagua.wrap again, on every rank" in error, situation


@training.with_group
def wrong_names():
    wraps = [
        partial(wrapped, Contrastive(), mean_buffers=names)
        for names in ("queue", ["queue", "place"])
    ]
    return [training.error_of(wrap) for wrap in wraps]


def test_mean_buffers_that_the_module_has_not_are_refused_by_name(ranks):
    for kind, name in ranks(2, wrong_names):
        assert "mean_buffers is a list of names of buffers, not 'queue'" in kind
        assert "'place' is not the name of a floating-point buffer" in name
        assert "the module has queue, statistic" in name


@training.with_group
def end_after(steps, syncs):
    model, optimizer = wrapped(interval=3)
    own_steps(model, optimizer, range(steps))
    if syncs:
        model.bagua_algorithm.sync()
    return training.warnings_of(bagua.destroy_process_group)


def test_steps_that_no_round_has_seen_are_told_once_at_the_end(ranks):
    for steps, syncs in ((0, False), (3, False), (4, True)):
        assert ranks(2, end_after, steps, syncs) == [[], []]
    for steps, since in ((2, "at all"), (4, "since outer round 1")):
        (warning,), others = ranks(2, end_after, steps, False)
        assert f"No round was made {since}" in warning
        assert "model.bagua_algorithm.sync() on every rank" in warning
        assert others == []


@training.with_group
def nothing_to_train():
    return training.warnings_of(lambda: wrapped(training.network().requires_grad_(False)))


def test_a_wrap_with_nothing_to_train_is_told(ranks):
    (warning,) = [text for texts in ranks(2, nothing_to_train) for text in texts]
    assert "module 'Sequential': bagua.wrap has found nothing to train" in warning
    assert "4 parameter(s) are frozen" in warning


@training.with_group
def without_optimizer():
    return training.error_of(lambda: training.network().with_bagua([], DiLoCoAlgorithm()))


def test_a_wrap_without_optimizers_is_refused(ranks):
    for error in ranks(2, without_optimizer):
        assert error.startswith("ValueError")
        assert "counts the steps of the optimizers given to bagua.wrap" in error


@training.with_group
def mixed_dtypes():
    torch.manual_seed(0)
    model = nn.ParameterDict(
        {
            "a": nn.Parameter(torch.randn(7)),
            "b": nn.Parameter(torch.randn(3, 5).bfloat16()),
            "c": nn.Parameter(torch.randn(2).double()),
            "d": nn.Parameter(torch.randn(4, 3).half()),
            "frozen": nn.Parameter(torch.randn(2), requires_grad=False),
        }
    )
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model.with_bagua([optimizer], DiLoCoAlgorithm(OuterSGD(0.7, 0.9), interval=2))
    frozen = model["frozen"].clone()
    for step in range(4):
        for name, p in model.items():
            if name != "frozen":
                p.grad = torch.full_like(p, float(step + dist.get_rank()))
        optimizer.step()
    assert_outer_state_agrees(model)
    for name in "abcd":
        assert torch.equal(
            model[name].detach(),
            outer_state(model)[f"anchor/{name}"].to(model[name].dtype),
        )
    assert torch.equal(frozen, model["frozen"])
    return {key: str(value.dtype) for key, value in outer_state(model).items()}


def test_weights_of_several_dtypes_are_trained_together(ranks):
    for dtypes in ranks(3, mixed_dtypes):
        assert dtypes["anchor/b"] == dtypes["anchor/d"] == dtypes["anchor/a"] == "torch.float32"
        assert dtypes["anchor/c"] == dtypes["momentum/c"] == "torch.float64"
        assert "anchor/frozen" not in dtypes


@training.with_group
def logged(kind, rule):
    """What the library logs from a wrap and two rounds, by level."""
    model = nn.Linear(5, 3, bias=False)
    optimizer = kind(model.parameters(), lr=0.01)

    def train():
        model.with_bagua([optimizer], DiLoCoAlgorithm(rule, 1))
        own_steps(model, optimizer, range(2))

    return training.log_of(train)


def test_the_outer_rates_are_logged_once_and_much_momentum_over_muon_is_hinted_at(ranks):
    rule = "begins as local SGD"
    hint = "with Muon inside an outer momentum of 0.8 is much: leave outer_optimizer out"
    cases = [
        (torch.optim.Muon, None, rule, "INFO"),
        (torch.optim.SGD, None, rule, "INFO"),
        (torch.optim.Muon, OuterSGD(0.7, 0.8), hint, "WARNING"),
        (torch.optim.Muon, OuterSGD(0.7, 0.6), None, None),
        (torch.optim.SGD, OuterSGD(0.7, 0.8), None, None),
    ]
    for kind, given, text, level in cases:
        for seen in ranks(2, logged, kind, given):
            found = [(name, line) for name, line in seen if rule in line or "Muon" in line]
            assert len(found) == (text is not None), seen
            assert all(name == level and text in line for name, line in found)


@training.with_group
def evaluate_between_rounds():
    """Evaluation on some ranks only, in every way, sends nothing and changes nothing."""
    model, optimizer = wrapped(normalised(), interval=3)
    twin, of_twin = wrapped(normalised(), interval=3)
    outputs = []
    data = training.batch(99, 0)[0]
    for step in range(5):
        own_step(model, optimizer, step)
        own_step(twin, of_twin, step)
        if dist.get_rank() == 0:
            model.eval()
            with torch.no_grad():
                model(data)
            with model.bagua_algorithm.anchor():
                model(data)
            model(data).sum()
            model.train()
    before = training.bits(model.parameters())
    with model.bagua_algorithm.anchor():
        assert_weights_are_the_anchor(model)
        outputs.append(training.bits(model.parameters()))
    assert training.bits(model.parameters()) == before
    assert training.bits([*model.parameters(), *model.buffers()]) == training.bits(
        [*twin.parameters(), *twin.buffers()]
    )
    return outputs, before


def test_the_anchor_can_be_evaluated_and_leaves_no_trace(ranks):
    (anchor, own), (other_anchor, other) = ranks(2, evaluate_between_rounds)
    assert anchor == other_anchor
    assert own != other


@training.with_group
def inside_anchor():
    model, optimizer = wrapped(interval=3)
    own_step(model, optimizer, 0)
    own = training.bits(model.parameters())
    errors = []
    with model.bagua_algorithm.anchor():
        errors.append(training.error_of(lambda: model(training.batch(0, 0)[0])))
        errors.append(training.error_of(optimizer.step))
        errors.append(training.error_of(model.bagua_algorithm.sync))
        with model.bagua_algorithm.anchor():
            assert_weights_are_the_anchor(model)
        assert_weights_are_the_anchor(model)
    assert training.bits(model.parameters()) == own
    own_steps(model, optimizer, range(1, 3))
    assert model.bagua_algorithm.outer_rounds == 1
    return errors


def test_training_inside_anchor_is_refused_and_another_anchor_is_the_same(ranks):
    for errors in ranks(2, inside_anchor):
        for what, error in zip(
            ("a training forward", "optimizer.step()", "sync()"), errors, strict=True
        ):
            assert error.startswith("BaguaError")
            assert f"{what} inside anchor()" in error
