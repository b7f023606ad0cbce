"""All ranks start with the optimizer state of rank 0. Weights: situations/buffers.py."""

import collections
import io
import re

import pytest
import torch
import torch.distributed as dist
from bagua._core.state.archive import load_archive
from bagua.torch_api._rank_state import rank_state, restore
from bagua.torch_api.algorithms import Algorithm, GradientAllReduceAlgorithm, QAdamOptimizer
from bagua.torch_api.checkpoint import save_checkpoint
from support import training
from support.cases import over
from support.options import Mode, Settings, StrangeSGD, options, shown, strange_state
from torch.testing._internal.two_tensor import TwoTensor


def stepped_adam(model, lr):
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, betas=(0.5 + lr, 0.9), amsgrad=True)
    training.train(model, optimizer, [training.batch(step, 0) for step in range(2)])
    return optimizer


@training.with_group
def resume_with_adam(state_on_every_rank):
    rank = dist.get_rank()
    model = training.network(seed=rank)
    lr = 0.01 * (rank + 1)
    if rank == 0 or state_on_every_rank:
        optimizer = stepped_adam(model, lr)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=lr, amsgrad=True)
    model.with_bagua([optimizer], GradientAllReduceAlgorithm())
    states = [optimizer.state[p] for p in model.parameters()]
    digests = [training.bits([state[key] for key in sorted(state)]) for state in states]
    steps = [(state["step"].item(), state["step"].device.type) for state in states]
    group = optimizer.param_groups[0]
    training.train_on_ranks(model, optimizer)
    return digests, steps, group["lr"], group["betas"]


@pytest.mark.parametrize("everywhere", [True, False], ids=["differing", "only_on_rank_0"])
def test_optimizer_state_and_hyperparameters_of_rank_0_are_broadcast(ranks, everywhere):
    results = ranks(3, resume_with_adam, everywhere)
    assert results[0] == results[1] == results[2]
    _, steps, lr, betas = results[0]
    assert steps == [(2.0, "cpu")] * 4
    assert lr == 0.01
    assert betas == (0.51, 0.9)


@training.with_group
def wrap_with_unknown_state(holders):
    model = training.network()
    optimizer = training.sgd(model)
    if dist.get_rank() in holders:
        optimizer.param_groups[0]["strange"] = iter(())
    return training.error_of(lambda: model.with_bagua([optimizer], GradientAllReduceAlgorithm()))


def test_optimizer_state_that_cannot_be_sent_is_named_and_raises_everywhere(ranks):
    for message in ranks(2, wrap_with_unknown_state, [0, 1]):
        assert "TypeError" in message
        assert "param_groups[0]['strange'] is a tuple_iterator" in message
    first, second = ranks(2, wrap_with_unknown_state, [0])
    assert "param_groups[0]['strange'] is a tuple_iterator" in first
    assert "keep the value in an attribute of the optimizer" in first
    assert second.startswith("TypeError: an optimizer of rank 0 has an entry that cannot be sent")


def of_itself():
    inner = collections.deque()
    inner.append([inner])
    return inner


def of_a_function():
    class Inner:
        pass

    return Inner()


def of_another_function():
    return re.compile("a")


def of_two_tensors():
    return TwoTensor(torch.ones(2), torch.ones(2))  # as torchao's states in 8 bits are


class Pair:
    def __reduce__(self):
        return Pair, (torch.ones(2),)


@training.with_group
def wrap_with(make):
    model = training.network()
    optimizer = training.sgd(model)
    optimizer.param_groups[0]["strange"] = make()
    return training.error_of(lambda: model.with_bagua([optimizer], GradientAllReduceAlgorithm()))


@over(
    case=[
        (of_itself, "['strange'] is a deque; only what pickling makes by a call of a class"),
        (of_a_function, "['strange'] is of a class inside a function"),
        (of_another_function, "['strange'] is a Pattern; only"),
        (of_two_tensors, "['strange'] is a TwoTensor, a tensor that holds others"),
        (Pair, "['strange'] is a Pair, which pickling calls with tensors"),
    ]
)
def test_values_that_no_other_rank_could_make_are_named(ranks, case):
    make, text = case
    for message in ranks(2, wrap_with, make):
        assert message.startswith("TypeError: optimizer entry param_groups[0]" + text)
        assert "keep the value in an attribute of the optimizer" in message


@training.with_group
def save_with(make, folder):
    model = training.network()
    optimizer = training.sgd(model)
    model = model.with_bagua([optimizer], GradientAllReduceAlgorithm())
    optimizer.state["strange"] = make()
    return training.error_of(lambda: save_checkpoint(folder, {"optimizer": optimizer}, 1))


