"""Users' algorithms, written against the interface that Bagua documents."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bagua.torch_api.algorithms import Algorithm, AlgorithmImpl
from bagua.torch_api.bucket import BaguaBucket
from ranks import training

LAYOUT = pytest.mark.parametrize("do_flatten", [True, False], ids=["flattened", "copied"])


class Own(Algorithm):
    """Makes the given implementation, as upstream's algorithms do in `reify`."""

    def __init__(self, implementation, *arguments):
        self.implementation = implementation
        self.arguments = arguments

    def reify(self, process_group):
        return self.implementation(process_group, *self.arguments)


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
    model.with_bagua([optimizer], Own(implementation), None, do_flatten)
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


class RaisesOnLastRank(HalvedGradients):
    def init_operations(self, bagua_ddp, bucket):
        def refuse(name):
            if self.process_group.rank == self.process_group.size - 1:
                raise LookupError("no idea")

        bucket.append_python_op(refuse)
        bucket.append_centralized_synchronous_op()


@training.with_group
def raise_in_a_python_op():
    model = training.network()
    model.with_bagua([], Own(RaisesOnLastRank))
    loss = training.squared_error(model, training.batch(0, dist.get_rank()))
    return training.error_of(loss.backward)


def test_an_exception_in_a_python_op_reaches_all_ranks_with_bucket_and_rank(ranks):
    for message in ranks(3, raise_in_a_python_op):
        assert "no idea" in message
        assert "bucket 'all'" in message
        assert "rank 2" in message


class AveragedWeights(AlgorithmImpl):
    """Weights, not gradients: averaged after the optimizer's step."""

    def init_tensors(self, bagua_ddp):
        self.tensors = [
            param.ensure_bagua_tensor(name, bagua_ddp.bagua_module_name)
            for name, param in bagua_ddp.bagua_build_params()
        ]
        return self.tensors

    def init_operations(self, bagua_ddp, bucket):
        bucket.clear_ops()
        bucket.append_centralized_synchronous_op(average=True)

    def init_backward_hook(self, bagua_ddp):
        return lambda name, parameter: None

    def init_post_backward_hook(self, bagua_ddp):
        return lambda: None

    def init_post_optimizer_step_hook(self, bagua_ddp):
        def hook(optimizer):
            for tensor in self.tensors:
                tensor.bagua_mark_communication_ready()
            bagua_ddp._bagua_backend.wait_pending_comm_ops()

        return hook


@training.with_group
def train_with_averaged_weights(do_flatten):
    model = training.network()
    twin = copy.deepcopy(model)
    optimizer, theirs = training.sgd(model), training.sgd(twin)
    model.with_bagua([optimizer], Own(AveragedWeights), None, do_flatten)
    for step in range(3):
        data = training.batch(step, dist.get_rank())
        training.train(model, optimizer, [data])
        training.train(twin, theirs, [data])
        for p in twin.parameters():
            p.data.copy_(training.mean_over_ranks(p))
        assert len(set(training.gather(training.bits(model.parameters())))) == 1
        training.assert_close(model, twin)
    local = training.gather(training.bits([p.grad for p in model.parameters()]))
    return len(set(local)), model.bagua_stats()["rounds"]


@LAYOUT
def test_weights_can_be_averaged_after_the_step_while_gradients_stay_local(ranks, do_flatten):
    assert ranks(3, train_with_averaged_weights, do_flatten) == [(3, 3)] * 3


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

    def init_backward_hook(self, bagua_ddp):
        return lambda name, parameter: parameter.bagua_mark_communication_ready()


class MomentumWithDefaultHook(Momentum):
    init_backward_hook = AlgorithmImpl.init_backward_hook


@training.with_group
def change_stage(implementation, do_flatten):
    model = training.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.with_bagua([optimizer], Own(implementation, optimizer, 2), None, do_flatten)
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
@pytest.mark.parametrize(
    "implementation", [Momentum, MomentumWithDefaultHook], ids=["own_hook", "default_hook"]
)
def test_need_reset_changes_from_gradients_to_momentum(ranks, implementation, do_flatten):
    assert ranks(3, change_stage, implementation, do_flatten) == [[1, 1, 2, 2]] * 3


class MarksTwice(HandMarked):
    def init_backward_hook(self, bagua_ddp):
        def hook(parameter_name, parameter):
            parameter.bagua_mark_communication_ready()
            parameter.bagua_mark_communication_ready()

        return hook


@training.with_group
def mark_twice():
    model = training.network()
    model.with_bagua([], Own(MarksTwice))
    loss = training.squared_error(model, training.batch(0, dist.get_rank()))
    return training.error_of(loss.backward)


def test_marking_a_tensor_twice_in_one_round_raises_and_names_it(ranks):
    assert "tensor '2." in ranks(1, mark_twice)[0]
    for message in ranks(2, mark_twice):
        assert "was marked ready twice in one round" in message


EXAMPLE_OF_WITH_BAGUA = """
model = torch.nn.Sequential(
    torch.nn.Linear(D_in, H),
    torch.nn.ReLU(),
    torch.nn.Linear(H, D_out),
)
optimizer = torch.optim.SGD(
    model.parameters(),
    lr=0.01,
    momentum=0.9
)
model = model.with_bagua(
    [optimizer],
    GradientAllReduce()
)
"""


@training.with_group
def run_the_documented_example(module):
    import importlib

    names = {"torch": torch, "D_in": training.FEATURES, "H": 7, "D_out": training.OUTPUTS}
    names["GradientAllReduce"] = importlib.import_module(module).GradientAllReduce
    exec(EXAMPLE_OF_WITH_BAGUA, names)
    training.train_on_ranks(names["model"], names["optimizer"])
    return isinstance(names["model"], nn.Sequential), names["model"].bagua_train_step_counter


@pytest.mark.parametrize(
    "module",
    [
        "bagua.torch_api",
        "bagua.torch_api.algorithms",
        "bagua.torch_api.algorithms.gradient_allreduce",
    ],
)
def test_the_example_of_the_documentation_runs_as_it_is_written(ranks, module):
    assert ranks(2, run_the_documented_example, module) == [(True, 3)] * 2
