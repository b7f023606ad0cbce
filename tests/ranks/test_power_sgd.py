"""PowerSGD in training: equal ranks, the oracle's values, dtypes, layouts, wrong arguments."""

import pytest
import torch
from bagua.torch_api.algorithms import (
    ByteGradAlgorithm,
    PowerSGDAlgorithm,
    QAdamOptimizer,
    SparseAlgorithm,
)
from support import training
from support.error_feedback import (
    assert_low_rank_mean,
    gathered_gradients,
    make,
    train_step,
    wide_network,
    wrapped,
)

STEPS = 6


@training.with_group
def train_and_compare(arguments, dtype):
    """Every round against the oracle, from what the algorithm remembered before it."""
    model, optimizer = wrapped(make("power_sgd", **arguments), dtype=dtype)
    compressed = set()
    for step in range(STEPS):
        before = training.gather(model.bagua_algorithm.state_dict())
        brought = gathered_gradients(model, step)
        train_step(model, optimizer, step)
        training.assert_ranks_agree(model)
        after = model.bagua_algorithm.state_dict()
        compressed |= set(assert_low_rank_mean(model, brought, before, after))
    return sorted(compressed)


@pytest.mark.parametrize(
    ("n", "env"), [(2, {}), (3, training.SMALL_BUCKETS)], ids=["one-bucket", "buckets"]
)
def test_training_follows_the_oracle_and_ranks_agree(ranks, n, env):
    names = ["0.weight", "2.weight", "5.weight"]
    assert ranks(n, train_and_compare, {}, torch.float32, env=env) == [names] * n


def test_f64_training_follows_the_oracle(ranks):
    assert len(ranks(2, train_and_compare, {}, torch.float64)[0]) == 3


def test_small_matrices_are_averaged_exactly(ranks):
    arguments = {"min_compression_rate": 1.5}
    assert ranks(2, train_and_compare, arguments, torch.float32)[0] == ["0.weight", "2.weight"]


def test_wrong_arguments_are_refused_by_name():
    for arguments in ({"rank": 0}, {"min_compression_rate": 0.5}, {"warmup_steps": -1}):
        with pytest.raises(ValueError, match=next(iter(arguments))):
            PowerSGDAlgorithm(**arguments)


@training.with_group
def warnings_by_optimizer():
    class MuonWithAux(torch.optim.SGD):
        pass

    class FrozenAdamW(torch.optim.AdamW):
        freezes_second_moment = True

    makers = {
        "sgd": training.sgd,
        "adamw": lambda m: torch.optim.AdamW(m.parameters()),
        "muon": lambda m: MuonWithAux(m.parameters(), lr=0.1),
        "qadam": lambda m: QAdamOptimizer(m.parameters()),
        "frozen": lambda m: FrozenAdamW(m.parameters()),
    }
    said = {}
    for name, make_optimizer in makers.items():
        for algorithm in (PowerSGDAlgorithm(), SparseAlgorithm(), ByteGradAlgorithm()):
            model = wide_network()
            wrap = [make_optimizer(model)], algorithm
            key = name, type(algorithm).__name__
            said[key] = training.warnings_of(lambda m=model, w=wrap: m.with_bagua(*w))
    return said


def test_adaptive_optimizers_and_muon_are_warned_of_at_the_wrap(ranks):
    [said] = ranks(1, warnings_by_optimizer)
    for (optimizer, algorithm), texts in said.items():
        if algorithm == "ByteGradAlgorithm" or optimizer in ("sgd", "qadam", "frozen"):
            assert texts == [], (optimizer, algorithm)
            continue
        [text] = texts
        assert text.startswith(f"{algorithm} is made for SGD with momentum")
        assert ("AdamW" if optimizer == "adamw" else "MuonWithAux") in text
        assert 'ByteGradAlgorithm(codec="int4_block", error_feedback=True)' in text
