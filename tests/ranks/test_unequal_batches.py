"""Ranks with unequal batches: bagua_samples() through every door and gradient algorithm."""

import contextlib
import copy

import bagua.fsdp
import torch
import torch.distributed as dist
from bagua import comm_hooks
from bagua.torch_api.algorithms import (
    Algorithm,
    GradientAllReduceAlgorithm,
    QAdamAlgorithm,
    QAdamOptimizer,
    SparseAlgorithm,
)
from bagua.torch_api.data_parallel import DistributedDataParallel
from oracle.weighted_mean import weighted_mean
from ranks.test_fsdp_replicas import hybrid, linear, whole_loss
from ranks.test_groups_and_nodes import environment_of_nodes
from support import every_algorithm, sharded, training
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as TorchDDP

STEPS = 4
GRADIENTS = ["gradient_allreduce", "bytegrad", "bytegrad-minmax", "bytegrad-feedback", "qadam",
             "power_sgd", "sparse"]  # fmt: skip
#: Ranks' samples of which n P / sum is a power of two, so that a loss may carry the factor.
THREE = [(1, 1, 4), (0, 2, 1), (5, 5, 5), (0, 0, 0)]
FOUR = [(1, 1, 2, 4), (0, 2, 4, 2)]


def factor(samples):
    total = sum(samples)
    return samples[dist.get_rank()] * len(samples) / total if total else 0.0


class Door:
    """A model under communication: how to call it, its optimizer, its counts."""

    def __init__(self, model, optimizer, handle):
        self.model, self.optimizer, self.say = model, optimizer, handle.bagua_samples
        self._handle = handle

    def counts(self):
        stats = getattr(self._handle, "bagua_stats", None) or self._handle.stats
        figures = stats()
        return [
            figures[where][what]
            for where in ("control", "total")
            for what in ("bytes_sent", "messages_sent")
        ]


def wrap(name, model):
    return Door(*every_algorithm.wrapped(name, model), model)


def ddp_class(name, model):
    optimizer = training.sgd(model)
    ddp = DistributedDataParallel(
        model, optimizers=[optimizer], algorithm=every_algorithm.made(name)
    )
    return Door(ddp, optimizer, ddp)


def comm_hook(name, model):
    ddp = TorchDDP(model)
    hook = comm_hooks.register(ddp, every_algorithm.made(name))
    return Door(ddp, training.sgd(model), hook)


def fsdp(options, model):
    shape = options.pop("mesh", None)
    mesh = None
    if shape is not None:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model = sharded.sharded(model, mesh=mesh)
    handle = bagua.fsdp.compress(model, **options)
    return Door(model, torch.optim.SGD(model.parameters(), lr=0.1), handle)


def of_nodes(name, model):
    """`name`: of an algorithm, and what it is given for hierarchical."""
    chosen, way = name
    if chosen == "qadam":
        optimizer = QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=2)
        algorithm = QAdamAlgorithm(optimizer, hierarchical=way)
    else:
        optimizer = training.sgd(model)
        algorithm = Algorithm.init(chosen, **OPTIONS.get(chosen, {}), hierarchical=way)
    return Door(model.with_bagua([optimizer], algorithm), optimizer, model)


def trained(door, samples, says):
    """Weights after some steps: their bits. `says`: the numbers; else the losses have factors."""
    for step in range(STEPS):
        if says and samples[dist.get_rank()] != 1:  # which is what a rank weighs that says none
            door.say(samples[dist.get_rank()])
        loss = training.squared_error(door.model, training.batch(step, dist.get_rank()))
        door.optimizer.zero_grad()
        (loss if says else loss * factor(samples)).backward()
        door.optimizer.step()
    if any(isinstance(m, bagua.fsdp.FSDPModule) for m in door.model.modules()):
        return training.bits([sharded.full_weights(door.model)])
    return training.bits(door.model.parameters())


@training.with_group
def both(cases, network=training.network):
    """By case: bits and counts of trainings that say numbers, and that multiply their losses."""
    found = []
    for make, what, samples in cases:
        for says in (True, False):
            chosen = dict(what) if isinstance(what, dict) else what
            door = make(chosen, network())
            found.append((trained(door, samples, says), door.counts()))
    return list(zip(found[::2], found[1::2], strict=True))


def assert_samples_are_factors(ranks, size, cases, *network, env=None):
    results = ranks(size, both, cases, *network, env=env)
    for i, case in enumerate(cases):
        for result in results:
            said, multiplied = result[i]
            assert said == multiplied, case
        assert len({result[i][0][0] for result in results}) == 1, case


def test_samples_weigh_gradients_of_every_algorithm_and_door_and_send_nothing(ranks):
    cases = [(wrap, name, samples) for samples in THREE for name in GRADIENTS]
    cases += [(comm_hook, name, THREE[1]) for name in GRADIENTS if name != "qadam"]
    cases += [(ddp_class, "bytegrad", THREE[0]), (plain_sgd, "gradient_allreduce", THREE[2])]
    assert_samples_are_factors(ranks, 3, cases)


