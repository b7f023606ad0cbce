"""Buckets that are too small to gain by compression stay exact, by themselves."""

import bagua.fsdp
import torch
import torch.distributed as dist
from bagua import comm_hooks
from bagua.torch_api.algorithms import ByteGradAlgorithm
from bagua.torch_api.data_parallel import DistributedDataParallel
from oracle.weighted_mean import weighted_mean
from ranks.test_groups_and_nodes import environment_of_nodes
from support import sharded, training
from support.error_feedback import owed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDDP

CODECS = ("block_uint8", "minmax_uint8", "int4_block", "bit2_block", "fp16")


def wrap(algorithm, model):
    return model.with_bagua([training.sgd(model)], algorithm), model.bagua_stats


def ddp_class(algorithm, model):
    ddp = DistributedDataParallel(model, optimizers=[training.sgd(model)], algorithm=algorithm)
    return ddp, ddp.bagua_ddp.stats


def comm_hook(algorithm, model):
    ddp = TorchDDP(model)
    return ddp, comm_hooks.register(ddp, algorithm).stats


def step(make, algorithm, numel, dtype):
    """Bits of the gradient of as many elements, and bytes that were sent for it."""
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(numel, 1, bias=False, dtype=dtype)
    model, stats = make(algorithm, model)
    model(torch.randn(3, numel, dtype=dtype)).sum().backward()
    return training.bits(p.grad for p in model.parameters()), stats()["total"]["bytes_sent"]


@training.with_group
def beside_exact(cases, hierarchical=False):
    found = []
    for make, options, numel, dtype in cases:
        algorithm = ByteGradAlgorithm(hierarchical, **options)
        both = [step(make, one, numel, dtype) for one in (algorithm, "gradient_allreduce")]
        found.append((both[0][0] == both[1][0], both[0][1] / both[1][1]))
    return found


def shares_of_exact(ranks, size, cases):
    """Bytes of each case over exact ones: 1 where it has the bits of exact gradients."""
    results = ranks(size, beside_exact, cases)
    assert all(result == results[0] for result in results)
    for same, share in results[0]:
        assert same == (share == 1)
    return [share for _, share in results[0]]


def test_small_buckets_have_the_bits_and_bytes_of_exact_ones_by_every_door(ranks):
    for make in (wrap, ddp_class, comm_hook):
        for options in ({}, {"error_feedback": True, "codec": "int4_block"}):
            cases = [(make, options, numel, torch.float32) for numel in (34, 1024)]
            small, large = shares_of_exact(ranks, 2, cases)
            assert small == 1
            assert large < 0.3


def test_the_adapter_of_68_parameters_is_exact_in_8_bits_and_its_limit_grows_with_the_ranks(ranks):
    (adapter,) = shares_of_exact(ranks, 2, [(wrap, {}, 68, torch.float32)])
    assert adapter == 1
    cases = [(wrap, {}, numel, torch.float32) for numel in (68, 120, 512)]
    *exact, compressed = shares_of_exact(ranks, 4, cases)
    assert exact == [1, 1]
    assert compressed < 0.5


def test_every_codec_compresses_a_thousand_elements_and_none_sends_more_than_three_quarters(ranks):
    few = ("block_uint8", "int4_block")
    for dtype, codecs in ((torch.float32, CODECS), (torch.bfloat16, few), (torch.float64, few)):
        cases = [(wrap, {"codec": codec}, 1024, dtype) for codec in codecs]
        assert max(shares_of_exact(ranks, 2, cases)) < 0.6, dtype
    cases = [
        (wrap, {"codec": codec, "error_feedback": feedback}, numel, torch.float32)
        for codec in ("block_uint8", "int4_block")
        for feedback in (False, True)
        for numel in range(16, 128, 8)
    ]
    # A part of 16 elements may be padding.
    assert all(share < 0.95 or share == 1 for share in shares_of_exact(ranks, 2, cases))


@training.with_group
def sums_of_bfloat16():
    found = []
    for codec in ("bf16", "block_uint8"):
        algorithm = ByteGradAlgorithm(hierarchical=False, codec=codec)
        found.append(step(wrap, algorithm, 20, torch.bfloat16))
    return found


def test_a_codec_as_wide_as_the_dtype_is_taken_at_any_size(ranks):
    for asked, small in ranks(2, sums_of_bfloat16):
        assert asked == small


@training.with_group
def ops_of(hierarchical, numel):
    model = nn.Linear(numel, 1, bias=False)
    model.with_bagua([training.sgd(model)], ByteGradAlgorithm(hierarchical))
    return model.bagua_buckets[0].ops[0].name


