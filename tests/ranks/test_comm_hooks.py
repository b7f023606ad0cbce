"""Communication hooks for torch's DistributedDataParallel, beside that class without one."""

import copy
import io
import warnings

import pytest
import torch
import torch.distributed as dist
from bagua import BaguaMismatchError, comm_hooks
from bagua.torch_api.algorithms import (
    ByteGradAlgorithm,
    GradientAllReduceAlgorithm,
    SparseAlgorithm,
)
from bagua.torch_api.algorithms.base import AlgorithmImpl, Traits
from bagua.torch_api.data_parallel import DistributedDataParallel as Own
from oracle import compressed_all_reduce, sparse
from ranks.test_groups_and_nodes import environment_of_nodes
from ranks.test_own_algorithms import HalvedGradients
from support import hooked, training
from support.cases import over
from support.error_feedback import owed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RATIO = 0.05


def held(tensor):
    future = torch.futures.Future()
    future.set_result(tensor)
    return future


def bytegrad(codec, bucket):
    brought = training.gather(bucket.buffer())
    return held(compressed_all_reduce.compressed_all_reduce(codec, brought, True))


def top_k(errors, bucket):
    """errors: this rank's, by parameter, each in the order of the bucket's memory."""
    parameters = bucket.parameters()
    mine = [errors.get(p, torch.zeros(p.numel())) for p in parameters]
    brought = training.gather((bucket.buffer(), torch.cat(mine)))
    k = max(1, round(RATIO * bucket.buffer().numel()))
    result, after = sparse.top_k(*zip(*brought, strict=True), k)
    own = after[dist.get_rank()].split([p.numel() for p in parameters])
    errors.update(zip(parameters, own, strict=True))
    return held(result)


@training.with_group
def compare(situation, algorithm, oracle=None, state=None):
    """Trains beside the class without a hook, or with `oracle` for its hook: the digests after
    every step, and whether torch has made its buckets anew."""
    ddp, handle, optimizer = hooked.made(situation, algorithm)
    other, _, its_optimizer = hooked.made(situation)
    if oracle is not None:
        other.register_comm_hook(state, oracle)
    digests = hooked.train(situation, ddp, optimizer)
    assert digests == hooked.train(situation, other, its_optimizer)
    stats = handle.stats()
    assert stats["rounds"] == hooked.STEPS
    assert stats["total"]["bytes_sent"] > 0
    return digests, ddp._get_ddp_logging_data()["has_rebuilt_buckets"]


@over(n=[2, 3], situation=hooked.SITUATIONS)
def test_the_exact_hook_gives_the_bits_of_the_class_without_a_hook(ranks, n, situation):
    ranks(n, compare, situation, "gradient_allreduce")


#: Situations, and whether torch makes its buckets anew after the first step.
LAYOUTS = {
    "small_buckets": True,
    "bucket_view": True,
    "static_graph": True,
    "unused": False,
    "channels_last": True,
    "mixed_dtypes": True,
}


@over(case=[(2, "block_uint8"), (3, "minmax_uint8")], situation=LAYOUTS)
def test_bytegrad_gives_the_bits_of_the_oracle(ranks, case, situation):
    n, codec = case
    algorithm = ByteGradAlgorithm(hierarchical=False, codec=codec)
    first, *others = ranks(n, compare, situation, algorithm, bytegrad, codec)
    assert others == [first] * (n - 1)
    assert first[1] == LAYOUTS[situation]


class Reducer(AlgorithmImpl):
    """All that it does is to reduce the gradients of a bucket."""

    traits = Traits(ranks_agree=True)

    def operations(self, bucket):
        return [bucket.sum_or_mean(compression="block_uint8", group=self.process_group)]


class Opener(Reducer):
    """Has more to do where it is given a module."""

    def init_operations(self, bagua_ddp, bucket):
        super().init_operations(bagua_ddp, bucket)


def test_an_own_reducer_of_gradients_is_a_hook(ranks):
    algorithm = training.Own(Reducer)
    first, second = ranks(2, compare, "small_buckets", algorithm, bytegrad, "block_uint8")
    assert first == second


@over(n=[2, 3], situation=["small_buckets", "static_graph"])
def test_sparse_gives_the_bits_of_the_oracle_over_the_rebuild(ranks, n, situation):
    first, *others = ranks(n, compare, situation, SparseAlgorithm(RATIO), top_k, {})
    assert others == [first] * (n - 1)
    assert first[1]


