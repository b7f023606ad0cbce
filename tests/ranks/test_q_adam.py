"""QAdam on ranks: Adam to the bit, one switch, then every step beside the oracle."""

import pytest
import torch
import torch.distributed as dist
from oracle import q_adam as oracle
from ranks.test_groups_and_nodes import environment_of_nodes
from support import q_adam_training as q_adam, training
from support.error_feedback import Means, residuals
from support.q_adam_training import STEPS, WARM_UP

RANKS = pytest.mark.parametrize("n", [2, 3], ids=lambda n: f"{n}-ranks")


@training.with_group
def warm_up_beside_adam(do_flatten):
    """Also: gradients are the mean, and ranks agree."""
    model, optimizer = q_adam.wrapped(warmup_steps=STEPS, do_flatten=do_flatten)
    twin = training.network()
    adam = torch.optim.Adam(q_adam.groups(twin), lr=0.01, foreach=False)
    for step in range(STEPS):
        local = q_adam.local_gradients(model, step)[dist.get_rank()]
        q_adam.train_step(model, optimizer, step)
        q_adam.assert_ranks_agree(model, optimizer)
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, training.mean_over_ranks(local[name]))
            q.grad = p.grad.clone()
        adam.step()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p, q), f"step {step}"
            for key in ("exp_avg", "exp_avg_sq", "step"):
                assert torch.equal(optimizer.state[p][key], adam.state[q][key]), f"step {step}"
    return q_adam.compressing(model), optimizer.compressed_steps


@pytest.mark.parametrize(("n", "do_flatten"), [(2, True), (3, False)])
def test_the_warm_up_is_adam_on_averaged_gradients_to_the_bit(ranks, n, do_flatten):
    assert ranks(n, warm_up_beside_adam, do_flatten) == [(False, 0)] * n


def plain(model, optimizer, step):
    q_adam.train_step(model, optimizer, step)


def accumulated(model, optimizer, step):
    optimizer.zero_grad(set_to_none=step % 2 == 0)
    with model.no_sync():
        q_adam.backward_of(model, 100 + step)
    q_adam.backward_of(model, step)
    optimizer.step()


def zeroed_late(model, optimizer, step):
    """Zeroes between forward and backward; forwards without one, and another backward, before."""
    inputs, targets = q_adam.data_of(model, step, dist.get_rank())
    inputs.requires_grad_()
    model(inputs)
    output = model(inputs)
    torch.autograd.grad(output.sum(), inputs, retain_graph=True)
    optimizer.zero_grad(set_to_none=step % 2 == 0)
    torch.nn.functional.mse_loss(output, targets).backward()
    optimizer.step()


def brought(model, step, train_step):
    found = q_adam.local_gradients(model, step)
    if train_step is accumulated:
        for total, more in zip(found, q_adam.local_gradients(model, 100 + step), strict=True):
            for name in total:
                total[name] += more[name]
    return found


@training.with_group
def train_beside_the_oracle(arguments, train_step=plain):
    """How many steps were compressed, and the bits of everything."""
    model, optimizer = q_adam.wrapped(**arguments)
    feedback = arguments.get("error_feedback", False)
    means = Means(arguments.get("codec", "block_uint8"), error_feedback=feedback)
    warmup_steps = arguments.get("warmup_steps", WARM_UP)
    phases, plans = [], []
    for step in range(STEPS):
        if train_step is not plain:  # as OneCycleLR has them
            optimizer.param_groups[0]["betas"] = (0.5 + 0.05 * step, 0.99)
        before = q_adam.Before(model, optimizer, brought(model, step, train_step))
        train_step(model, optimizer, step)
        q_adam.assert_ranks_agree(model, optimizer)
        phases.append(q_adam.compressing(model))
        plans.append(model.bagua_ddp._running)
        assert bool(residuals(model)) == (feedback and phases[-1])
        if phases[-1]:
            before.assert_compressed_step(model, means)
    assert phases == [False] * warmup_steps + [True] * (STEPS - warmup_steps)
    assert len(set(map(id, plans))) == 2, "one switch"
    assert optimizer.completed_steps == STEPS
    return optimizer.compressed_steps, q_adam.all_bits(model, optimizer)


