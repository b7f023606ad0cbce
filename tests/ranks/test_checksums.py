"""BAGUA_CHECKSUM=1: the same training, and in an aggregation the same on all ranks or refused."""

import torch
import torch.distributed as dist
from mlbench_core.aggregation.pytorch.centralized import SparsifiedAggregation
from support import training
from support.cases import over
from support.every_algorithm import wrapped

WITH = {"BAGUA_CHECKSUM": "1"}
COMPRESSED = ["bytegrad", "low_precision_decentralized", "qadam", "sparse"]


@training.with_group
def train(name):
    model, optimizer = wrapped(name, training.wide_network())
    data = [training.batch(step, dist.get_rank()) for step in range(5)]
    training.train(model, optimizer, data)
    ops = {op for bucket in model.bagua_stats()["buckets"] for op in bucket["ops"]}
    return training.model_bits(model), ops


@over(name=COMPRESSED, n=[2, 3])
def test_training_with_a_checksum_is_training_without_to_the_bit(ranks, name, n):
    plain, checked = ranks(n, train, name), ranks(n, train, name, env=WITH)
    assert [bits for bits, _ in plain] == [bits for bits, _ in checked]
    for (_, without), (_, ops) in zip(plain, checked, strict=True):
        assert not any("checksum" in op for op in without)
        assert any(op.endswith(", checksum)") for op in ops), ops


@training.with_group
def aggregate():
    model = torch.nn.Linear(40, 30)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    aggregation = SparsifiedAggregation(model, ratio=0.01).agg_grad(by_layer=False)
    return training.error_of(lambda: aggregation(model, "avg_world"))


def test_aggregations_compare_the_setting_too(ranks):
    for message in ranks(2, aggregate, env=[{}, WITH]):
        assert message.startswith("BaguaMismatchError: ")
        assert "rank 0 has [BAGUA_CHECKSUM=0], rank 1 has [BAGUA_CHECKSUM=1]" in message