HIERARCHICAL = [("gradient_allreduce", True), ("gradient_allreduce", "sharded"),
                ("bytegrad", True), ("bytegrad", "sharded"), ("qadam", True),
                ("power_sgd", True), ("sparse", True)]  # fmt: skip
OPTIONS = {
    "power_sgd": {"rank": 2, "min_compression_rate": 1.0, "warmup_steps": 2},
    "sparse": {"ratio": 0.1, "warmup_steps": 2},
}


def test_samples_weigh_ranks_of_several_nodes_and_send_nothing(ranks):
    for sizes, samples in (((2, 1), THREE[0]), ((2, 2), FOUR[0]), ((3, 1), FOUR[1])):
        cases = [(of_nodes, name, samples) for name in HIERARCHICAL]
        assert_samples_are_factors(ranks, sum(sizes), cases, env=environment_of_nodes(sizes))


FULLY_SHARDED = [{}, {"error_feedback": True}, {"codec": "int4_block"}, {"weights": True}]
HYBRID = [{"mesh": (2, 2)}, {"mesh": (2, 2), "reduce_scatter": True}, {"mesh": (4, 1)},
          {"mesh": (2, 2), "codec": "int4_block", "error_feedback": True}]  # fmt: skip


def test_samples_weigh_gradients_of_sharded_models_and_send_nothing(ranks):
    assert_samples_are_factors(ranks, 3, [(fsdp, one, THREE[0]) for one in FULLY_SHARDED])
    assert_samples_are_factors(ranks, 4, [(fsdp, one, n) for n in FOUR for one in HYBRID])


# Against one process that sees all samples.

ROWS = (1, 2, 5)


def whole(step, rows):
    parts = [training.batch(step, rank, rows=n) for rank, n in enumerate(rows)]
    return tuple(torch.cat(side) for side in zip(*parts, strict=True))


@training.with_group
def as_one_process(everything):
    return [exactly_as_one_process(*one) for one in everything]


def exactly_as_one_process(make, dtype, name="gradient_allreduce"):
    rank, model = dist.get_rank(), training.network().to(dtype)
    alone = copy.deepcopy(model)
    door = make(name, model)
    optimizer = training.sgd(alone, lr=door.optimizer.param_groups[0]["lr"])
    for step in range(STEPS):
        own = tuple(t.to(dtype) for t in training.batch(step, rank, rows=ROWS[rank]))
        everyone = tuple(t.to(dtype) for t in whole(step, ROWS))
        door.say(ROWS[rank])
        for one, steps, data in ((door.model, door.optimizer, own), (alone, optimizer, everyone)):
            steps.zero_grad()
            training.squared_error(one, data).backward()
            steps.step()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6}.get(dtype, 2e-2)
    training.assert_close(model, alone, rtol=tolerance, atol=tolerance)
    return training.bits(model.parameters())


def test_ranks_with_1_2_and_5_samples_train_as_one_process_with_all(ranks):
    everything = [(make, torch.float32) for make in (wrap, ddp_class, comm_hook)]
    everything += [(wrap, torch.float64), (wrap, torch.bfloat16)]
    for results in zip(*ranks(3, as_one_process, everything), strict=True):
        assert len(set(results)) == 1
    hierarchical = [(of_nodes, torch.float32, name) for name in HIERARCHICAL[:2]]
    env = environment_of_nodes((2, 1))
    for results in zip(*ranks(3, as_one_process, hierarchical, env=env), strict=True):
        assert len(set(results)) == 1


@training.with_group
def each_algorithm_with_and_without():
    """By door and algorithm, of numbers 1, 2, 5 and of none: digests and counts of what is sent."""
    cases = [(wrap, name) for name in GRADIENTS]
    cases += [(ddp_class, name) for name in GRADIENTS if name != "qadam"]
    cases += [(comm_hook, name) for name in GRADIENTS if name != "qadam"]
    found = []
    for make, name in cases:
        for says in (True, False):
            door = make(name, training.network())
            samples = ROWS if says else (1, 1, 1)
            found.append((name, trained(door, samples, True), door.counts()))
    return list(zip(found[::2], found[1::2], strict=True))


def test_numbers_1_2_and_5_send_what_none_send_by_every_door_and_algorithm(ranks):
    for of_ranks in zip(*ranks(3, each_algorithm_with_and_without), strict=True):
        assert len({said[1] for said, _ in of_ranks}) == 1, of_ranks
        for said, none in of_ranks:
            assert said[1] != none[1]
            assert said[2] == none[2], said[0]