@RANKS
@pytest.mark.parametrize("warmup_steps", [1, WARM_UP], ids=lambda w: f"{w}-steps-of-warm-up")
def test_after_the_warm_up_every_step_is_the_oracles(ranks, n, warmup_steps):
    results = ranks(n, train_beside_the_oracle, {"warmup_steps": warmup_steps})
    assert len(set(results)) == 1
    assert results[0][0] == STEPS - warmup_steps


#: Moments are of the parameters' dtype, and any codec can carry the momentum.
ARGUMENTS = [
    {"do_flatten": False},
    {"dtype": torch.float64},
    {"dtype": torch.bfloat16},
    {"dtype": torch.float16},
    {"codec": "minmax_uint8"},
    {"codec": "fp16"},
    {"codec": "bit2_block", "error_feedback": True},
    {"codec": "int4_block", "error_feedback": True},
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_with_other_arguments_every_step_is_the_oracles(ranks, arguments):
    env = {} if "dtype" in arguments else training.SMALL_BUCKETS
    n = 2 if "dtype" in arguments else 3
    assert len(set(ranks(n, train_beside_the_oracle, arguments, env=env))) == 1


@pytest.mark.parametrize("train_step", [accumulated, zeroed_late])
def test_in_other_steps_with_scheduled_betas_every_step_is_the_oracles(ranks, train_step):
    results = ranks(3, train_beside_the_oracle, {}, train_step)
    assert len(set(results)) == 1
    assert results[0][0] == STEPS - WARM_UP


@training.with_group
def train_on_nodes(codec):
    model, optimizer = q_adam.wrapped(hierarchical=True, codec=codec)
    for step in range(STEPS):
        gradients = q_adam.local_gradients(model, step)
        before = q_adam.Before(model, optimizer, gradients)
        q_adam.train_step(model, optimizer, step)
        q_adam.assert_ranks_agree(model, optimizer)
        if step < WARM_UP:
            continue
        names = before.local[0]
        exact = {
            name: torch.stack([local[name] for local in before.local]).mean(0) for name in names
        }
        largest = max(m[name].abs().max().item() for m in before.local for name in names)
        error = {"fp16": 1e-3, "block_uint8": 2 / 255}[codec] * largest
        before.assert_step(model, exact, rtol=0, atol=error * 2)
    return [bucket["ops"] for bucket in model.bagua_stats()["buckets"]]


@pytest.mark.parametrize(
    ("codec", "sizes"),
    [("fp16", (2, 2)), ("block_uint8", (3, 1)), ("block_uint8", (1, 1, 1))],
    ids=str,
)
def test_nodes_average_exactly_inside_and_compress_between(ranks, codec, sizes):
    results = ranks(sum(sizes), train_on_nodes, codec, env=environment_of_nodes(sizes))
    for ops in results:
        assert ops[0][0] == "UpdateMomentum(4 slots)"
        assert ops[0][1].startswith(f"Hierarchical({len(sizes)} nodes")
    assert f"CompressedAllReduce({codec}, mean, ranks {len(sizes)})" in results[0][0][1]


@training.with_group
def rewrap(then):
    """After the switch another algorithm takes over: .grad holds gradients again."""
    model, optimizer = q_adam.wrapped()
    for step in range(WARM_UP + 2):
        q_adam.train_step(model, optimizer, step)
    if then == "closed":
        model.bagua_ddp.close()
    else:
        model.with_bagua([optimizer], training.algorithm("exact"))
    before = q_adam.Before(model, optimizer, q_adam.local_gradients(model, 9))
    q_adam.train_step(model, optimizer, 9)
    for name, p in model.named_parameters():
        momentum = oracle.local_momentum(before.memory[name], p.grad, before.beta1[name])
        decay = before.group[p]["weight_decay"]
        expected = oracle.decayed(momentum, before.weights[name], before.beta1[name], decay)
        torch.testing.assert_close(optimizer.state[p]["exp_avg"], expected)
    return len(set(training.gather(training.model_bits(model))))


def test_under_another_algorithm_the_optimizer_makes_its_own_momentum(ranks):
    assert ranks(2, rewrap, "exact") == [1, 1]
    assert ranks(2, rewrap, "closed") == [2, 2]
