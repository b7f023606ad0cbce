"""Users' algorithms, written against the interface that Bagua documents."""

import copy

import bagua.torch_api
import pytest
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
def test_a_python_op_runs_before_the_average(ranks, do_flatten):
    assert ranks(3, train_with_halved_gradients, HalvedGradients, do_flatten) == [(["all"], [])] * 3


@LAYOUT
def test_own_hooks_are_called_in_the_order_of_a_step(ranks, do_flatten):
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
    for message in ranks(2, mark_twice):
        assert "was marked ready twice in one round" in message


def test_the_name_of_the_documentations_example_is_in_each_of_its_modules():
    for module in (bagua.torch_api, algorithms, algorithms.gradient_allreduce):
        assert module.GradientAllReduce is algorithms.GradientAllReduceAlgorithm, module
