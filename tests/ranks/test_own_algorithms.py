"""Users' algorithms, written against the interface that Bagua documents."""

import copy

import bagua.torch_api
import pytest
import torch
import torch.distributed as dist
from bagua.torch_api import algorithms
from bagua.torch_api.algorithms import AlgorithmImpl
from bagua.torch_api.bucket import BaguaBucket
from support import training

LAYOUT = pytest.mark.parametrize("do_flatten", [True, False], ids=["flattened", "copied"])


class HalvedGradients(AlgorithmImpl):
    """Gradients are halved by a function of the user's, then averaged; one bucket in all."""

    def init_tensors(self, bagua_ddp):
        tensors = []
        for name, param in reversed(bagua_ddp.bagua_build_params()):
            tensors.append(
                param.bagua_ensure_grad().ensure_bagua_tensor(
                    name,
                    bagua_ddp.bagua_module_name,
                    getter_closure=lambda param: param.grad,
                    setter_closure=lambda param, t: setattr(param, "grad", t),
                )
            )
        return tensors

    def tensors_to_buckets(self, tensors, do_flatten):
        merged = [tensor for group in tensors for tensor in group]
        size = self.process_group.size
        return [BaguaBucket(merged, flatten=do_flatten, name="all", alignment=size)]

    def init_operations(self, bagua_ddp, bucket):
        def halve(name):
            assert name == bucket.name
            for tensor in bucket.tensors:
                tensor.bagua_getter_closure().mul_(0.5)

        bucket.clear_ops()
        bucket.append_python_op(halve, group=self.process_group)
        bucket.append_centralized_synchronous_op(
            hierarchical=False, average=True, group=self.process_group
        )


class HandMarked(HalvedGradients):
    """The same, marking tensors and waiting by hand; counts what it is called for."""

    def __init__(self, process_group):
        super().__init__(process_group)
        self.calls = []

    def init_forward_pre_hook(self, bagua_ddp):
        def hook(inputs):
            self.calls.append("forward")

        return hook

    def init_backward_hook(self, bagua_ddp):
        names = {tensor.bagua_tensor_name for b in bagua_ddp.bagua_buckets for tensor in b.tensors}

        def hook(parameter_name, parameter):
            if parameter_name in names:
                self.calls.append(parameter_name)
                parameter.bagua_mark_communication_ready()

        return hook

    def init_post_backward_hook(self, bagua_ddp):
        def hook():
            bagua_ddp._bagua_backend.wait_pending_comm_ops()
            self.calls.append("waited")

        return hook

    def init_post_optimizer_step_hook(self, bagua_ddp):
        def hook(optimizer):
            self.calls.append(type(optimizer).__name__)

        return hook


@training.with_group
def train_with_halved_gradients(implementation, do_flatten):
    model = training.network()
    alone = copy.deepcopy(model)
    optimizer = training.sgd(model)
    model.with_bagua([optimizer], training.Own(implementation), None, do_flatten)
    training.train_on_ranks(model, optimizer)

    def half(m, data):
        return 0.5 * training.squared_error(m, data)

    training.assert_close(model, training.train_alone(alone, training.sgd(alone), loss=half))
    names = [bucket.name for bucket in model.bagua_buckets]
    return names, getattr(model.bagua_algorithm, "calls", [])


@LAYOUT
def test_a_python_op_runs_before_the_average_and_hooks_in_the_order_of_a_step(ranks, do_flatten):
    assert ranks(3, train_with_halved_gradients, HalvedGradients, do_flatten) == [(["all"], [])] * 3
    step = ["forward", "2.weight", "2.bias", "0.weight", "0.bias", "waited", "SGD"]
    for names, calls in ranks(3, train_with_halved_gradients, HandMarked, do_flatten):
        assert names == ["all"]
        assert len(calls) == 3 * len(step)
        for first in range(0, len(calls), len(step)):
            called = calls[first : first + len(step)]
            assert (called[0], called[-2:]) == (step[0], step[-2:])
            assert sorted(called) == sorted(step)