@training.with_group
def uneven(algorithm):
    ddp, _, optimizer = hooked.made("small_buckets", algorithm)
    with ddp.join():
        for step in range(3 + 2 * dist.get_rank()):
            optimizer.zero_grad()
            hooked.plain_step(ddp, step)
            optimizer.step()
    return training.bits(ddp.parameters())


@over(name=["gradient_allreduce", *hooked.ALGORITHMS])
def test_join_works(ranks, name):
    algorithm = hooked.ALGORITHMS[name]() if name in hooked.ALGORITHMS else name
    first, second = ranks(2, uneven, algorithm)
    assert first == second


@training.with_group
def statistics():
    ddp, handle, optimizer = hooked.made("small_buckets", ByteGradAlgorithm(hierarchical=False))
    hooked.train("small_buckets", ddp, optimizer)
    logged = ddp._get_ddp_logging_data().get("comm_hook")
    return handle.stats(), logged


def test_statistics_are_those_of_a_wrapped_module_without_the_overlap(ranks):
    for stats, logged in ranks(2, statistics):
        assert stats["rounds"] == hooked.STEPS
        assert set(stats) == {"buckets", "total", "communicators", "control", "rounds", "busy_ns"}
        assert len(stats["buckets"]) > 1
        for bucket in stats["buckets"]:
            assert 0 < bucket["wire_ns"] < bucket["busy_ns"]
            assert bucket["nonfinite_rounds"] == 0
            assert "block_uint8" in str(bucket["ops"])
        assert stats["communicators"]["all"]["bytes_sent"] == stats["total"]["bytes_sent"]
        assert stats["total"]["bytes_sent"] < stats["total"]["bytes"] * hooked.STEPS / 2
        assert logged == "bagua.ByteGradAlgorithm"


def in_a_subgroup():
    """torch.distributed alone is initialised."""
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    torch.manual_seed(0)
    ddp = DistributedDataParallel(hooked.network(), process_group=groups[dist.get_rank() % 2])
    handle = comm_hooks.register(ddp, ByteGradAlgorithm(hierarchical=False))
    digests = hooked.train("default", ddp, training.sgd(ddp))
    return digests, handle.stats()["total"]["bytes_sent"]


def test_the_hook_uses_the_process_group_of_the_class_and_bagua_need_not_be_initialised(ranks):
    first, alone, third = ranks(3, in_a_subgroup)
    assert first[0] == third[0] != alone[0]
    assert first[1] > 0
    assert alone[1] == 0


