"""Communication hooks: torch's own, beside torch's DistributedDataParallel."""

import threading

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import ByteGradAlgorithm
from bagua.torch_api.data_parallel import DistributedDataParallel
from support import training
from support.cases import over
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP

STEPS = 6


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, 3)
    )


def power_sgd_state():
    return powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5
    )


def bf16_hook(group, bucket):
    """torch's own, which DistributedDataParallel of torch refuses where there is no NCCL."""
    return default_hooks.bf16_compress_hook(group, bucket)


HOOKS = {
    "allreduce": (lambda: None, default_hooks.allreduce_hook),
    "fp16": (lambda: dist.group.WORLD, default_hooks.fp16_compress_hook),
    "bf16": (lambda: None, bf16_hook),
    "power_sgd": (power_sgd_state, powerSGD_hook.powerSGD_hook),
    "fp16_of_power_sgd": (
        power_sgd_state,
        default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
    ),
}

# gloo's order of summation depends on where a parameter lies in the bucket, which only half
# precision notices.
TOLERANCE = {"fp16": 1e-4, "bf16": 1e-3, "fp16_of_power_sgd": 1e-3}


def steps(ddp, optimizer, first, count):
    for step in range(first, first + count):
        optimizer.zero_grad()
        training.squared_error(ddp, training.batch(step, dist.get_rank())).backward()
        optimizer.step()


def hooked(wrap, name, **arguments):
    ddp = wrap(network(), **arguments)
    make_state, hook = HOOKS[name]
    state = make_state()
    ddp.register_comm_hook(state, hook)
    optimizer = training.sgd(ddp)
    weights = []
    for step in range(STEPS):
        steps(ddp, optimizer, step, 1)
        weights.append([p.detach().clone() for p in ddp.parameters()])
    return ddp, weights, state


@training.with_group
def beside_torch(name, arguments):
    ddp, mine, state = hooked(DistributedDataParallel, name, **arguments)
    _, theirs, their_state = hooked(TorchDDP, name, **arguments)
    tolerance = TOLERANCE.get(name, 1e-6)
    for step in range(STEPS):
        for p, q in zip(mine[step], theirs[step], strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=tolerance)
    training.assert_ranks_agree(ddp)
    if isinstance(state, powerSGD_hook.PowerSGDState):
        assert state.iter == their_state.iter == STEPS, "is_last was right"
        assert state.error_dict.keys() == their_state.error_dict.keys()
        assert state.total_numel_after_compression > 0
    stats = ddp.bagua_stats()
    return stats["rounds"], stats["total"]["bytes_sent"], stats["buckets"][0]["ops"]


@over(name=HOOKS)
def test_torchs_hooks_train_as_in_torch(ranks, name):
    for rounds, sent, ops in ranks(3, beside_torch, name, {}):
        assert rounds == STEPS
        assert sent == 0, "the hook replaces all communication"
        assert ops[0].startswith("CommHook(")


def test_hooks_run_bucket_by_bucket(ranks):
    arguments = {"bucket_cap_mb": 0.0001, "gradient_as_bucket_view": True}
    for rounds, _, _ in ranks(3, beside_torch, "fp16", arguments, env={"BAGUA_LANES": "3"}):
        assert rounds == STEPS


def future_of(tensor):
    future = torch.futures.Future()
    future.set_result(tensor)
    return future


@training.with_group
def what_a_hook_sees():
    ddp = DistributedDataParallel(network(), bucket_cap_mb=0.001)
    seen = []

    def look(state, bucket):
        assert isinstance(bucket, dist.GradBucket)
        gradients, parameters = bucket.gradients(), bucket.parameters()
        assert [g.shape for g in gradients] == [p.shape for p in parameters]
        assert bucket.buffer().numel() == sum(g.numel() for g in gradients)
        assert gradients[0].data_ptr() == bucket.buffer().data_ptr()
        names = [name for p in parameters for name, q in ddp.named_parameters() if p is q]
        seen.append((bucket.index(), bucket.is_last(), names, float(bucket.buffer().norm())))
        state.add(threading.get_ident())
        bucket.set_buffer(bucket.buffer() * 1)
        return future_of(bucket.buffer() * 2)

    threads = set()
    ddp.register_comm_hook(threads, look)
    local = network()
    data = training.batch(0, dist.get_rank())
    training.squared_error(ddp, data).backward()
    training.squared_error(local, data).backward()
    for p, q in zip(ddp.parameters(), local.parameters(), strict=True):
        torch.testing.assert_close(p.grad, 2 * q.grad, rtol=0, atol=0)
    count = len(ddp.bagua_buckets)
    assert count > 2
    assert [index for index, *_ in seen] == list(range(count))
    assert [last for _, last, *_ in seen] == [False] * (count - 1) + [True]
    assert sum(len(names) for _, _, names, _ in seen) == 6
    assert len(threads) == 1
    assert threads != {threading.get_ident()}