class MarksTwice(HandMarked):
    def init_backward_hook(self, bagua_ddp):
        def hook(parameter_name, parameter):
            parameter.bagua_mark_communication_ready()
            parameter.bagua_mark_communication_ready()

        return hook


@training.with_group
def mark_twice():
    model = training.network()
    model.with_bagua([], training.Own(MarksTwice))
    loss = training.squared_error(model, training.batch(0, dist.get_rank()))
    return training.error_of(loss.backward)


def test_marking_a_tensor_twice_in_one_round_raises_and_names_it(ranks):
    assert "tensor '2." in ranks(1, mark_twice)[0]
    messages = ranks(2, mark_twice)
    named = ["was marked ready twice in one round" in message for message in messages]
    # The first mark began the round, so the later rank may find the other one gone instead.
    assert any(named)
    for message, own in zip(messages, named, strict=True):
        assert own or "with peer" in message


def test_the_name_of_the_documentations_example_is_in_each_of_its_modules():
    for module in (bagua.torch_api, algorithms, algorithms.gradient_allreduce):
        assert module.GradientAllReduce is algorithms.GradientAllReduceAlgorithm, module


class Momentum(AlgorithmImpl):
    """Exact gradients for `warm_up` steps, then the mean of every rank's own momentum."""

    def __init__(self, process_group, optimizer, warm_up):
        super().__init__(process_group)
        self.optimizer = optimizer
        self.warm_up = warm_up
        self.step = 0

    def need_reset(self):
        self.step += 1
        return self.step == self.warm_up + 1

    @property
    def warming_up(self):
        return self.step <= self.warm_up

    def init_tensors(self, bagua_ddp):
        if self.warming_up:
            return super().init_tensors(bagua_ddp)
        state = self.optimizer.state
        tensors = []
        for name, param in bagua_ddp.bagua_build_params():
            state[param].setdefault("momentum", torch.zeros_like(param))
            tensors.append(
                param.ensure_bagua_tensor(
                    name,
                    bagua_ddp.bagua_module_name,
                    getter_closure=lambda param: state[param]["momentum"],
                    setter_closure=lambda param, t: state[param].__setitem__("momentum", t),
                )
            )
        return tensors

    def init_operations(self, bagua_ddp, bucket):
        def update(name):
            for tensor in bucket.tensors:
                momentum = self.optimizer.state[tensor]["momentum"]
                momentum.mul_(0.5).add_(tensor.grad, alpha=0.5)

        bucket.clear_ops()
        if not self.warming_up:
            bucket.append_python_op(update, group=self.process_group)
        bucket.append_centralized_synchronous_op(average=True, group=self.process_group)


@training.with_group
def change_stage(do_flatten):
    model = training.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.with_bagua([optimizer], training.Own(Momentum, optimizer, 2), None, do_flatten)
    before = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    ops = []
    for step in range(4):
        data = training.batch(step, dist.get_rank())
        local = training.local_gradients(model, training.squared_error, data)
        training.train(model, optimizer, [data])
        ops.append(len(model.bagua_buckets[0].ops))
        for name, p in model.named_parameters():
            if step < 2:
                torch.testing.assert_close(p.grad, training.mean_over_ranks(local[name]))
                continue
            torch.testing.assert_close(p.grad, local[name])
            before[name] = training.mean_over_ranks(0.5 * before[name] + 0.5 * local[name])
            torch.testing.assert_close(optimizer.state[p]["momentum"], before[name])
        momenta = [state["momentum"] for state in optimizer.state.values()]
        assert len(set(training.gather(training.bits(momenta)))) == 1
    return ops


@LAYOUT
def test_need_reset_changes_from_gradients_to_momentum(ranks, do_flatten):
    assert ranks(3, change_stage, do_flatten) == [[1, 1, 2, 2]] * 3
