"""Compressed gradients through the hook against the oracles, over torch's rebuild of buckets."""

import copy

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import ByteGradAlgorithm, PowerSGDAlgorithm, SparseAlgorithm
from oracle import compressed_all_reduce as compressed
from oracle import low_rank, sparse
from support import hooked, training
from torch.nn.parallel import DistributedDataParallel

STEPS = 5
RANKS = pytest.mark.parametrize("n", [2, 3], ids="{}_ranks".format)


def record(state, bucket):
    """A hook that keeps this rank's own gradients, and what of the bucket they are."""
    names = [state["names"][id(parameter)] for parameter in bucket.parameters()]
    state["buckets"].append((names, bucket.buffer().clone()))
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


class Recorder:
    """A second DistributedDataParallel, which makes the same buckets and does not communicate."""

    def __init__(self, situation):
        self.situation = situation
        make, arguments, _ = hooked.SITUATIONS[situation]
        torch.manual_seed(0)
        self.ddp = DistributedDataParallel(make(), **arguments)
        names = {id(p): name for name, p in self.ddp.module.named_parameters()}
        self.state = {"names": names, "buckets": []}
        self.ddp.register_comm_hook(self.state, record)

    def buckets(self, ddp, step):
        """(names, the ranks' own values, places of the names) of every bucket of `ddp`'s step."""
        with torch.no_grad():
            for mine, theirs in zip(self.ddp.parameters(), ddp.parameters(), strict=True):
                mine.copy_(theirs)
        self.state["buckets"].clear()
        self.ddp.zero_grad()
        hooked.SITUATIONS[self.situation][2](self.ddp, step)
        return [
            (names, training.gather(flat), places(ddp, names))
            for names, flat in self.state["buckets"]
        ]


def places(ddp, names):
    """For each name (size, strides, offset) in a bucket that holds them one after the other."""
    parameters = dict(ddp.module.named_parameters())
    offset, found = 0, {}
    for name in names:
        found[name] = (parameters[name].size(), parameters[name].stride(), offset)
        offset += parameters[name].numel()
    return found


def flat_of(values, where):
    """One flat tensor of the named values."""
    first = next(iter(values.values()))
    flat = torch.zeros(sum(v.numel() for v in values.values()), dtype=first.dtype)
    for name, place in where.items():
        flat.as_strided(*place).copy_(values[name])
    return flat


def gradients(ddp, names):
    parameters = dict(ddp.module.named_parameters())
    return {name: parameters[name].grad for name in names}


LAYOUTS = ["small_buckets", "static_graph", "unused", "channels_last", "mixed_dtypes"]
layouts = pytest.mark.parametrize("situation", LAYOUTS)


@training.with_group
def bytegrad(situation, codec):
    recorder = Recorder(situation)
    algorithm = ByteGradAlgorithm(hierarchical=False, codec=codec)
    ddp, _, optimizer = hooked.made(situation, algorithm)
    plans = []
    for step in range(STEPS):
        buckets = recorder.buckets(ddp, step)
        plans.append([names for names, _, _ in buckets])
        optimizer.zero_grad()
        hooked.SITUATIONS[situation][2](ddp, step)
        for names, brought, where in buckets:
            expected = compressed.compressed_all_reduce(codec, brought, True)
            for name, gradient in gradients(ddp, names).items():
                if gradient is not None:  # some rank used it
                    assert torch.equal(gradient, expected.as_strided(*where[name]))
        optimizer.step()
    return plans


@RANKS
@layouts
@pytest.mark.parametrize("codec", ["block_uint8", "minmax_uint8"])
def test_bytegrad_gives_the_bits_of_the_oracle(ranks, n, situation, codec):
    plans = ranks(n, bytegrad, situation, codec)
    assert plans[1:] == plans[:-1]
    rebuilt = situation != "unused"  # find_unused_parameters keeps the first buckets
    assert (plans[0][0] != plans[0][-1]) == rebuilt


