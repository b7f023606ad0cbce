"""Low-precision decentralized SGD on ranks against the oracle, the ring tested after every step."""

import copy

import bagua.torch_api as bagua
import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import Algorithm, decentralized
from bagua.torch_api.algorithms.decentralized import (
    LowPrecisionDecentralizedAlgorithm,
)
from bagua.torch_api.bucket import BaguaBucket
from bagua.torch_api.checkpoint import PerRank
from oracle import low_precision_decentralized as oracle
from ranks.test_groups_and_nodes import environment_of_nodes
from support import training
from torch import nn
from torch.distributed import checkpoint

STEPS = 5


def optimizers_of(model):
    return [training.sgd(model)]


def train_step(model, optimizers, step):
    training.train(model, optimizers, [training.batch(step, dist.get_rank())])


def oracle_of(model, make_optimizers=optimizers_of, **arguments):
    twins = [copy.deepcopy(model) for _ in range(dist.get_world_size())]
    return oracle.Ranks(twins, make_optimizers, **arguments)


def oracle_step(expected, step, skipping=()):
    batches = [training.batch(step, rank) for rank in range(len(expected.models))]
    expected.step(training.squared_error, batches, skipping)
    return expected.models[dist.get_rank()]


def replica_bits(model):
    own = model.bagua_algorithm.ledger.own
    return [
        training.bits(value for key, value in own.items() if key.startswith(f"{kind}/"))
        for kind in ("weight", "left", "right")
    ]


def assert_ring(model):
    """Every rank's L and R are its neighbours' W, bit for bit."""
    replicas = training.gather(replica_bits(model))
    for rank, (_, left, right) in enumerate(replicas):
        assert left == replicas[rank - 1][0], f"left replica of rank {rank}"
        assert right == replicas[(rank + 1) % len(replicas)][0], f"right replica of rank {rank}"
    return len({own for own, *_ in replicas})


def weight_bits(model):
    return training.bits(model.parameters())


def wrapped(model, interval=1, **arguments):
    optimizers = optimizers_of(model)
    chosen = LowPrecisionDecentralizedAlgorithm(False, interval)
    model.with_bagua(optimizers, chosen, **arguments)
    return optimizers


class Mixed(nn.Module):
    """Parameters of several dtypes; the loss is f32."""

    def __init__(self, dtypes):
        super().__init__()
        torch.manual_seed(3)
        size = training.FEATURES
        self.layers = nn.ModuleList(nn.Linear(size, size).to(dtype) for dtype in dtypes)
        self.last = nn.Linear(size, training.OUTPUTS)

    def forward(self, inputs):
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs.to(layer.weight.dtype)))
        return self.last(inputs.float())


@training.with_group
def train_against_the_oracle(interval=1, do_flatten=True, steps=STEPS, dtypes=None):
    """Number of different weights after each step, and the engine's counters."""
    model = training.network() if dtypes is None else Mixed(dtypes)
    expected = oracle_of(model, interval=interval)
    optimizers = optimizers_of(model)
    chosen = LowPrecisionDecentralizedAlgorithm(False, interval)
    caught = training.warnings_of(
        lambda: model.with_bagua(optimizers, chosen, do_flatten=do_flatten)
    )
    assert caught == []
    different = []
    for step in range(steps):
        train_step(model, optimizers, step)
        assert weight_bits(model) == weight_bits(oracle_step(expected, step)), f"step {step}"
        different.append(assert_ring(model))
    return different, model.bagua_stats(), model.bagua_algorithm.state_dict()


@pytest.mark.parametrize(
    ("n", "do_flatten", "dtypes"),
    [(2, True, None), (3, False, None), (3, True, [torch.bfloat16, torch.float64, torch.float16])],
)
def test_every_step_has_the_bits_of_the_oracle(ranks, n, do_flatten, dtypes):
    arguments = (1, do_flatten, STEPS, dtypes)
    for different, stats, state in ranks(n, train_against_the_oracle, *arguments):
        assert different == [n] * STEPS, "weights are each rank's own"
        assert stats["rounds"] == state["iterations"] == STEPS


@pytest.mark.parametrize("n", [2, 3], ids=lambda n: f"{n}-ranks")
def test_with_interval_two_every_other_step_communicates_and_the_first_does(ranks, n):
    everywhere = ranks(n, train_against_the_oracle, 2)
    once = ranks(n, train_against_the_oracle, 1, True, 1)
    for (_, stats, state), (_, stats_once, _) in zip(everywhere, once, strict=True):
        assert state["iterations"] == STEPS
        assert stats["rounds"] == 3
        assert stats["total"]["bytes_sent"] == 3 * stats_once["total"]["bytes_sent"] > 0


