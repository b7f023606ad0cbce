"""Shares of ranks in DiLoCo's rounds: weights by samples, and the guard against unusual norms."""

import warnings

import pytest
import torch
import torch.distributed as dist
from bagua._sync.outer.shares import Shares
from bagua.torch_api.algorithms import DiLoCoAlgorithm, OuterSGD
from ranks.test_diloco import assert_outer_state_agrees, own_step
from support import training


def wrapped(dtype=torch.float32, interval=1, **arguments):
    model = training.network().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rule = OuterSGD(1.0, 0.0)
    model.with_bagua([optimizer], DiLoCoAlgorithm(rule, interval, **arguments))
    return model, optimizer


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@training.with_group
def weighted(samples, codec):
    """The anchor after a round, and the mean of the ranks' weights with weights samples²."""
    model, optimizer = wrapped(torch.float64, codec=codec, weight="samples")
    before = flat(model)
    model.bagua_algorithm.count_samples(samples[dist.get_rank()])
    optimizer.zero_grad()
    batch = tuple(t.double() for t in training.batch(0, dist.get_rank()))
    training.squared_error(model, batch).backward()
    trained = before - 0.1 * torch.cat([p.grad.flatten() for p in model.parameters()])
    optimizer.step()
    assert_outer_state_agrees(model)
    shares = torch.tensor([float(n) ** 2 for n in samples], dtype=torch.float64)
    everyone = torch.stack(training.gather(trained))
    return flat(model), (shares[:, None] * everyone).sum(0) / shares.sum()


@pytest.mark.parametrize("samples", [(2, 1, 1), (100, 50, 0), (7, 7, 7, 5)], ids=str)
def test_the_mean_is_weighted_by_the_squares_of_samples(ranks, samples):
    for found, expected in ranks(len(samples), weighted, samples, None):
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


@training.with_group
def equal_weights(weight, samples):
    model, optimizer = wrapped(interval=2, codec="int4_block", weight=weight)
    for step in range(6):
        model.bagua_algorithm.count_samples(samples)
        own_step(model, optimizer, step)
    return training.bits(model.parameters())


def test_equal_weights_have_the_bits_of_the_plain_mean(ranks):
    assert ranks(3, equal_weights, "samples", 12) == ranks(3, equal_weights, "ranks", 0)


@training.with_group
def nobody_counts():
    model, optimizer = wrapped(weight="samples")
    return training.error_of(lambda: own_step(model, optimizer, 0))


def test_samples_that_nobody_counts_are_an_error_with_the_remedy(ranks):
    for error in ranks(2, nobody_counts):
        assert "no rank has counted any" in error
        assert "count_samples()" in error


@training.with_group
def one_is_not_finite(overlap, codec):
    """Four rounds, with NaN in the weights of rank 1 in the second, and of all in the third."""
    arguments = {"overlap_steps": overlap, "codec": codec, "guard": True}
    model, optimizer = wrapped(interval=2, **arguments)
    seen = []
    for cycle in range(4):
        broken = {1: [1], 2: [0, 1, 2]}.get(cycle, [])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            own_step(model, optimizer, 2 * cycle)  # of streams: the last launch arrives
            if dist.get_rank() in broken:
                with torch.no_grad():
                    model[0].weight[0, 0] = float("nan")
            own_step(model, optimizer, 2 * cycle + 1)
        assert_outer_state_agrees(model)
        outer = model.bagua_stats()["outer"]
        texts = " ".join(str(w.message) for w in caught)
        seen.append((outer["left_out"], outer["skipped_rounds"], "are left out" in texts))
    model.bagua_algorithm.sync()
    assert bool(flat(model).isfinite().all())
    return seen, training.bits(model.parameters())


@pytest.mark.parametrize(
    ("overlap", "codec"), [(0, None), (1, "int4_block")], ids=["exact", "streamed-int4"]
)
def test_ranks_that_are_not_finite_are_left_out(ranks, overlap, codec):
    results = ranks(3, one_is_not_finite, overlap, codec)
    assert len({bits for _, bits in results}) == 1
    for seen, _ in results:
        assert [left_out for left_out, _, _ in seen] == [[], [1], [0, 1, 2], []]
        assert [warned for _, _, warned in seen] == [False, True, True, False]
        assert seen[-1][1] == 1, "the round that nobody took part in"


