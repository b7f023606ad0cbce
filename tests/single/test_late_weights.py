"""Weights of ranks that may miss rounds."""

from bagua._outer.late import LateWeights
from bagua._outer.strategies import RankWeights, SampleWeights


def trained(weights, steps):
    for _ in range(steps):
        weights.count(8)
        weights.step()


def test_a_change_is_of_as_many_intervals_as_steps_since_it_counted_took():
    weights = LateWeights(SampleWeights(2), 2, 4)
    trained(weights, 4)
    assert (weights.launch(0, ""), weights.intervals(0)) == (32, 1.0)
    trained(weights, 2)  # while that round is under way, which goes on without it
    trained(weights, 4)
    assert (weights.launch(0, ""), weights.intervals(0)) == (80, 2.5)
    trained(weights, 1)
    weights.settle(0)
    trained(weights, 1)  # an early round, as of sync()
    assert (weights.launch(0, ""), weights.intervals(0)) == (16, 1.0)
    assert (weights.launch(1, ""), weights.intervals(1)) == (96, 3.0)
    weights.forget(1)
    assert (weights.launch(1, ""), weights.intervals(1)) == (0, 1.0)


def test_what_all_carry_over_a_failed_round_is_not_divided():
    weights = LateWeights(RankWeights(), 1, 4)
    trained(weights, 6)  # two of them more than the others
    weights.launch(0, "")
    weights.fail(0)
    trained(weights, 4)
    weights.launch(0, "")
    assert weights.intervals(0) == 1.5
    weights.settle(0)
    trained(weights, 4)
    weights.launch(0, "")
    weights.fail(0)
    weights.settle(0)  # the others had made it, and give it the anchor
    trained(weights, 6)
    weights.launch(0, "")
    assert weights.intervals(0) == 1.5


def test_weights_go_on_from_their_state():
    one, other = (LateWeights(SampleWeights(1), 1, 4) for _ in range(2))
    trained(one, 6)
    for (key, value), (same, into) in zip(one.named_state(), other.named_state(), strict=True):
        assert key == same
        into.copy_(value)
    assert (other.launch(0, ""), other.intervals(0)) == (48, 1.5)