@training.with_group
def train_on_nodes(nodes, codec):
    """Distance of the weights from the oracle's, and values that are equal inside a node."""
    model = training.network()
    expected = oracle_of(model, nodes=nodes, codec=codec)
    optimizers = optimizers_of(model)
    caught = training.warnings_of(
        lambda: model.with_bagua(optimizers, LowPrecisionDecentralizedAlgorithm(True, codec=codec))
    )
    rank = dist.get_rank()
    for step in range(STEPS):
        train_step(model, optimizers, step)
        # The order of gloo's sum may move a code by one level.
        training.assert_close(model, oracle_step(expected, step), rtol=0, atol=3e-3)
        digests = training.gather(weight_bits(model))
        assert len({digests[r] for r in range(len(nodes)) if nodes[r] == nodes[rank]}) == 1
        leaders = [nodes.index(node) for node in dict.fromkeys(nodes)]
        replicas = training.gather(replica_bits(model))
        for place, leader in enumerate(leaders):
            right = leaders[(place + 1) % len(leaders)]
            assert replicas[leader][1] == replicas[leaders[place - 1]][0]
            assert replicas[leader][2] == replicas[right][0]
    ops = [op for bucket in model.bagua_stats()["buckets"] for op in bucket["ops"]]
    return len(set(digests)), caught, ops, model.bagua_algorithm.state_dict()["ranks"]


@pytest.mark.parametrize(
    ("codec", "sizes"),
    [("fp16", (2, 2)), ("block_uint8", (3, 1)), ("block_uint8", (1, 1, 1))],
    ids=str,
)
def test_nodes_average_exactly_inside_and_leaders_make_the_ring(ranks, sizes, codec):
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    results = ranks(len(nodes), train_on_nodes, nodes, codec, env=environment_of_nodes(sizes))
    for different, caught, ops, ring in results:
        assert different == len(sizes)
        assert caught == []
        assert ops[0].startswith(f"Hierarchical({len(sizes)} nodes")
        assert ring == " ".join(str(nodes.index(node)) for node in range(len(sizes)))
    assert f"CompressedGossip({codec}, ring of {len(sizes)})" in results[0][2][0]


def test_on_one_node_the_hierarchical_mean_is_exact(ranks):
    for different, caught, *_ in ranks(3, train_on_nodes, [0, 0, 0], "block_uint8"):
        assert different == 1
        assert caught == []


def test_replicas_that_do_not_fit_their_bucket_are_refused():
    tensor = torch.zeros(3).ensure_bagua_tensor("weight", "module")
    bucket = BaguaBucket([tensor], "b", flatten=True)
    fits = [torch.zeros(3) for _ in range(3)]
    with pytest.raises(ValueError, match=r"bucket 'b': the replica 'left' is torch.float32 \(4,\)"):
        bucket.append_low_precision_decentralized_synchronous_op(fits[0], torch.zeros(4), fits[2])
    with pytest.raises(ValueError, match=r"the replica 'right' is torch.float64"):
        bucket.append_low_precision_decentralized_synchronous_op(*fits[:2], fits[2].double())
    with pytest.raises(ValueError, match="nonsense"):
        bucket.append_low_precision_decentralized_synchronous_op(*fits, compression="nonsense")
    op = bucket.append_low_precision_decentralized_synchronous_op(*fits)
    assert op.arguments["codec"] == "minmax_uint8"


def test_arguments_that_make_no_sense_are_refused_by_name():
    public = LowPrecisionDecentralizedAlgorithm
    with pytest.raises(ValueError, match="communication_interval=0 must be at least 1"):
        public(True, 0)
    with pytest.raises(ValueError, match="nonsense"):
        public(codec="nonsense")
    assert isinstance(Algorithm.init("low_precision_decentralized"), public)
    assert decentralized.LowPrecisionDecentralizedAlgorithm is public


# Steps that are skipped: a round that is due runs all the same.

SKIPPING = {1: (1,), 2: (0, 1, 2), 3: (0, 2)}  # the ranks whose step is skipped, by step