@training.with_group
def by_name():
    """Bagua's default, which compresses between nodes."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ddp, handle, optimizer = hooked.made("default", "bytegrad")
    digests = hooked.train("default", ddp, optimizer)
    return digests, str(handle.stats()["buckets"])


@over(sizes=[(3,), (2, 1)])
def test_hierarchical_hooks_compress_between_nodes(ranks, sizes):
    first, *others = ranks(sum(sizes), by_name, env=environment_of_nodes(sizes))
    for digests, ops in (first, *others):
        assert digests == first[0]
        assert ("Hierarchical" in ops) == (len(sizes) == 2)
    assert "block_uint8" in first[1]


@training.with_group
def compiled():
    ddp, handle, optimizer = hooked.made("default", ByteGradAlgorithm(hierarchical=False))
    digests = hooked.train("default", torch.compile(ddp, backend="eager"), optimizer)
    return digests, handle.stats()["rounds"]


def test_compiled_models_communicate_through_the_hook(ranks):
    first, second = ranks(2, compiled)
    assert first == second
    assert first[1] == hooked.STEPS


@training.with_group
def copied():
    ddp, _, optimizer = hooked.made("default", ByteGradAlgorithm(hierarchical=False))
    hooked.train("default", ddp, optimizer)
    twins = []
    said = training.warnings_of(lambda: twins.append(copy.deepcopy(ddp)))
    (twin,) = twins
    again = comm_hooks.register(twin, "gradient_allreduce")
    hooked.train("default", twin, training.sgd(twin), 2)
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(ddp, file)
    return again.stats()["rounds"], b"bagua.comm_hooks" in file.getvalue(), said


def test_a_copy_says_that_it_has_no_hook_and_takes_another(ranks):
    ends = ranks(2, copied)
    assert [end[:2] for end in ends] == [(2, False)] * 2
    (text,) = ends[0][2] + ends[1][2]  # once per job
    assert "has no communication hook" in text


@training.with_group
def half_precision(scaled):
    torch.manual_seed(0)
    ddp = DistributedDataParallel(hooked.network().half())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    handle = comm_hooks.register(ddp, SparseAlgorithm(0.1), grad_scaler=scaler if scaled else None)
    missing = {}
    for step in range(4):
        inputs, targets = training.batch(step, dist.get_rank())
        local = training.local_gradients(
            ddp.module,
            lambda m, d: nn.functional.mse_loss(m(d[0]), d[1]),
            (inputs.half(), targets.half()),
        )
        ddp.zero_grad()
        scale = scaler.get_scale()
        scaler.scale(nn.functional.mse_loss(ddp(inputs.half()), targets.half())).backward()
        for name, parameter in ddp.module.named_parameters():
            mean = training.mean_over_ranks(local[name].float())
            missing[name] = missing.get(name, 0) + mean - parameter.grad.float() / scale
        scaler._scale = scaler._scale * 2
    residuals = owed(training.gather(handle.state_dict()), missing)
    return max(float((residuals[name] - missing[name]).abs().max()) for name in missing)


def test_residuals_are_in_unscaled_units(ranks):
    assert max(ranks(2, half_precision, True)) < 2e-3
    assert min(ranks(2, half_precision, False)) > 1


def nothing(state, bucket):
    raise AssertionError("not called")


def fresh(model=None):
    return DistributedDataParallel(hooked.network() if model is None else model)


@training.with_group
def refuse():
    twice, other_hook, python_reducer = fresh(), fresh(), fresh()
    comm_hooks.register(twice, "gradient_allreduce")
    other_hook.register_comm_hook(None, nothing)
    python_reducer._use_python_reducer = True
    exact = GradientAllReduceAlgorithm()
    wrapped = fresh(hooked.network().with_bagua([], exact))
    embedding = fresh(nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 3)))
    differing = ByteGradAlgorithm(average=dist.get_rank() == 0)
    for kind, words, ddp, algorithm in [
        (TypeError, "torch.nn.parallel.DistributedDataParallel", hooked.network(), "bytegrad"),
        (
            TypeError,
            "take algorithm= themselves",
            Own(hooked.network(), algorithm=exact),
            "bytegrad",
        ),
        (RuntimeError, "has a communication hook already", twice, "bytegrad"),
        (RuntimeError, "has a communication hook already", other_hook, "bytegrad"),
        (RuntimeError, "bagua.wrap has wrapped", wrapped, "bytegrad"),
        (RuntimeError, "python_reducer", python_reducer, "bytegrad"),
        (NotImplementedError, "'0.weight' has sparse gradients", embedding, "gradient_allreduce"),
        (
            NotImplementedError,
            "'weight' is complex",
            fresh(nn.Linear(3, 3, dtype=torch.complex64)),
            "bytegrad",
        ),
        (ValueError, "unknown algorithm 'bytegrd'; registered: gradient_", fresh(), "bytegrd"),
        (TypeError, r"such as ByteGradAlgorithm\(\)", fresh(), ByteGradAlgorithm),
        *(
            (NotImplementedError, r" does more than reduce .*bagua.wrap", fresh(), other)
            for other in ("async", "auto", "diloco", "decentralized", training.Own(Opener))
        ),
        (NotImplementedError, "Own does more than", fresh(), training.Own(HalvedGradients)),
        (BaguaMismatchError, "'average': True", fresh(), differing),
    ]:
        with pytest.raises(kind, match=words):
            comm_hooks.register(ddp, algorithm)
    with pytest.raises(RuntimeError, match="can only be called once"):
        twice.register_comm_hook(None, nothing)
    builtin = fresh()
    builtin._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    with pytest.MonkeyPatch.context() as patch:
        closed = []
        patch.setattr(comm_hooks.Handle, "close", lambda handle: closed.append(handle))
        with pytest.raises(RuntimeError, match="can only be called once"):
            comm_hooks.register(builtin, "bytegrad")
    assert len(closed) == 1
    closed[0]._running.stop()


def test_wrong_calls_are_refused(ranks):
    ranks(2, refuse)
