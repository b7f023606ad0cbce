"""Complex parameters: exact gradients, equal to torch's DistributedDataParallel."""

import copy

import bagua.torch_api as bagua
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import GradientAllReduceAlgorithm
from bagua.torch_api.data_parallel import DistributedDataParallel
from ranks.test_groups_and_nodes import environment_of_nodes
from support import every_algorithm, training
from support.cases import over
from torch import nn

STEPS = 3


class Spectral(nn.Module):
    """Complex weights, a complex buffer and a real layer behind them."""

    def __init__(self, dtype, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.mix = nn.Linear(training.FEATURES, 7, dtype=dtype)
        self.phase = nn.Parameter(torch.randn(7, 3, dtype=dtype).t())  # strides of its own
        self.register_buffer("seen", torch.zeros(7, dtype=dtype))
        self.head = nn.Linear(3, training.OUTPUTS)

    def forward(self, x):
        hidden = self.mix(x.to(self.mix.weight.dtype))
        if self.training:
            self.seen += hidden.detach().mean(0)
        return self.head((hidden @ self.phase.mT).abs().float())


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.05)


def trained(model, optimizer, set_to_none):
    """Steps of two backwards, of which the second communicates."""
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none)
        with model.no_sync():
            training.squared_error(model, training.batch(9 + step, dist.get_rank())).backward()
        training.squared_error(model, training.batch(step, dist.get_rank())).backward()
        optimizer.step()
    return model


@training.with_group
def train_as_ddp(way, dtype, set_to_none, hierarchical):
    plain = Spectral(dtype, seed=dist.get_rank())  # rank 0's counts
    ours, theirs = copy.deepcopy(plain), nn.parallel.DistributedDataParallel(plain)
    optimizer = adam(ours)
    if way == "class":
        model = DistributedDataParallel(ours, optimizers=[optimizer])
    else:
        model = ours.with_bagua([optimizer], GradientAllReduceAlgorithm(hierarchical=hierarchical))
    trained(model, optimizer, set_to_none)
    trained(theirs, adam(plain), set_to_none)
    training.assert_ranks_agree(ours)
    training.assert_close(ours, plain, rtol=1e-5, atol=1e-6)
    for (name, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad.dtype, p.grad.stride()) == (p.dtype, p.stride()), name
        torch.testing.assert_close(p.grad, q.grad)
    kinds = {str(bucket.backend_tensor.dtype) for bucket in model.bagua_ddp.bagua_buckets}
    torch.testing.assert_close(training.gather(ours.seen)[0], training.gather(plain.seen)[0])
    return sorted(kinds)


CASES = [
    ("with_bagua", torch.complex64, True, False, {}),
    ("class", torch.complex128, False, False, {}),
    ("with_bagua", torch.complex64, True, True, environment_of_nodes((2, 1))),
]


@over(case=CASES)
def test_training_equals_ddp(ranks, case):
    *arguments, env = case
    for kinds in ranks(3, train_as_ddp, *arguments, env=env):
        assert kinds == sorted([str(arguments[1]), "torch.float32"])


@training.with_group
def give_a_state_with_moments():
    """The optimizer has complex state on rank 0 only; buffers and weights differ."""
    model = Spectral(torch.complex64, seed=dist.get_rank())
    optimizer = adam(model)
    if dist.get_rank() == 0:
        training.squared_error(model, training.batch(0, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.with_bagua([optimizer], GradientAllReduceAlgorithm())
    moments = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
    given = training.bits([*model.parameters(), *model.buffers(), *moments])
    with torch.no_grad():
        model.phase.fill_(1j * dist.get_rank())
        model.seen.fill_(1j * dist.get_rank())
    averaged = bagua.average_weights(model)
    assert averaged.phase.tolist() == [[1j] * 7] * 3
    assert averaged.seen.tolist() == [0j] * 7, "a buffer without a mean is the first rank's"
    return given, [str(m.dtype) for m in moments]


def test_the_wrap_gives_and_an_export_averages_complex_tensors(ranks):
    first, *others = ranks(3, give_a_state_with_moments)
    assert first[1].count("torch.complex64") == 3
    assert others == [first, first]


@training.with_group
def give_conjugated_tensors():
    """A parameter and a buffer that are lazily conjugated."""
    model = nn.Module()
    torch.manual_seed(dist.get_rank())
    model.p = nn.Parameter(torch.randn(3, dtype=torch.complex64).conj())
    model.register_buffer("b", torch.randn(2, dtype=torch.complex64).conj())
    model.forward = lambda x: ((model.p * x).sum() * model.b.sum()).abs()
    assert model.p.is_conj()
    model.with_bagua([], GradientAllReduceAlgorithm())
    model(torch.full((3,), 1.0 + dist.get_rank())).backward()
    model.p.grad = model.p.grad.conj()
    model(torch.full((3,), 1.0 + dist.get_rank())).backward()
    values = [t.detach().resolve_conj() for t in (model.p, model.b, model.p.grad)]
    return training.bits(values)


def test_conjugated_tensors_are_equal_on_all_ranks(ranks):
    assert len(set(ranks(2, give_conjugated_tensors, env={"BAGUA_CHECK_WEIGHTS_EVERY": "1"}))) == 1


@training.with_group
def drift():
    model = Spectral(torch.complex64)
    model.with_bagua([], GradientAllReduceAlgorithm(), broadcast_buffers=False)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.phase[1, 2] += 1e-6j
    data = training.batch(0, 0)
    return training.error_of(lambda: training.squared_error(model, data).backward())


def test_the_weights_check_sees_an_imaginary_part(ranks):
    for error in ranks(2, drift, env={"BAGUA_CHECK_WEIGHTS_EVERY": "1"}):
        assert "First difference: 'phase' (rank 0 against rank 1)" in error


#: Those that cannot; auto takes exact gradients for them.
OTHERS = sorted(set(every_algorithm.ALGORITHMS) - {"gradient_allreduce", "auto"})


@training.with_group
def refuse():
    return {
        name: training.error_of(
            lambda n=name: every_algorithm.wrapped(n, Spectral(torch.complex64))
        )
        for name in OTHERS
    }


def test_other_algorithms_refuse_them_at_the_wrap(ranks):
    for errors in ranks(2, refuse):
        for name, error in errors.items():
            assert error.startswith("TypeError: parameter 'phase' is torch.complex64"), name
            assert "use GradientAllReduceAlgorithm" in error, name
