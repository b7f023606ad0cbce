"""8-bit and cast gradients: the bits of the oracle's compressed mean, on every rank, every step."""

import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import ByteGradAlgorithm
from support import training
from support.cases import over
from support.error_feedback import Means

COMPRESSED = "CompressedAllReduce"


@training.with_group
def train_as_the_oracle(codec, average, do_flatten, hidden, error_feedback=False):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(training.FEATURES, hidden),
        torch.nn.Tanh(),
        torch.nn.Linear(hidden, training.OUTPUTS),
    )
    optimizer = training.sgd(model, lr=0.02)
    chosen = ByteGradAlgorithm(False, average, codec=codec, error_feedback=error_feedback)
    model.with_bagua([optimizer], chosen, None, do_flatten)
    means = Means(codec, average, error_feedback)
    for step in range(3):  # the third has residuals of residuals
        by_rank = [
            training.local_gradients(model, training.squared_error, training.batch(step, rank))
            for rank in range(dist.get_world_size())
        ]
        training.train(model, optimizer, [training.batch(step, dist.get_rank())])
        training.assert_ranks_agree(model)
        for bucket in model.bagua_buckets:
            if bucket.ops[0].name != COMPRESSED:  # tests/ranks/test_small_buckets.py
                continue
            for name, mean in means.of(bucket, by_rank).items():
                assert torch.equal(model.get_parameter(name).grad, mean), (step, name)
    buckets = model.bagua_buckets
    exact = tuple(bucket.numel() for bucket in buckets if bucket.ops[0].name != COMPRESSED)
    return training.model_bits(model), len(buckets), exact


#: Every codec's bits: tests/single/test_ops.py. Ranks, codec, whether averages, error feedback.
CASES = [
    (2, "bit2_block", True, False),
    (3, "minmax_uint8", True, False),
    (4, "fp16", True, False),
    (2, "int4_block", True, True),
    (2, "minmax_uint8", False, True),
    (3, "bit2_block", False, True),
    (3, "block_uint8", True, True),
    (4, "bit2_block", True, True),
]


@over(case=CASES)
def test_compressed_gradients_have_the_bits_of_the_oracle(ranks, case):
    size, codec, average, error_feedback = case
    arguments = (codec, average, True, 61, error_feedback)
    results = ranks(size, train_as_the_oracle, *arguments, env=training.SMALL_BUCKETS)
    exact = () if error_feedback and not average else (3, 61)  # biases
    assert set(results) == {(results[0][0], 4, exact)}


@over(env=[{}, training.SMALL_BUCKETS])
def test_compressed_training_without_flattening_and_a_second_run_give_the_same_bits(ranks, env):
    first = ranks(3, train_as_the_oracle, "block_uint8", True, True, 33, env=env)
    assert first == ranks(3, train_as_the_oracle, "block_uint8", True, True, 33, env=env)
    assert first == ranks(3, train_as_the_oracle, "block_uint8", True, False, 33, env=env)
