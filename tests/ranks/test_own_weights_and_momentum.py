"""Users' algorithms that communicate weights or momentum, and one that changes its stage."""

import copy

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import AlgorithmImpl
from support import training

LAYOUT = pytest.mark.parametrize("do_flatten", [True, False], ids=["flattened", "copied"])


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
    model.with_bagua([optimizer], training.Own(AveragedWeights), None, do_flatten)
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