@training.with_group
def left_out_alone():
    """This rank's weights after a round without rank 1, and the mean of the others'."""
    model, optimizer = wrapped(guard=True)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model[0].weight.fill_(float("inf"))
    own_step(model, optimizer, 0)
    alone = training.network()
    of_alone = torch.optim.SGD(alone.parameters(), lr=0.1)
    training.squared_error(alone, training.batch(0, dist.get_rank())).backward()
    of_alone.step()
    first, _, third = training.gather(flat(alone))
    return flat(model), (first + third) / 2


@pytest.mark.filterwarnings("ignore:.*left out of an outer round")
def test_the_others_make_the_round_without_it(ranks):
    for found, expected in ranks(3, left_out_alone):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


class Launched:
    """A fragment, as far as Shares uses it."""

    part = 0

    def __init__(self, norm):
        self.own_norm = norm
        self.factor = None

    def scale(self, factor):
        self.factor = factor


class Alone:
    """Connections of one rank."""

    size, rank = 1, 0

    def gather_numbers(self, what, own):
        return [own]


@pytest.mark.filterwarnings("ignore:.*left out of an outer round")
def test_a_norm_is_unusual_after_the_warm_up():
    generator = torch.Generator().manual_seed(0)
    norms = (1 + 0.1 * torch.randn(200, generator=generator)).tolist()
    shares = Shares(Alone(), "model", 1, "ranks", guard=True)

    def left_out(norm):
        shares.weigh(launched := Launched(norm))
        assert (launched.factor == 1.0) != shares.all_left_out(0)
        return shares.here_left_out(0)

    assert not any(left_out(norm) for norm in [*norms[:60], 5.0, *norms[60:119]])
    usual = [left_out(norm) for norm in norms[119:]]
    assert sum(usual) <= 1
    assert left_out(100.0)
    assert left_out(100.0), "it has not become usual"
    assert left_out(float("nan"))
    assert not left_out(1.0)
    assert not left_out(0.0), "only large ones are unusual"


class Others:
    """Connections of rank 0 of three, of which the others answer 1."""

    size, rank = 3, 0

    def gather_numbers(self, what, own):
        return [own, 1, 1]


def test_a_weight_of_two_counts_as_two_ranks():
    shares = Shares(Others(), "model", 1, "steps", guard=False)
    shares.count_step()
    shares.count_step()
    shares.weigh(launched := Launched(1.0))
    assert launched.factor == 2 / (4 / 3), "its part in the mean of three is 2 of 4"
    shares.settle(0)
    shares.count_step()
    shares.weigh(launched := Launched(1.0))
    assert launched.factor == 1.0, "equal weights leave the bits as they are"


def test_samples_count_by_quantity_and_rate_where_steps_differ():
    shares = Shares(Others(), "model", 1, "samples", guard=False, uneven=True)
    for _ in range(4):
        shares.count_step()
        shares.count(3)
    shares.weigh(launched := Launched(1.0))
    rate = 12**2 / 4  # the others have 1 sample in 1 step
    assert launched.factor == pytest.approx(3 * rate / (rate + 2))


@training.with_group
def save_and_load():
    arguments = {"interval": 2, "overlap_steps": 1, "guard": True, "weight": "samples"}
    model, optimizer = wrapped(**arguments)
    other, of_other = wrapped(**arguments)
    for step in range(5):
        model.bagua_algorithm.count_samples(step + dist.get_rank())
        own_step(model, optimizer, step)
    other.load_state_dict(model.state_dict())
    of_other.load_state_dict(optimizer.state_dict())
    other.bagua_algorithm.load_state_dict(model.bagua_algorithm.state_dict())
    for step in range(5, 8):
        for trained, its in ((model, optimizer), (other, of_other)):
            trained.bagua_algorithm.count_samples(step + dist.get_rank())
            own_step(trained, its, step)
    return training.bits(model.parameters()), training.bits(other.parameters())


def test_counted_samples_are_saved(ranks):
    for went_on, loaded in ranks(2, save_and_load):
        assert went_on == loaded


def test_arguments_out_of_their_range_are_refused():
    with pytest.raises(ValueError, match='weight=\'tokens\' must be "ranks", "steps" or "samples"'):
        DiLoCoAlgorithm(weight="tokens")


@training.with_group
def count_nothing():
    model, _ = wrapped()
    model.bagua_algorithm.count_samples(3)
    return training.error_of(lambda: model.bagua_algorithm.count_samples(-1))


def test_numbers_of_samples_are_not_negative(ranks):
    assert "count_samples(-1)" in ranks(1, count_nothing)[0]
