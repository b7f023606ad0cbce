"""The class with a loss scale: algorithms that remember gradients keep them unscaled."""

import copy

import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import QAdamAlgorithm, QAdamOptimizer
from bagua.torch_api.data_parallel import DistributedDataParallel
from support import every_algorithm, training
from support.cases import over

STEPS = 5


def made(name, model):
    """An algorithm without lossy formats that depend on the scale, and its optimizer."""
    if name != "qadam":
        return every_algorithm.made(name), training.sgd(model)
    optimizer = QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=2)
    return QAdamAlgorithm(optimizer, hierarchical=False, codec="bf16"), optimizer


def wrap(how, model, algorithm, optimizer, **arguments):
    if how == "with_bagua":
        return model.with_bagua([optimizer], algorithm, do_flatten=False, **arguments)
    return DistributedDataParallel(model, algorithm=algorithm, optimizers=[optimizer], **arguments)


def train(model, optimizer, scaler):
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = training.squared_error(model, training.batch(step, dist.get_rank()))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        training.assert_ranks_agree(model)


@training.with_group
def train_scaled(how, name, enabled):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=enabled)
    network = training.network()
    algorithm, optimizer = made(name, network)
    model = wrap(how, network, algorithm, optimizer, grad_scaler=scaler)
    train(model, optimizer, scaler)
    return training.bits(network.parameters())


@over(name=("power_sgd", "sparse", "qadam"))
def test_a_scale_changes_no_bit_of_the_weights(ranks, name):
    unscaled = ranks(2, train_scaled, "class", name, False)
    assert ranks(2, train_scaled, "class", name, True) == unscaled
    assert ranks(2, train_scaled, "with_bagua", name, True) == unscaled


class CountingScaler(torch.amp.GradScaler):
    """Counts how often the scale is asked for, which waits for the device on CUDA."""

    asked = 0

    def get_scale(self):
        self.asked += 1
        return super().get_scale()


@training.with_group
def count_questions(name):
    scaler = CountingScaler("cpu", init_scale=2.0**10)
    network = training.network()
    algorithm, optimizer = made(name, network)
    train(wrap("with_bagua", network, algorithm, optimizer, grad_scaler=scaler), optimizer, scaler)
    return scaler.asked


@over(name=("gradient_allreduce", "bytegrad", "qadam", "power_sgd"))
def test_the_scale_is_asked_for_once_a_step_where_it_is_read(ranks, name):
    expected = STEPS if name in ("qadam", "power_sgd") else 0
    assert ranks(2, count_questions, name) == [expected] * 2


def scaled(name):
    network = training.network()
    algorithm, optimizer = made(name, network)
    scaler = torch.amp.GradScaler("cpu")
    return wrap("class", network, algorithm, optimizer, grad_scaler=scaler), optimizer, scaler


@training.with_group
def copy_and_train():
    exact, _, scaler = scaled("gradient_allreduce")
    twin = copy.deepcopy(exact)
    train(twin, training.sgd(twin), scaler)
    twin = copy.deepcopy(scaled("power_sgd")[0])
    with torch.no_grad():
        twin(training.batch(0, 0)[0])  # an average of weights is evaluated
    return training.error_of(lambda: twin(training.batch(0, 0)[0]))


def test_a_copy_that_would_train_without_the_scaler_it_needs_is_refused(ranks):
    for message in ranks(2, copy_and_train):
        assert "RuntimeError: this DistributedDataParallel is a copy" in message
        assert "DistributedDataParallel(copy.module, grad_scaler=...)" in message


@training.with_group
def join():
    model, optimizer, scaler = scaled("power_sgd")

    def uneven():
        with model.join():
            train(model, optimizer, scaler)

    return training.error_of(uneven)


def test_join_is_refused_where_a_rank_would_not_know_the_scale(ranks):
    for message in ranks(2, join):
        assert message.startswith("NotImplementedError: join() with")
        assert "grad_scaler=: a rank without inputs does not know the loss scale" in message


@training.with_group
def pass_other_things():
    own = torch.amp.GradScaler("cpu") if dist.get_rank() == 0 else None
    return (
        training.error_of(lambda: DistributedDataParallel(training.network(), grad_scaler=2.0)),
        training.error_of(lambda: DistributedDataParallel(training.network(), grad_scaler=own)),
    )


def test_what_is_no_scaler_and_ranks_that_differ_are_named(ranks):
    for wrong, differs in ranks(2, pass_other_things):
        assert "TypeError: DistributedDataParallel: grad_scaler must be None or a" in wrong
        assert "grad_scaler=" in differs
        assert "BaguaMismatchError" in differs
