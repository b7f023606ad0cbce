"""8-bit and cast gradients: the bits of the oracle's compressed mean, on every rank, every step."""

import copy

import pytest
import torch
import torch.distributed as dist
from bagua import _C
from oracle import codec as oracle
from oracle.compressed_all_reduce import compressed_all_reduce
from support import training

CODECS = _C.codec_names()


def flat_gradients(bucket, gradients):
    """A bucket's memory when these are the gradients by name, padding included."""
    flat = torch.zeros_like(bucket.backend_tensor)
    parts = [gradients[tensor.bagua_tensor_name].reshape(-1) for tensor in bucket.tensors]
    values = torch.cat(parts)
    flat[: values.numel()] = values
    return flat


@training.with_group
def train_as_the_oracle(codec, average, do_flatten, hidden):
    size = dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(training.FEATURES, hidden),
        torch.nn.Tanh(),
        torch.nn.Linear(hidden, training.OUTPUTS),
    )
    optimizer = training.sgd(model)
    chosen = training.algorithm(codec, average)
    model.with_bagua([optimizer], chosen, None, do_flatten)
    for step in range(3):
        by_rank = [
            training.local_gradients(model, training.squared_error, training.batch(step, rank))
            for rank in range(size)
        ]
        training.train(model, optimizer, [training.batch(step, dist.get_rank())])
        training.assert_ranks_agree(model)
        gradients = {name: p.grad for name, p in model.named_parameters()}
        for bucket in model.bagua_buckets:
            inputs = [flat_gradients(bucket, gradients_of_rank) for gradients_of_rank in by_rank]
            expected = compressed_all_reduce(codec, inputs, average)
            numel = sum(tensor.numel() for tensor in bucket.tensors)  # without padding
            found = flat_gradients(bucket, gradients)
            assert torch.equal(found[:numel], expected[:numel]), bucket.name
    return training.model_bits(model), len(model.bagua_buckets)


#: Every codec's bits: tests/single/test_ops.py.
CASES = [(2, "bit2_block", 4), (3, "block_uint8", 1), (3, "minmax_uint8", 4), (4, "fp16", 4)]


@pytest.mark.parametrize(("size", "codec", "buckets"), CASES)
def test_compressed_gradients_have_the_bits_of_the_oracle(ranks, size, codec, buckets):
    env = {} if buckets == 1 else training.SMALL_BUCKETS
    results = ranks(size, train_as_the_oracle, codec, True, True, 7, env=env)
    assert len(set(results)) == 1
    assert results[0][1] == buckets


@pytest.mark.parametrize("codec", CODECS)
def test_parts_of_several_blocks_have_the_bits_of_the_oracle(ranks, codec):
    results = ranks(3, train_as_the_oracle, codec, False, True, 1501)
    assert len(set(results)) == 1


@pytest.mark.parametrize("env", [{}, training.SMALL_BUCKETS], ids=["one_bucket", "small_buckets"])
def test_compressed_training_without_flattening_and_a_second_run_give_the_same_bits(ranks, env):
    first = ranks(3, train_as_the_oracle, "block_uint8", True, True, 33, env=env)
    assert first == ranks(3, train_as_the_oracle, "block_uint8", True, True, 33, env=env)
    assert first == ranks(3, train_as_the_oracle, "block_uint8", True, False, 33, env=env)


@training.with_group
def train_beside_the_exact_oracle(codec):
    model = training.network()
    alone = copy.deepcopy(model)
    optimizer = training.sgd(model)
    model.with_bagua([optimizer], training.algorithm(codec))
    training.train_on_ranks(model, optimizer, steps=20)
    training.train_alone(alone, training.sgd(alone), steps=20)
    data = training.whole_batch(0, dist.get_world_size())
    with torch.no_grad():
        return [training.squared_error(m.eval(), data).item() for m in (model, alone)]


@pytest.mark.parametrize("codec", CODECS)
def test_compressed_training_reaches_the_loss_of_exact_training(ranks, codec):
    for compressed, exact in ranks(3, train_beside_the_exact_oracle, codec):
        rel = max(0.02, oracle.CODECS[codec].error)
        assert compressed == pytest.approx(exact, rel=rel)


#: A number, and where it is: in the first element, the last of a rank's part, a block, the last.
BAD = [(float(bad), at) for bad in ("nan", "inf", "-inf") for at in (0, 1364, 2048, 4094)]


@training.with_group
def bad_gradients(codec):
    """By step, every other of which has a bad number on rank 1: whether all gradients are finite,
    and how many ranks hold other ones."""
    model = torch.nn.Linear(65, 63, bias=False)
    model.with_bagua([], training.algorithm(codec))
    found = []
    for bad, position in BAD:
        for value in (bad, 1.0):
            model.zero_grad()
            gradient = torch.ones(63, 65)
            if dist.get_rank() == 1:
                gradient.view(-1)[position] = value
            ((model.weight * gradient).sum() + model(torch.zeros(1, 65)).sum()).backward()
            finite = model.weight.grad.isfinite()
            found.append((bool(finite.all()), len(set(training.gather(training.bits([finite]))))))
    return found


@pytest.mark.parametrize("codec", ["exact", *CODECS])
def test_a_bad_gradient_on_one_rank_is_seen_by_all_for_one_step(ranks, codec):
    assert ranks(3, bad_gradients, codec) == [[(False, 1), (True, 1)] * len(BAD)] * 3


@training.with_group
def bytes_of_a_step(codec):
    model = torch.nn.Linear(1000, 60)
    model.with_bagua([], training.algorithm(codec))
    model(torch.ones(1, 1000)).sum().backward()
    return model.bagua_stats()["total"]["bytes_sent"]


def test_a_codec_sends_little_more_than_its_bits_of_the_exact_bytes(ranks):
    exact = ranks(3, bytes_of_a_step, "exact")
    for codec in CODECS:
        # The weight and the bias are a bucket; parts of a third. Each of four messages has a frame.
        part = 60060 // 3
        share = (oracle.payload_bytes(codec, torch.float32, part) + 32) / (4 * part)
        for compressed, plain in zip(ranks(3, bytes_of_a_step, codec), exact, strict=True):
            assert compressed / plain == pytest.approx(share, rel=0.01)