@sharded.with_torch_group
def gradients_of_shards(shape, samples, options):
    """Gradients of whole numbers, which float16 holds, and their mean by samples."""
    rank, model = dist.get_rank(), linear()
    whole_loss(model, 0).backward()
    of_ranks = [None] * len(samples)
    dist.all_gather_object(of_ranks, [parameter.grad for parameter in model.parameters()])
    right = [weighted_mean(list(each), samples) for each in zip(*of_ranks, strict=True)]
    model = hybrid(shape, linear()) if shape else sharded.sharded(linear())
    handle = bagua.fsdp.compress(model, "fp16", **options)
    handle.bagua_samples(samples[rank])
    whole_loss(model, 0).backward()
    for parameter, expected in zip(model.parameters(), right, strict=True):
        found = parameter.grad.full_tensor()
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_gradients_of_shards_with_1_2_and_5_samples_are_those_of_one_process(ranks):
    both_ways = {"reduce_scatter": True}
    for shape, options in ((None, {}), ((3, 1), {}), ((3, 1), both_ways)):
        ranks(3, gradients_of_shards, shape, ROWS, options)
    for options in ({}, both_ways):
        ranks(4, gradients_of_shards, (2, 2), (1, 2, 5, 8), options)


class WithBuffer(nn.Module):
    """Has a buffer, which ranks are given before a forward, also of an evaluation."""

    def __init__(self):
        super().__init__()
        self.inner = training.network()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs):
        return self.inner(inputs)


#: By rank and step: rows of the micro-batches, all but the last inside no_sync().
WINDOWS = [[(1,), (2, 3)], [(2, 1, 1), (4,)], [(5, 2), (0, 1)]]


@training.with_group
def windows(network, evaluates):
    rank, model = dist.get_rank(), network()
    alone = copy.deepcopy(model)
    optimizer, other = training.sgd(model), training.sgd(alone)
    model.with_bagua([optimizer], GradientAllReduceAlgorithm())
    model.bagua_samples(0)
    for step in range(2):
        if evaluates:
            with torch.no_grad():
                model.bagua_samples(1000)  # of no training forward
                model.eval()(training.batch(step, rank)[0])
            model.train()
        optimizer.zero_grad()
        own = WINDOWS[rank][step]
        inputs, targets = training.batch(step, rank, rows=sum(own))
        for i, (x, y) in enumerate(zip(inputs.split(own), targets.split(own), strict=True)):
            with contextlib.nullcontext() if i == len(own) - 1 else model.no_sync():
                model.bagua_samples(len(x))
                loss = (model(x) - y).square().sum() / targets.numel()
                loss.backward()
        optimizer.step()
        other.zero_grad()
        rows = [sum(window[step]) for window in WINDOWS]
        training.squared_error(alone, whole(step, rows)).backward()
        other.step()
    training.assert_close(model, alone, rtol=1e-6, atol=1e-6)
    return training.bits(model.parameters())


def test_samples_of_a_window_of_no_sync_add_up(ranks):
    for network in (training.network, WithBuffer):
        for evaluates in (False, True):
            assert len(set(ranks(3, windows, network, evaluates))) == 1


@training.with_group
def joined(divide_by_initial_world_size, says):
    """Rank r has r + 1 batches, of as many rows as its number and the step say."""
    rank, model = dist.get_rank(), training.network()
    alone = copy.deepcopy(model)
    optimizer, other = training.sgd(model), training.sgd(alone)
    ddp = DistributedDataParallel(model, optimizers=[optimizer])
    with ddp.join(divide_by_initial_world_size=divide_by_initial_world_size):
        for step in range(rank + 1):
            optimizer.zero_grad()
            if says:
                ddp.bagua_samples(1 + rank + step)
            training.squared_error(ddp, training.batch(step, rank, 1 + rank + step)).backward()
            optimizer.step()
    for step in range(3):
        parts = [training.batch(step, r, 1 + r + step) for r in range(step, 3)]
        other.zero_grad()
        data = tuple(torch.cat(side) for side in zip(*parts, strict=True))
        training.squared_error(alone, data).backward()
        other.step()
    if says:
        training.assert_close(model, alone, rtol=1e-6, atol=1e-6)
    return training.bits(model.parameters())


def test_unequal_loaders_in_join_train_as_one_process(ranks):
    for divides in (True, False):
        assert len(set(ranks(3, joined, divides, True))) == 1