@training.with_group
def power_sgd(situation):
    algorithm = PowerSGDAlgorithm(2, min_compression_rate=1.0, warmup_steps=0)
    recorder = Recorder(situation)
    ddp, handle, optimizer = hooked.made(situation, algorithm)
    size, rank = dist.get_world_size(), dist.get_rank()
    compressed_names = set()
    for step in range(STEPS):
        states = training.gather(handle.state_dict())
        buckets = recorder.buckets(ddp, step)
        optimizer.zero_grad()
        hooked.SITUATIONS[situation][2](ddp, step)
        after = handle.state_dict()
        for names, brought, where in buckets:
            for name in names:
                own = [flat.as_strided(*where[name]) for flat in brought]
                result = dict(ddp.module.named_parameters())[name].grad
                if f"query/{name}" not in after:
                    mean = sum(own) / size
                    assert (result - mean).abs().max() <= 1e-6
                    continue
                compressed_names.add(name)
                if step == 0:
                    continue
                shape = (own[0].shape[0], -1)
                errors = [states[r][f"rank{r}/error/{name}"].reshape(shape) for r in range(size)]
                query = states[0][f"query/{name}"].T
                expected, errors, query = low_rank.power_step(
                    [g.reshape(shape) for g in own], errors, query
                )
                tolerance = 1e-4 * expected.abs().max()
                assert (result.reshape(shape) - expected).abs().max() <= tolerance
                error = after[f"rank{rank}/error/{name}"].reshape(shape)
                assert (error - errors[rank]).abs().max() <= tolerance
                assert (after[f"query/{name}"].T - query).abs().max() <= tolerance * 10
        optimizer.step()
    assert after["communications"] == after["rounds"] == STEPS
    return sorted(compressed_names)


@RANKS
@pytest.mark.parametrize("situation", ["small_buckets", "static_graph"])
def test_power_sgd_follows_the_oracle_over_the_rebuild(ranks, n, situation):
    assert ranks(n, power_sgd, situation) == [["0.weight", "2.weight", "4.weight"]] * n


@training.with_group
def top_k(situation, ratio):
    recorder = Recorder(situation)
    ddp, handle, optimizer = hooked.made(situation, SparseAlgorithm(ratio))
    size, rank = dist.get_world_size(), dist.get_rank()
    operations = set()
    for step in range(STEPS):
        states = training.gather(handle.state_dict())
        buckets = recorder.buckets(ddp, step)
        optimizer.zero_grad()
        hooked.SITUATIONS[situation][2](ddp, step)
        after = handle.state_dict()
        ops = {bucket["name"]: str(bucket["ops"]) for bucket in handle.stats()["buckets"]}
        for index, (names, brought, where) in enumerate(buckets):
            errors = [
                flat_of(
                    {n: states[r].get(f"rank{r}/error/{n}", zero(where, n)) for n in names}, where
                )
                for r in range(size)
            ]
            if "ErrorFeedback" in ops[str(index)]:
                result = sum(g + e for g, e in zip(brought, errors, strict=True)) / size
                errors = [torch.zeros_like(e) for e in errors]
                bits = False
            else:
                k = max(1, round(ratio * brought[0].numel()))
                result, errors = sparse.top_k(brought, errors, k)
                bits = True
            operations.add(bits)
            found = flat_of(gradients(ddp, names), where)
            own = flat_of({n: after[f"rank{rank}/error/{n}"] for n in names}, where)
            assert torch.equal(own, errors[rank])
            assert torch.equal(found, result) if bits else (found - result).abs().max() < 1e-6
        optimizer.step()
    return operations


def zero(where, name):
    return torch.zeros(where[name][0])


@RANKS
@pytest.mark.parametrize("situation", ["small_buckets", "static_graph", "channels_last"])
def test_sparse_gives_the_bits_of_the_oracle_over_the_rebuild(ranks, n, situation):
    for operations in ranks(n, top_k, situation, 0.05):
        assert True in operations


@training.with_group
def sent_and_remembered(situation, name):
    """Sent values and the mean residual, against the mean gradients of all steps."""
    ddp, handle, optimizer = hooked.made(situation, hooked.ALGORITHMS[name]())
    parameters = dict(ddp.module.named_parameters())
    total = {}
    for step in range(STEPS + 1):
        twin = copy.deepcopy(ddp.module)
        hooked.SITUATIONS[situation][2](twin, step)
        optimizer.zero_grad()
        hooked.SITUATIONS[situation][2](ddp, step)
        for key, parameter in parameters.items():
            local = dict(twin.named_parameters())[key].grad
            local = torch.zeros_like(parameter) if local is None else local
            got = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            total[key] = total.get(key, 0) + got - training.mean_over_ranks(local)
        optimizer.step()
    training.assert_ranks_agree(ddp)
    state = handle.state_dict()
    rank = dist.get_rank()
    return max(
        float((value + training.mean_over_ranks(state[f"rank{rank}/error/{key}"])).abs().max())
        for key, value in total.items()
    )


@pytest.mark.parametrize(
    "situation",
    ["default", "small_buckets", "bucket_view", "static_graph", "channels_last", "unused_by_some"],
)
@pytest.mark.parametrize("name", ["power_sgd", "sparse"])
def test_what_was_sent_and_what_is_remembered_is_the_sum_of_gradients(ranks, situation, name):
    assert max(ranks(2, sent_and_remembered, situation, name)) < 1e-5