def scaled_step(model, optimizer, scaler, step, overflow):
    optimizer.zero_grad()
    scaler.scale(training.squared_error(model, training.batch(step, dist.get_rank()))).backward()
    if overflow:
        model[0].weight.grad[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()


@training.with_group
def train_with_scaler(do_flatten, ask):
    """ask: run what is due after each step, as a loop with collectives of its own must."""
    model = training.network()
    expected = oracle_of(model)
    (optimizer,) = wrapped(model, do_flatten=do_flatten)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    rank = dist.get_rank()
    for step in range(STEPS):
        skipping = SKIPPING.get(step, ())
        scaled_step(model, optimizer, scaler, step, rank in skipping)
        result = oracle_step(expected, step, skipping)
        if ask:
            model.bagua_algorithm.run_pending()
            assert_ring(model)
        if ask or rank not in skipping:
            assert weight_bits(model) == weight_bits(result), f"step {step}"
    assert_ring(model)
    return scaler.get_scale(), model.bagua_stats()["rounds"]


@pytest.mark.parametrize(
    ("ask", "do_flatten"),
    [(False, True), (True, False)],
    ids=["next-forward", "asked-for-copied"],
)
def test_a_step_that_a_scaler_skips_on_some_ranks_is_a_round_like_any_other(ranks, ask, do_flatten):
    for rank, (scale, rounds) in enumerate(ranks(3, train_with_scaler, do_flatten, ask)):
        skipped = sum(rank in of_ranks for of_ranks in SKIPPING.values())
        assert scale == 2.0 ** (12 - skipped)
        assert rounds == STEPS


@training.with_group
def skip_the_last_step(ending):
    """The weights after a step that rank 1 leaves out, its last deed; the oracle's too."""
    model = training.network()
    expected = oracle_of(model)
    (optimizer,) = wrapped(model)
    optimizer.zero_grad()
    training.squared_error(model, training.batch(0, dist.get_rank())).backward()
    if dist.get_rank() != 1:
        optimizer.step()
    result = oracle_step(expected, 0, (1,))
    if ending == "close":
        model.bagua_ddp.close()
        assert not model.bagua_algorithm.mark_pending(model.bagua_ddp)
    elif ending == "state_dict":
        model.bagua_algorithm.state_dict()
    else:
        before = weight_bits(model)
        with model.no_sync():
            model(training.batch(1, 0)[0])
        assert dist.get_rank() != 1 or weight_bits(model) != before
    return weight_bits(model) == weight_bits(result)


@pytest.mark.parametrize("ending", ["close", "state_dict", "no_sync"])
def test_a_round_that_is_due_runs_when_nothing_else_follows(ranks, ending):
    assert ranks(3, skip_the_last_step, ending) == [True] * 3


SCRIPT = """
import torch
import bagua.torch_api as bagua
from bagua.torch_api.algorithms import LowPrecisionDecentralizedAlgorithm

bagua.init_process_group()
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model.with_bagua([optimizer], LowPrecisionDecentralizedAlgorithm(False))
for step in range(3):
    model(torch.randn(4, 64)).sum().backward()
    if step < 2 or bagua.get_rank() != 1:
        optimizer.step()
print("trained", model.bagua_stats()["rounds"])
{end}
"""


@pytest.mark.parametrize("end", ["", "raise SystemExit(7)"], ids=["returns", "exits"])
def test_a_process_that_ends_with_a_round_due_lets_the_others_end(run_script, end):
    for done in run_script(3, SCRIPT.format(end=end), timeout=40.0):
        assert done.returncode == (7 if end else 0), done.stderr
        assert "trained 3" in done.stdout


# State: training goes on to the bit, or says why not.

GOES_ON = 6


def make(seed=0):
    model = training.network(seed)
    optimizers = [training.sgd(model)]
    model.with_bagua(optimizers, LowPrecisionDecentralizedAlgorithm(False))
    return model, optimizers


@training.with_group
def resume_with_a_round_due(path, algorithm_first):
    """Rank 1's last step before the save was skipped, and the saving itself runs the round."""
    model, optimizers = make()
    train_step(model, optimizers, 0)
    training.squared_error(model, training.batch(1, dist.get_rank())).backward()
    if dist.get_rank() != 1:
        optimizers[0].step()
    state = {"training": PerRank(model), "algorithm": model.bagua_algorithm}
    if algorithm_first:
        state = dict(reversed(state.items()))
    checkpoint.save(state, checkpoint_id=path)
    again, its_optimizers = make(seed=1)
    train_step(again, its_optimizers, 77)
    state = {"training": PerRank(again), "algorithm": again.bagua_algorithm}
    checkpoint.load(state, checkpoint_id=path)
    for step in range(2, 2 + GOES_ON):
        train_step(model, optimizers, step)
        train_step(again, its_optimizers, step)
        assert training.model_bits(model) == training.model_bits(again), f"step {step}"
        assert_ring(again)
    state = again.bagua_algorithm.state_dict()
    assert state[f"rank{dist.get_rank()}/left/2.bias"].shape == (3,)
    other_ring = state | {"ranks": "0 1 2 3"}
    error = training.error_of(lambda: again.bagua_algorithm.load_state_dict(other_ring), ValueError)
    assert "'ranks' is '0 1 2 3' in the state, '0 1 2' here: replicas would not be" in error
    return state["iterations"]


def test_one_checkpoint_holds_all_ranks_training(ranks, tmp_path):
    for first in (False, True):
        folder = str(tmp_path / str(first))
        assert ranks(3, resume_with_a_round_due, folder, first) == [2 + GOES_ON] * 3


@training.with_group
def average_with_a_round_due():
    model, optimizers = make()
    training.squared_error(model, training.batch(1, dist.get_rank())).backward()
    if dist.get_rank() == 0:
        optimizers[0].step()
    return training.bits(bagua.average_weights(model).parameters())


def test_a_round_that_is_due_runs_before_an_average(ranks):
    assert len(set(ranks(3, average_with_a_round_due))) == 1
