"""SparseLoCoAlgorithm on ranks: bits of the oracle, bytes, checkpoints, refusals."""

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import Algorithm, SparseLoCoAlgorithm
from oracle import chunked_sparse as oracle
from ranks.test_bytegrad_feedback import flat_of
from ranks.test_diloco import adamw, assert_outer_state_agrees, own_step
from support import training
from torch import nn

INTERVAL = 2
K, DECAY, LR = 64, 0.9, 0.5


def wrapped(dtype=torch.float32, seed=0, **arguments):
    """A network of two chunks, its optimizer, and its weights when it last had stepped."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(training.FEATURES, 700), nn.Tanh())
    model.append(nn.Linear(700, training.OUTPUTS)).to(dtype)
    optimizer = adamw(model)
    trained = training.weights_after_steps(model, optimizer)
    model.with_bagua([optimizer], SparseLoCoAlgorithm(LR, INTERVAL, decay=DECAY, **arguments))
    return model, optimizer, trained


@training.with_group
def train_as_the_oracle(dtype):
    size = dist.get_world_size()
    model, optimizer, trained = wrapped(dtype)
    anchors = {name: p.detach().clone() for name, p in model.named_parameters()}
    errors = {}
    for step in range(3 * INTERVAL):
        own_step(model, optimizer, step, dtype)
        if (step + 1) % INTERVAL:
            continue
        assert_outer_state_agrees(model)
        by_rank = training.gather({name: anchors[name] - x for name, x in trained.items()})
        weights = {name: p.detach() for name, p in model.named_parameters()}
        for bucket in model.bagua_buckets:
            anchor, padding = flat_of(bucket, anchors)
            used = anchor.numel() - padding
            brought = [flat_of(bucket, deltas)[0][:used] for deltas in by_rank]
            errors.setdefault(bucket.name, [torch.zeros(used)] * size)
            mean, errors[bucket.name] = oracle.mean(brought, errors[bucket.name], K, DECAY)
            expected = anchor[:used] - mean * LR
            assert torch.equal(flat_of(bucket, weights)[0][:used], expected), step
        anchors = {name: p.clone() for name, p in weights.items()}
    return training.bits(model.parameters())


@pytest.mark.parametrize("size", [2, 3, 4], ids=lambda n: f"{n}_ranks")
def test_anchors_have_the_bits_of_the_oracle(ranks, size):
    assert len(set(ranks(size, train_as_the_oracle, torch.float32))) == 1


@training.with_group
def train_in(dtype):
    model, optimizer, _ = wrapped(dtype)
    for step in range(2 * INTERVAL):
        own_step(model, optimizer, step, dtype)
        assert_outer_state_agrees(model)
    state = model.bagua_algorithm.state_dict()
    rank = dist.get_rank()
    return [str(value.dtype) for key, value in state.items() if key.startswith(f"rank{rank}/error")]


@pytest.mark.parametrize(
    ("dtype", "kept"), [(torch.float64, "float64"), (torch.bfloat16, "float32")], ids=str
)
def test_residuals_are_of_at_least_f32(ranks, dtype, kept):
    for dtypes in ranks(2, train_in, dtype):
        assert dtypes == [f"torch.{kept}"] * 4


@training.with_group
def count_bytes():
    torch.manual_seed(0)
    model = nn.Linear(1000, 500)
    optimizer = adamw(model)
    model.with_bagua([optimizer], SparseLoCoAlgorithm(interval=1))
    model(torch.randn(2, 1000)).square().mean().backward()
    optimizer.step()
    numel = sum(p.numel() for p in model.parameters())
    return model.bagua_stats()["total"]["bytes_sent"], 4 * numel


@pytest.mark.parametrize("size", [2, 3], ids=lambda n: f"{n}_ranks")
def test_an_exchange_sends_a_130th_of_the_weights_and_less(ranks, size):
    for sent, whole in ranks(size, count_bytes):
        assert 130 * sent <= (size - 1) * whole
        assert sent * 142 > (size - 1) * whole, "something is sent"


@training.with_group
def fragments_in_turn():
    """Rounds that changed an anchor, with two fragments."""
    model, optimizer, _ = wrapped(fragments=[["0"], ["2"]])
    for step in range(3 * INTERVAL):
        own_step(model, optimizer, step)
        assert_outer_state_agrees(model)
    return model.bagua_algorithm.outer_rounds


def test_fragments_are_sent_in_turn(ranks):
    assert ranks(2, fragments_in_turn) == [6, 6]


@training.with_group
def save():
    model, optimizer, _ = wrapped()
    for step in range(2 * INTERVAL):
        own_step(model, optimizer, step)
    return model.bagua_algorithm.state_dict()


@training.with_group
def load(state):
    model, optimizer, _ = wrapped()
    model.bagua_algorithm.load_state_dict(state)
    found = model.bagua_algorithm.state_dict()
    for step in range(INTERVAL):
        own_step(model, optimizer, step)
    assert_outer_state_agrees(model)
    return found


def test_other_numbers_of_ranks_start_from_the_mean_residual(ranks):
    states = ranks(2, save)
    merged = states[0] | states[1]
    for size in (1, 3):
        for rank, found in enumerate(ranks(size, load, merged)):
            for key in (key for key in states[0] if "/error/" in key):
                name = key.removeprefix("rank0/")
                mean = (merged[key] + merged[f"rank1/{name}"]) / 2
                assert mean.any()
                assert torch.equal(found[f"rank{rank}/{name}"], mean)
    with pytest.raises(Exception, match=r"rank1/error/.*merge what all ranks saved"):
        ranks(3, load, states[0])


@pytest.mark.filterwarnings("ignore:.*outer round is not finite")
def test_a_round_that_is_not_finite_keeps_residuals(ranks):
    assert ranks(2, with_nan) == [(True, 1)] * 2


@training.with_group
def with_nan():
    model, optimizer, _ = wrapped()
    for step in range(INTERVAL):
        own_step(model, optimizer, step)
    before = bits_of_residuals(model)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model[0].weight[3, 2] = float("nan")
    for step in range(INTERVAL, 2 * INTERVAL):
        own_step(model, optimizer, step)
    kept = bits_of_residuals(model) == before
    for step in range(2 * INTERVAL, 3 * INTERVAL):
        own_step(model, optimizer, step)
    assert_outer_state_agrees(model)
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    return kept, model.bagua_stats()["outer"]["skipped_rounds"]


def bits_of_residuals(model):
    state = model.bagua_algorithm.state_dict()
    return training.bits(state[key] for key in sorted(state) if "/error/" in key)


def test_it_is_registered_with_the_documented_defaults():
    made = Algorithm.init("sparse_loco")
    assert isinstance(made, SparseLoCoAlgorithm)
    assert (made.outer_lr, made.interval, made.ratio, made.decay) == (1.0, 30, 1 / 64, 0.95)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"ratio": 0.0}, "ratio=0.0 must be above 0"),
        ({"decay": 1.1}, "decay=1.1 must be from 0 to 1"),
        ({"outer_lr": -1.0}, "lr=-1.0 must be positive"),
        ({"overlap_steps": 30}, "overlap_steps=30 must be below 30"),
    ],
    ids=str,
)
def test_arguments_out_of_their_range_are_refused_by_name(arguments, text):
    with pytest.raises(ValueError, match=text):
        SparseLoCoAlgorithm(**arguments)


def test_weights_on_a_device_are_refused_with_the_remedy(ranks):
    for error in ranks(1, on_a_device):
        assert "parameter 'weight' is on meta" in error
        assert 'DiLoCoAlgorithm(codec="bit2_block")' in error


@training.with_group
def on_a_device():
    model = nn.Linear(2, 2, device="meta")
    return training.error_of(lambda: model.with_bagua([adamw(model)], SparseLoCoAlgorithm()))
