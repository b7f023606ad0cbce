"""The optimizer of QAdam by itself: Adam first, then a frozen second moment."""

import copy
import io

import pytest
import torch
from bagua.torch_api.algorithms import _q_adam_optimizer
from bagua.torch_api.algorithms.q_adam import QAdamOptimizer
from oracle import q_adam as oracle

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def parameters(dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((3, 5), (4,), ())]


def groups(params):
    return [
        {"params": params[:1], "betas": (0.8, 0.99), "weight_decay": 0.1},
        {"params": params[1:], "lr": 0.02, "eps": 1e-6},
    ]


def give_gradients(params, step):
    generator = torch.Generator().manual_seed(step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def optimizer_of(params, warmup_steps=3, **arguments):
    return QAdamOptimizer(groups(params), lr=0.01, warmup_steps=warmup_steps, **arguments)


def run(params, optimizer, steps):
    for step in steps:
        give_gradients(params, step)
        optimizer.step()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_warm_up_is_adam_to_the_bit_on_all_of_its_steps(dtype):
    ours, theirs = parameters(dtype), parameters(dtype)
    optimizer = optimizer_of(ours)
    adam = torch.optim.Adam(groups(theirs), lr=0.01, foreach=False)
    run(ours, optimizer, range(3))
    run(theirs, adam, range(3))
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[p][key], adam.state[q][key])
    assert (optimizer.completed_steps, optimizer.compressed_steps) == (3, 0)
    assert not optimizer.warming_up


@pytest.mark.parametrize("warmup_steps", [1, 3])
def test_later_steps_are_the_oracles_with_v_and_its_bias_correction_frozen(warmup_steps):
    params = parameters(torch.float64)
    optimizer = optimizer_of(params, warmup_steps)
    run(params, optimizer, range(warmup_steps))
    frozen = [optimizer.state[p]["exp_avg_sq"].clone() for p in params]
    for step in range(warmup_steps, 8):
        give_gradients(params, step)
        expected = []
        for p, second in zip(params, frozen, strict=True):
            group = next(g for g in optimizer.param_groups if any(p is q for q in g["params"]))
            beta1 = group["betas"][0]
            memory = oracle.local_momentum(optimizer.state[p]["exp_avg"], p.grad, beta1)
            memory = oracle.decayed(memory, p.detach(), beta1, group["weight_decay"])
            rest = (step + 1, warmup_steps, group["lr"], group["betas"], group["eps"])
            expected.append((memory, oracle.moved(p.detach(), memory, second, *rest)))
        optimizer.step()
        for p, second, (memory, weight) in zip(params, frozen, expected, strict=True):
            torch.testing.assert_close(p.detach(), weight, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(
                optimizer.state[p]["exp_avg"], memory, rtol=1e-12, atol=1e-12
            )
            assert torch.equal(optimizer.state[p]["exp_avg_sq"], second)
            assert optimizer.state[p]["step"].item() == step + 1
    assert optimizer.compressed_steps == 8 - warmup_steps


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95)], ids=str)
def test_an_element_without_gradient_in_the_warm_up_moves_no_further_than_adam_would(betas):
    p = torch.nn.Parameter(torch.zeros(2))
    optimizer = QAdamOptimizer([p], lr=0.01, warmup_steps=5, betas=betas)
    for step in range(8):
        before = p.detach().clone()
        p.grad = torch.tensor([1.0, 0.0 if step < 5 else -3.0])
        optimizer.step()
        moved = (p.detach() - before).abs()
        assert (moved[1] == 0) if step < 5 else (moved[1] > 0)
        assert (moved <= 0.01 * max(1.0, (1 - betas[0]) / (1 - betas[1]) ** 0.5) * 1.001).all()


def test_parameters_without_gradient_stay_in_both_phases():
    params = parameters()
    optimizer = optimizer_of(params, warmup_steps=2)
    last = params[-1].detach().clone()
    for step in range(4):
        give_gradients(params[:-1], step)
        optimizer.step()
    assert torch.equal(params[-1], last)
    assert params[-1] not in optimizer.state
    assert optimizer.completed_steps == 4
    params[0].grad = None
    first, momentum = params[0].detach().clone(), optimizer.state[params[0]]["exp_avg"].clone()
    optimizer.step()
    assert torch.equal(params[0], first)
    assert torch.equal(optimizer.state[params[0]]["exp_avg"], momentum)