def test_between_nodes_their_number_counts_and_not_that_of_ranks(ranks):
    env = environment_of_nodes((2, 2))
    for hierarchical, numel, name in (
        (True, 120, "CompressedAllReduce"),
        (True, 68, "AllReduce"),
        (False, 120, "AllReduce"),
    ):
        assert set(ranks(4, ops_of, hierarchical, numel, env=env)) == {name}


#: On 2 ranks it is compressed, on 4 exact.
HIDDEN = 13


@training.with_group
def goes_on(state, steps):
    """What a round is, of the model after some steps from `state`: operation, the state before,
    all ranks' gradients, the result, and the state after."""
    rank, model = dist.get_rank(), training.network(hidden=HIDDEN)
    optimizer = training.sgd(model)
    algorithm = ByteGradAlgorithm(False, codec="int4_block", error_feedback=True)
    model.with_bagua([optimizer], algorithm)
    if state is not None:
        model.bagua_algorithm.load_state_dict(state)
    training.train_on_ranks(model, optimizer, steps)
    before = model.bagua_algorithm.state_dict()
    data = training.batch(steps, rank)
    of_ranks = training.gather(training.local_gradients(model, training.squared_error, data))
    optimizer.zero_grad()
    training.squared_error(model, data).backward()
    result = {name: p.grad for name, p in model.named_parameters()}
    training.assert_ranks_agree(model)
    operation = model.bagua_buckets[0].ops[0].name
    return operation, before, of_ranks, result, model.bagua_algorithm.state_dict()


def one(states):
    return {key: value for state in states for key, value in state.items()}


def test_residuals_of_a_bucket_that_is_exact_among_more_ranks_are_added_to_its_mean(ranks):
    operations, *_, states = zip(*ranks(2, goes_on, None, 3), strict=True)
    assert set(operations) == {"CompressedAllReduce"}
    names = list(dict(training.network(hidden=HIDDEN).named_parameters()))
    expected = owed(states, names)
    assert all(error.abs().max() > 1e-4 for error in expected.values())
    results = ranks(4, goes_on, one(states), 0)
    operations, before, of_ranks, means, after = zip(*results, strict=True)
    assert set(operations) == {"ErrorFeedbackAllReduce"}
    found, left = owed(before, names), owed(after, names)
    for name in names:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=1e-7)
        mean = weighted_mean([gradients[name] for gradients in of_ranks[0]], [1] * 4)
        whole = mean + expected[name]
        torch.testing.assert_close(means[0][name].double(), whole.double(), rtol=1e-5, atol=1e-6)
        assert not left[name].any()
    # Back to two, with a state from before the round, and from after it.
    for state, kept in ((before, expected), (after, left)):
        operations, again, *_ = zip(*ranks(2, goes_on, one(state), 0), strict=True)
        assert set(operations) == {"CompressedAllReduce"}
        for name, error in owed(again, names).items():
            torch.testing.assert_close(error, kept[name], rtol=1e-6, atol=1e-7)


@sharded.with_torch_group
def shards(shape, options):
    """Bits of a small module's gradient beside those of torch alone, and its operations."""
    found, names = [], ("replicate", "shard")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names[-len(shape) :])
    for compresses in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, 40, bias=False), nn.Linear(40, 200, bias=False))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if compresses:
            handle = bagua.fsdp.compress(model, **options)
        generator = torch.Generator().manual_seed(dist.get_rank())
        model(torch.randn(3, 1, generator=generator)).square().sum().backward()
        model.reshard()
        found.append(training.bits([model[0].weight.grad.to_local()]))
    by_name = {bucket["name"]: bucket["ops"][0] for bucket in handle.stats()["buckets"]}
    return found, by_name


def test_small_modules_of_fsdp_are_exact(ranks):
    for shape, options in (
        ((2,), {}),
        ((2,), {"weights": True}),
        ((2, 2), {}),
        ((2, 2), {"reduce_scatter": True, "codec": "int4_block"}),
    ):
        for (own, theirs), ops in ranks(int(torch.tensor(shape).prod()), shards, shape, options):
            if not options.get("weights"):  # the next layer's are rounded
                assert own == theirs
            small = {name: op for name, op in ops.items() if name.startswith("0.")}
            assert small
            assert all(op.startswith("AllReduce(") for op in small.values())
            large = [op for name, op in ops.items() if name.startswith("1.")]
            assert large
            assert all(op.startswith("Compressed") for op in large)