def test_a_hook_sees_undivided_gradients_of_its_parameters(ranks):
    ranks(2, what_a_hook_sees)


def raising(state, bucket):
    if dist.get_rank() == state:
        raise ZeroDivisionError("the hook's own mistake")
    return default_hooks.allreduce_hook(None, bucket)


def failing_future(state, bucket):
    def fail(_):
        raise ZeroDivisionError("the hook's own mistake")

    if dist.get_rank() == state:
        return default_hooks.allreduce_hook(None, bucket).then(fail)
    return default_hooks.allreduce_hook(None, bucket)


def wrong_size(state, bucket):
    return future_of(torch.zeros(3) if dist.get_rank() == state else bucket.buffer())


def no_future(state, bucket):
    return bucket.buffer()


@training.with_group
def failing(hook):
    ddp = DistributedDataParallel(network())
    ddp.register_comm_hook(1, hook)
    data = training.batch(0, dist.get_rank())
    try:
        training.squared_error(ddp, data).backward()
        training.squared_error(ddp, data).backward()
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("hook", "text"),
    [
        (raising, "the hook's own mistake"),
        (failing_future, "the hook's own mistake"),
        (wrong_size, "the hook returned 3 elements for a bucket of 1299; its future must hold"),
        (no_future, "Future"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_errors_in_a_hook_are_raised_by_backward_on_all_ranks(ranks, hook, text):
    for message in ranks(2, failing, hook, fresh=True):
        assert text in message
        assert f"CommHook({hook.__name__})" in message


@training.with_group
def refused():
    model = network()
    ddp = DistributedDataParallel(model, algorithm=ByteGradAlgorithm(False))
    with pytest.raises(RuntimeError, match="ByteGradAlgorithmImpl has a separate communication"):
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    ddp = DistributedDataParallel(model)
    with pytest.raises(TypeError, match="7 is not callable"):
        ddp.register_comm_hook(None, 7)
    with pytest.raises(TypeError, match=r"must take \(state, bucket\)"):
        ddp.register_comm_hook(None, lambda bucket: None)
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(RuntimeError, match="a hook is registered already"):
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(ValueError, match=r"bucket annotation should be dist\.GradBucket, not int"):
        ddp.register_comm_hook(None, annotated)
    ddp = DistributedDataParallel(model)
    loss = training.squared_error(ddp, training.batch(0, dist.get_rank()))
    with pytest.raises(RuntimeError, match="a forward waits for its backward; call it between"):
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    loss.backward()


def annotated(state, bucket: int):
    return bucket


def test_invalid_and_late_hooks_are_refused(ranks):
    ranks(2, refused)


@training.with_group
def late(arguments):
    results = []
    for wrap in (DistributedDataParallel, TorchDDP):
        ddp = wrap(network(), **arguments)
        optimizer = training.sgd(ddp)
        steps(ddp, optimizer, 0, 2)
        with ddp.no_sync():  # accumulated before the hook comes
            training.squared_error(ddp, training.batch(90, dist.get_rank())).backward()
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        if wrap is DistributedDataParallel:
            with pytest.raises(RuntimeError, match="can only be called once"):
                ddp.register_comm_hook(None, default_hooks.allreduce_hook)
        training.squared_error(ddp, training.batch(2, dist.get_rank())).backward()
        optimizer.step()
        steps(ddp, optimizer, 3, 3)
        results.append(list(ddp.parameters()))
    for p, q in zip(*results, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-4)


@over(view=(False, True))
def test_hooks_may_come_after_training_has_begun(ranks, view):
    ranks(3, late, {"gradient_as_bucket_view": view})


@training.with_group
def joined(inputs):
    """A hook's own collectives are answered by ranks without inputs, too."""
    results = []
    for wrap in (DistributedDataParallel, TorchDDP):
        ddp = wrap(network())
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        optimizer = training.sgd(ddp)
        with ddp.join(divide_by_initial_world_size=False):
            steps(ddp, optimizer, 0, inputs[dist.get_rank()])
        results.append(list(ddp.parameters()))
    for p, q in zip(*results, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=TOLERANCE["fp16"])


def test_hooks_and_uneven_inputs(ranks):
    ranks(3, joined, (1, 3, 2))
