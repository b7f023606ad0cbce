"""Ideas of adamw_compressors.py: their AdamW is torch's, and their residuals lose nothing."""

import importlib
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SHAPES = {"symbol.weight": (256, 8), "body.weight": (40, 24), "body.bias": (24,)}


@pytest.fixture
def study(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("adamw_ideas")


def parts_of(study):
    parts, start = [], 0
    for name, shape in SHAPES.items():
        parts.append(study.Part(name, start, shape))
        start += parts[-1].numel
    return parts, start


def gradients(numel, step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(numel, generator=generator) * 0.01 for _ in range(2)]


def test_exact_gradients_give_the_steps_of_torch(study):
    parts, numel = parts_of(study)
    weights = torch.randn(numel, generator=torch.Generator().manual_seed(7))
    expected = torch.nn.Parameter(weights.clone())
    optimizer = torch.optim.AdamW([expected], lr=0.01)
    rule = study.IDEAS["exact"](parts, 10)
    for step in range(5):
        own = gradients(numel, step)
        expected.grad = torch.stack(own).mean(0)
        torch.nn.utils.clip_grad_norm_([expected], 1.0)
        optimizer.step()
        rule.step(weights, own, 0.01)
    torch.testing.assert_close(weights, expected.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "idea", ["power", "power, tables exact", "sparse", "sparse, by parameter", "sparse, 4 bits"]
)
def test_what_is_not_sent_stays_in_the_residuals(study, idea):
    parts, numel = parts_of(study)
    residuals = study.IDEAS[idea](parts, 10).residuals
    brought, arrived = torch.zeros(numel), torch.zeros(numel)
    for step in range(5):
        own = gradients(numel, step)
        brought += torch.stack(own).mean(0)
        arrived += residuals.mean(own)
    owed = torch.stack(residuals.errors).mean(0)
    assert owed.norm() > 0.1 * brought.norm(), "something is compressed"
    torch.testing.assert_close(arrived + owed, brought, rtol=1e-4, atol=1e-6)


def test_every_idea_makes_a_step_and_counts_its_bytes(study):
    parts, numel = parts_of(study)
    for idea, rule_of in study.IDEAS.items():
        rule = rule_of(parts, 20)
        weights = torch.zeros(numel)
        for step in range(5):
            rule.step(weights, gradients(numel, step), 0.01)
        assert weights.isfinite().all(), idea
        assert weights.any(), idea
        assert 0 < rule.bytes < 8 * numel, idea


@pytest.mark.parametrize("idea", ["kept", "corrected"])
def test_exact_messages_give_the_steps_of_exact_momentum(study, idea):
    parts, numel = parts_of(study)
    exact = study.Exact(parts)
    rule = {
        "kept": study.KeptMomenta(exact, 2),
        "corrected": study.CorrectedMomenta(exact, 2, masked=False),
    }[idea]
    expected = study.Momenta(study.Residuals(exact), 2)
    weights, others = torch.zeros(numel), torch.zeros(numel)
    for step in range(6):
        rule.step(weights, gradients(numel, step), 0.01)
        expected.step(others, gradients(numel, step), 0.01)
    torch.testing.assert_close(weights, others, rtol=1e-4, atol=1e-6)


def test_corrected_momenta_lose_nothing(study):
    parts, numel = parts_of(study)
    rule = study.CorrectedMomenta(study.Largest(parts, 0.05), masked=False)
    momentum, brought = torch.zeros(numel), torch.zeros(numel)
    arrived = torch.zeros(numel)
    largest = rule.compressor

    def noted(vectors):
        mean, sent = largest(vectors)
        arrived.add_(mean)
        return mean, sent

    noted.bytes = 1.0
    rule.compressor = noted
    for step in range(5):
        own = gradients(numel, step)
        momentum = 0.9 * momentum + 0.1 * torch.stack(own).mean(0)
        brought += momentum
        rule.step(torch.zeros(numel), own, 0.01)
    owed = torch.stack(rule.errors).mean(0)
    assert owed.norm() > 0.1 * brought.norm(), "something is compressed"
    torch.testing.assert_close(arrived + owed, brought, rtol=1e-4, atol=1e-6)


def test_masks_restart_the_momentum_of_what_was_sent(study):
    parts, numel = parts_of(study)
    rule = study.CorrectedMomenta(study.Largest(parts, 0.05))
    rule.step(torch.zeros(numel), gradients(numel, 0), 0.01)
    for momentum, error in zip(rule.momenta, rule.errors, strict=True):
        assert torch.equal(momentum == 0, error == 0)
        assert 0.04 < float((momentum == 0).float().mean()) < 0.06


@pytest.mark.parametrize("by", ["error", "relative error"])
def test_ranks_by_matrix_cost_no_more_than_one_rank_for_all(study, by):
    parts, numel = parts_of(study)
    uniform, chosen = study.LowRank(parts, 4), study.LowRank(parts, 4, by=by)
    brought = gradients(numel, 0)
    large = parts[1]
    for vector in brought:
        vector[large.place] *= 10
    uniform(brought)
    chosen(brought)
    assert chosen.bytes <= uniform.bytes
    assert chosen.ranks["body.weight"] > 4


def test_dion_of_full_rank_makes_momentum_orthonormal(study):
    parts, numel = parts_of(study)
    matrix = parts[1]
    rule = study.Dion([matrix], 1000, study.Gradients(study.Residuals(study.Exact([]))), 1.0)
    weights = torch.zeros(numel)
    for _step in range(30):  # the same gradient: the queries become its singular vectors
        before = weights.clone()
        rule.step(weights, gradients(numel, 7), 1.0)
    rows, columns = matrix.shape
    moved = (before * (1 - 0.01) - weights)[matrix.place].view(matrix.shape)
    values = torch.linalg.svdvals(moved / (rows / columns) ** 0.5)
    torch.testing.assert_close(values, torch.ones(columns), rtol=0.1, atol=0.1)