def test_a_parameter_that_is_late_does_not_bring_the_warm_up_back():
    params = parameters()
    optimizer = optimizer_of(params, warmup_steps=2)
    run(params[1:], optimizer, range(2))
    assert not optimizer.warming_up
    run(params, optimizer, range(2, 3))
    assert optimizer.state[params[0]]["step"].item() == 1
    assert not optimizer.state[params[0]]["exp_avg_sq"].any()
    assert not optimizer.warming_up
    assert optimizer.completed_steps == 3


def test_nothing_keeps_autograd_history_and_the_closure_runs_with_grad():
    params = parameters()
    optimizer = optimizer_of(params, warmup_steps=1)
    asked = []

    def closure():
        asked.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = sum((p**2).sum() for p in params)
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]
    assert asked == [True] * 3
    for p in params:
        tensors = [p, *optimizer.state[p].values()]
        assert all(t.grad_fn is None for t in tensors)
        assert not optimizer.state[p]["exp_avg"].requires_grad


@pytest.mark.parametrize("saved_after", [1, 3, 5])
def test_a_saved_state_goes_on_to_the_bit(saved_after):
    params = parameters()
    optimizer = optimizer_of(params)
    run(params, optimizer, range(saved_after))
    file = io.BytesIO()
    torch.save([optimizer.state_dict(), params], file)
    file.seek(0)
    state, again = torch.load(file, weights_only=False)
    other = QAdamOptimizer(groups(again), lr=7.0, warmup_steps=77)
    other.load_state_dict(state)
    twin = copy.deepcopy(optimizer)
    twins = [p for group in twin.param_groups for p in group["params"]]
    for theirs, resumed in ((again, other), (twins, twin)):
        assert resumed.warmup_steps == 3, "the checkpoint's"
        run(theirs, resumed, range(saved_after, 8))
    run(params, optimizer, range(saved_after, 8))
    for p, q, r in zip(params, again, twins, strict=True):
        assert torch.equal(p, q)
        assert torch.equal(p, r)


BAD = {
    "lr=-1": {"lr": -1},
    "eps=-1": {"eps": -1},
    r"betas=\(1.0, 0.9\)": {"betas": (1.0, 0.9)},
    r"betas=\(0.9, -0.1\)": {"betas": (0.9, -0.1)},
    "weight_decay=-1": {"weight_decay": -1},
    "warmup_steps=0": {"warmup_steps": 0},
}


@pytest.mark.parametrize(("message", "arguments"), BAD.items(), ids=BAD)
def test_arguments_out_of_range_are_refused_by_name(message, arguments):
    with pytest.raises(ValueError, match=message):
        QAdamOptimizer(parameters(), **arguments)
    with pytest.raises(ValueError, match=message):
        QAdamOptimizer([{"params": parameters(), **arguments}])


def test_groups_share_one_warm_up():
    params = parameters()
    optimizer = QAdamOptimizer(params[:2], warmup_steps=5)
    with pytest.raises(ValueError, match=r"equal in all groups, not \[5, 6\]"):
        optimizer.add_param_group({"params": params[2:], "warmup_steps": 6})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": params[2:]})
    assert optimizer.warmup_steps == 5


@pytest.mark.parametrize("averaged", [False, True], ids=["alone", "averaged"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
def test_steps_in_pieces_and_of_lists_have_the_same_bits(dtype, averaged, monkeypatch):
    """On CPU a parameter is stepped in pieces, on a device all of a group together."""

    def train():
        params = parameters(dtype)
        optimizer = optimizer_of(params)
        run(params, optimizer, range(3))
        for step in range(3, 6):
            give_gradients(params, step)
            if step == 4:
                params[1].grad = None  # the counts of its group differ from here on
            for group in optimizer.param_groups:
                stepped = [p for p in group["params"] if p.grad is not None]
                with torch.no_grad():
                    optimizer._step_later(group, stepped, averaged)
        return [(p, *optimizer.state[p].values()) for p in params]

    whole = train()
    monkeypatch.setattr(_q_adam_optimizer, "CACHED", 4)
    in_pieces = train()
    monkeypatch.setattr(_q_adam_optimizer, "_at_a_time", lambda of_parameters: [of_parameters])
    together = train()
    for expected, *found in zip(whole, in_pieces, together, strict=True):
        for tensors in found:
            assert all(map(torch.equal, tensors, expected))
