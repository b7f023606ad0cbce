"""benchmarks/adamw_compressors.py: its AdamW is torch's, and its residuals lose nothing."""

import importlib
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SHAPES = {"symbol.weight": (256, 8), "body.weight": (40, 24), "body.bias": (24,)}


@pytest.fixture
def study(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("adamw_compressors")


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