def test_a_save_names_a_tensor_that_holds_others(ranks, tmp_path):
    for message in ranks(2, save_with, of_two_tensors, str(tmp_path)):
        assert "strange" in message
        assert "is a TwoTensor, a tensor that holds others" in message


@training.with_group
def wrap_with_strange_options(on_first, on_others):
    rank = dist.get_rank()
    model = training.network(seed=rank)
    optimizer = StrangeSGD(model.parameters(), rank + 1, on_others if rank else on_first)
    expected = strange_state(StrangeSGD(training.network().parameters(), 1, on_first))
    optimizer.state["only here"] = rank
    if not on_first:
        optimizer.state.pop("only here")
        optimizer.state["only here"] = 0
    model.with_bagua([optimizer], GradientAllReduceAlgorithm())
    assert optimizer.state.pop("only here") == 0
    assert strange_state(optimizer) == expected
    training.train_on_ranks(model, optimizer)
    training.assert_ranks_agree(model)


@pytest.mark.parametrize(("on_first", "on_others"), [(True, False), (True, True), (False, True)])
def test_options_and_state_of_every_type_are_those_of_rank_0(ranks, on_first, on_others):
    ranks(2, wrap_with_strange_options, on_first, on_others)


@training.with_group
def wrap_with_lists_of_tensors():
    model = training.network(seed=dist.get_rank())
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    if dist.get_rank() == 0:
        optimizer.step(lambda: loss_of(model, optimizer))
    model.with_bagua([optimizer], GradientAllReduceAlgorithm())
    state = optimizer.state[next(model.parameters())]
    return [tensor.tolist() for key in ("old_dirs", "old_stps") for tensor in state[key]]


def loss_of(model, optimizer):
    optimizer.zero_grad()
    loss = training.squared_error(model, training.batch(0, 0))
    loss.backward()
    return loss


def test_tensors_in_lists_keep_their_values_on_rank_0_too(ranks):
    first, second = ranks(2, wrap_with_lists_of_tensors)
    assert first == second
    assert any(value != 0 for values in first for value in values)


@training.with_group
def wrap_with_a_class_of_rank_0():
    model = training.network()
    optimizer = training.sgd(model)
    if dist.get_rank() == 0:
        optimizer.state["mode"] = Mode.SLOW
    return training.error_of(lambda: model.with_bagua([optimizer], GradientAllReduceAlgorithm()))


def test_a_class_that_a_rank_does_not_hold_is_named_with_the_remedy(ranks):
    _, second = ranks(2, wrap_with_a_class_of_rank_0)
    assert "others['mode'] needs 'support.options.Mode', which this rank's own" in second
    assert "torch.serialization.add_safe_globals" in second


@training.with_group
def train_strangely(name, arguments):
    """Trains, and gives a round NaN where the algorithm begins such a rank anew."""
    rank = dist.get_rank()
    model = training.network(seed=rank)
    if name == "qadam":
        optimizer = QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=2)
        arguments = {"q_adam_optimizer": optimizer}
    else:
        optimizer = StrangeSGD(model.parameters(), rank + 1, state=True)
    optimizer.param_groups[0].update(options(rank + 1))
    optimizer.state["global_step"] = rank
    optimizer.state["history", 3] = options(rank + 1)
    model.with_bagua([optimizer], Algorithm.init(name, **arguments))
    for step in range(6):
        training.train(model, optimizer, [training.batch(step, rank)])
        if rank == 1 and step == 2 and name == "diloco":
            broken = torch.full((2,), float("nan"))
            optimizer.state["broken"] = [broken, Settings(1.0, broken)]
            model[0].weight.data.fill_(float("nan"))
    broken = optimizer.state.pop("broken", [torch.zeros(2)])
    state = rank_state(model.bagua_ddp)
    before = optimizer.state["global_step"]
    optimizer.state["global_step"] = 9
    restore(model.bagua_ddp, load_archive(archive_of(state)) if state else None, "remedy")
    if name != "decentralized":  # others leave optimizers to the library that saves
        optimizer.state["global_step"] = before
    if name == "async":
        model.bagua_algorithm.abort(model)
    return [shown(optimizer.state[key]) for key in STRANGE], broken[0].tolist()


STRANGE = ("global_step", ("history", 3))


def archive_of(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def test_algorithms_take_options_and_state_of_every_type(ranks):
    for name in ("qadam", "diloco", "decentralized", "async"):
        arguments = {"diloco": {"interval": 2}, "decentralized": {"hierarchical": False}}
        results = ranks(2, train_strangely, name, arguments.get(name, {}))
        expected = [shown(0), shown(options(1))]
        assert results == [(expected, [0.0, 0.0])] * 2, name