@training.with_group
def packed(empty):
    """Tokens of which some count; rank `empty` has none of these, so that its mean is NaN."""
    rank, model = dist.get_rank(), training.network(outputs=1)
    model.with_bagua([training.sgd(model)], GradientAllReduceAlgorithm())
    everyone = []
    for r in range(2):
        inputs, targets = training.batch(0, r, rows=6)
        counts = torch.arange(6) < (0 if r == empty else 2 + r)
        everyone.append((inputs, targets[:, :1], counts))
    twins = [copy.deepcopy(model) for _ in everyone]
    for twin, (inputs, targets, counts) in zip(twins, everyone, strict=True):
        ((twin(inputs) - targets).square()[counts]).mean().backward()
    numbers = [int(counts.sum()) for _, _, counts in everyone]
    inputs, targets, counts = everyone[rank]
    model.bagua_samples(counts.sum())
    ((model(inputs) - targets).square()[counts]).mean().backward()
    for p, *theirs in zip(model.parameters(), *(t.parameters() for t in twins), strict=True):
        expected = weighted_mean([q.grad for q in theirs], numbers)
        torch.testing.assert_close(p.grad, expected, rtol=1e-6, atol=1e-7)
    return training.bits(p.grad for p in model.parameters())


def test_a_rank_without_tokens_weighs_nothing_though_its_loss_is_nan(ranks):
    for empty in (None, 0, 1):
        assert len(set(ranks(2, packed, empty))) == 1


@training.with_group
def two_backwards():
    """Gradients of a second backward through one forward, and the mean of all samples."""
    rank, model = dist.get_rank(), training.network()
    model.with_bagua([training.sgd(model)], GradientAllReduceAlgorithm())
    twin = copy.deepcopy(model)
    model.bagua_samples(ROWS[rank])
    loss = training.squared_error(model, training.batch(0, rank, rows=ROWS[rank]))
    loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    training.squared_error(twin, whole(0, ROWS)).backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=1e-7)


def test_every_backward_of_a_forward_has_its_number(ranks):
    ranks(3, two_backwards)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(9, training.FEATURES, sparse=True)
        self.head = training.network()

    def forward(self, inputs):
        return self.head(self.words(inputs.abs().mul(3).long().clamp(max=8)[:, 0]))


def plain_sgd(name, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.with_bagua([optimizer], every_algorithm.made(name))
    return Door(model, optimizer, model)


def test_samples_weigh_the_rows_of_sparse_embeddings(ranks):
    cases = [(plain_sgd, "gradient_allreduce", samples) for samples in THREE[:2]]
    assert_samples_are_factors(ranks, 3, cases, Words)


class Scaled:
    """Stands for an optimizer under a GradScaler."""

    def __init__(self, optimizer, scaler):
        self._optimizer, self._scaler = optimizer, scaler
        self.zero_grad = optimizer.zero_grad

    def step(self):
        self._scaler.step(self._optimizer)
        self._scaler.update()


@training.with_group
def under_a_scaler(samples):
    found = []
    for says in (True, False):
        model, scaler = training.network(), torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = training.sgd(model)
        model.with_bagua([optimizer], SparseAlgorithm(ratio=0.1), grad_scaler=scaler)
        for step in range(STEPS):
            if says:
                model.bagua_samples(samples[dist.get_rank()])
            loss = training.squared_error(model, training.batch(step, dist.get_rank()))
            optimizer.zero_grad()
            scaler.scale(loss if says else loss * factor(samples)).backward()
            Scaled(optimizer, scaler).step()
        found.append(training.bits(model.parameters()))
    return found


def test_samples_weigh_residuals_under_a_loss_scale(ranks):
    for said, multiplied in ranks(3, under_a_scaler, THREE[0]):
        assert said == multiplied


@training.with_group
def refused():
    model = training.network()
    model.with_bagua([training.sgd(model)], "decentralized")
    errors = [training.error_of(lambda: model.bagua_samples(3))]
    model = training.network()
    model.with_bagua([training.sgd(model)], "gradient_allreduce")
    for number in (-1, float("nan"), float("inf")):
        errors.append(training.error_of(lambda number=number: model.bagua_samples(number)))
    model.bagua_samples(3)
    model(training.batch(0, 0)[0])  # without backward: the round stays open
    model.bagua_samples(3)
    model(training.batch(0, 0)[0]).sum().backward()
    model.bagua_samples(3)
    model(training.batch(0, 0)[0])
    model.bagua_samples(4)
    errors.append(training.error_of(lambda: model(training.batch(0, 0)[0])))
    model = WithBuffer()
    model.with_bagua([training.sgd(model)], "gradient_allreduce")
    with torch.no_grad():
        model(training.batch(0, 0)[0])
    model.bagua_samples(4)
    errors.append(training.error_of(lambda: model(training.batch(0, 0)[0])))
    return errors


def test_numbers_that_cannot_be_are_errors_with_the_remedy(ranks):
    for weights, negative, nan, infinite, changed, late in ranks(2, refused):
        assert "averages weights" in weights
        assert "bagua_samples(-1)" in negative
        assert "bagua_samples(nan)" in nan
        assert "bagua_samples(inf)" in infinite
        assert "says 4 for a round that its first forward has opened with 3" in changed
        assert "Call bagua_samples(0) once after the wrap" in late
