"""Parts of AutoAlgorithm that need no other rank: rules of the choice, errors, and the watch."""

import math
from unittest import mock

import pytest
import torch
from bagua import _C
from bagua._foresight.candidate import Candidate
from bagua._foresight.profile import BucketProfile, Link, Profile
from bagua.torch_api.algorithms.auto import agreed, trials
from bagua.torch_api.algorithms.auto.candidates import default_candidates, loss_of
from bagua.torch_api.algorithms.auto.choice import Row, best_of, finalists
from bagua.torch_api.algorithms.auto.probe.errors import error_of
from bagua.torch_api.algorithms.auto.probe.links import Links
from bagua.torch_api.algorithms.auto.probe.steps import StepTimes
from bagua.torch_api.algorithms.auto.sizes import other_size
from bagua.torch_api.algorithms.auto.watching import Watching, changed, renewed

EXACT, EIGHT, FOUR = Candidate("exact"), Candidate("eight"), Candidate("four")
ERRORS = {EXACT: 0.0, EIGHT: 0.01, FOUR: 0.1}


def row(candidate, predicted, measured=None, refusal="", busy=0.0):
    return Row(candidate, predicted, 0, ERRORS[candidate], refusal, measured, busy)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([row(EXACT, 1.0), row(EIGHT, 0.98), row(FOUR, 0.99)], EXACT),
        ([row(EXACT, 1.0), row(EIGHT, 0.9), row(FOUR, 0.89)], EIGHT),
        ([row(EXACT, 1.0), row(EIGHT, 0.9), row(FOUR, 0.8)], FOUR),
        ([row(EXACT, 1.0), row(EIGHT, 0.9), row(FOUR, 0.8, refusal="error")], EIGHT),
        ([row(EXACT, 1.0, 0.5), row(EIGHT, 0.6, 0.7), row(FOUR, 0.1)], EXACT),
        ([row(EXACT, 1.0, refusal="no"), row(EIGHT, 0.6, refusal="no")], EXACT),
        ([row(EXACT, 1.0, math.inf), row(EIGHT, 0.6, math.inf)], EXACT),
    ],
)
def test_the_fastest_is_taken_and_within_three_percent_what_loses_least(rows, expected):
    assert best_of(rows).candidate == expected


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([row(EXACT, 1.0), row(EIGHT, 0.99), row(FOUR, 1.1)], [EXACT]),
        ([row(EXACT, 1.0), row(EIGHT, 0.9), row(FOUR, 0.95)], [EXACT, EIGHT, FOUR]),
        ([row(EXACT, 9.0), row(EIGHT, 0.9), row(FOUR, 0.95)], [EIGHT, FOUR]),
        ([row(EXACT, 9.0), row(EIGHT, 3.0), row(FOUR, 0.95)], [FOUR]),
        ([row(EXACT, 1.2), row(EIGHT, 1.3), row(FOUR, 0.95)], [EXACT, FOUR]),
        ([row(EXACT, 1.0, busy=0.2), row(EIGHT, 0.99), row(FOUR, 1.04)], [EXACT, EIGHT, FOUR]),
        ([row(EXACT, 1.0, busy=0.2), row(EIGHT, 1.06), row(FOUR, 1.1)], [EXACT]),
        ([row(EXACT, 1.0, busy=0.05), row(EIGHT, 1.01), row(FOUR, 1.04)], [EXACT]),
    ],
)
def test_candidates_close_to_the_best_are_tried_beside_exact_gradients(rows, expected):
    assert [one.candidate for one in finalists(rows)] == expected


def profile_of(numels, seconds=0.02, bandwidth=1e7):
    """Matrices of so many elements in one bucket, ready at the end of backward."""
    shapes = tuple((numel, 1) for numel in numels)
    bucket = BucketProfile(sum(numels), 4 * sum(numels), seconds, shapes)
    return Profile(2, (1, 1), seconds, 0.0, (bucket,), Link(1e-4, bandwidth))


EVEN, ONE_LARGE = [20_000] * 12, [400_000]


@pytest.mark.parametrize(
    ("numels", "candidate", "measured", "busy", "size"),
    [
        (EVEN, FOUR, 0.03, 0.012, 120_000),
        (EVEN, FOUR, 0.022, 0.012, None),  # hidden already
        (EVEN, FOUR, 0.03, 0.029, None),  # fills the step
        (EVEN, FOUR, None, 0.012, 120_000),  # not measured: predicted
        (EVEN, Candidate("four", {}, bucket_bytes=999), 0.03, 0.012, None),  # the user's size
        (EVEN, FOUR, math.inf, 0.012, None),
        (ONE_LARGE, FOUR, 0.03, 0.012, None),  # cannot be cut
        ([1000] * 40, FOUR, 0.03, 0.012, 64 * 1024),  # not into less
    ],
)
def test_smaller_buckets_are_worth_a_trial_where_communication_may_hide(
    numels, candidate, measured, busy, size
):
    row = Row(candidate, 0.03, 0, 0.1, "", measured, busy)
    found = other_size(profile_of(numels), row)
    assert found == (None if size is None else Candidate("four", {}, bucket_bytes=size))


@pytest.mark.parametrize(
    ("seconds", "most", "steps"),
    [((0.02, 0.02), 99, 34), ((0.05, 0.1), 99, 17), ((1.0, 2.0), 5, 4)],
)
def test_trials_take_turns_within_their_steps(seconds, most, steps):
    rows = [row(EIGHT, seconds[0]), row(FOUR, seconds[1])]
    with mock.patch.object(trials, "largest", lambda _, __, values: values):
        running = trials.Trials(None, rows, most)
        at_work = []
        while not running.done:
            assert len(at_work) < 100
            at_work.append(running.at_work)
            running.forward_begins()
            changes = running.round_ended()
            assert changes == (running.at_work != at_work[-1] or running.done)
    assert list(dict.fromkeys(at_work)) == [EIGHT, FOUR]
    assert running.rounds == len(at_work) == steps <= most
    assert all(0 < measured < 1 for measured in running.measured.values())
    assert list(running.measured) == [EIGHT, FOUR]


def test_nodes_of_several_ranks_have_hierarchical_candidates():
    (flat, refused), (several, _) = default_candidates((4,)), default_candidates((2, 2))
    assert set(flat) < set(several)
    assert [one.algorithm for one in refused] == ["power_sgd", "sparse"]
    forms = [one.arguments.get("hierarchical") for one in several if loss_of(one).key == ""]
    assert forms == [None, True, "sharded"]
    shares = [one for one in several if one.arguments.get("hierarchical") == "sharded"]
    assert not any(loss_of(one).feedback for one in shares), "residuals are of whole buckets"


def gradients():
    generator = torch.Generator().manual_seed(0)
    thin = torch.randn(64, 2, generator=generator) @ torch.randn(2, 96, generator=generator)
    return [torch.randn(3000, generator=generator), thin]


@pytest.mark.parametrize("name", _C.codec_names())
def test_the_error_of_a_codec_is_that_of_what_it_decodes(name):
    codec, lost, whole = _C.make_codec(name), 0.0, 0.0
    for gradient in gradients():
        flat = gradient.reshape(-1)
        decoded = codec.decode(codec.encode(flat), 1, flat.dtype, flat.numel()).reshape(-1)
        lost += (decoded - flat).double().square().sum()
        whole += flat.double().square().sum()
    assert error_of(name, gradients()) == pytest.approx(float((lost / whole) ** 0.5))


def test_the_error_of_sparse_and_low_rank_gradients_is_the_energy_that_is_left_out():
    vector, thin = gradients()
    largest = vector.abs().sort(descending=True).values[30:]
    expected = float(largest.square().sum() / vector.square().sum()) ** 0.5
    assert error_of("largest 0.01", [vector]) == pytest.approx(expected, rel=1e-4)
    assert error_of("random 0.25", [vector]) == pytest.approx(0.75**0.5)
    assert error_of("rank 2", [thin]) == pytest.approx(0.0, abs=1e-2)
    values = torch.linalg.svdvals(thin.double()).square()
    expected = float((values[1] / values.sum()) ** 0.5)
    assert error_of("rank 1", [thin]) == pytest.approx(expected, rel=0.1)
    assert error_of("rank 1", [vector]) == 0.0, "vectors are sent exactly"
    assert error_of("int4_block", []) == 0.0


def alone(size=1):
    """Connections of a group whose other ranks have the same numbers."""
    connections = mock.Mock(size=size)
    connections.reduce_numbers = lambda what, op, *numbers: [
        number * (size if op == _C.ReduceOp.SUM else 1) for number in numbers
    ]
    return connections


def test_agreed_numbers_keep_their_bits_and_nan_counts_as_infinity():
    values = [0.0, 1e-300, 0.1, 3e10, math.inf, math.nan, -1.0]
    assert agreed.largest(alone(), "", values) == [0.0, 1e-300, 0.1, 3e10, math.inf, math.inf, 0.0]
    assert agreed.mean(alone(3), "", [0.25, 1e-6]) == pytest.approx([0.25, 1e-6])


def windows(watching, rates):
    """Whether each window, of so many bytes in a second, is an alarm."""
    sent, alarms = 0, []
    for number, rate in enumerate(rates):
        sent += rate
        for _ in range(watching.rounds_per_window - 1):
            assert not watching.needs_stats()
        assert watching.needs_stats()
        alarms.append(watching.round_ended({"bytes_sent": sent, "wire_ns": number * 10**9}))
    return alarms


@pytest.mark.parametrize("factor", [3, 1 / 3])
def test_a_wire_that_differs_by_half_for_three_windows_is_an_alarm(factor):
    watching = Watching(alone(), step_seconds=0.1)
    assert watching.rounds_per_window == 20
    other = int(900 * factor)
    rates = [900] * 4 + [other] * 2 + [900] * 2 + [other] * 3
    assert windows(watching, rates) == [False] * 10 + [True]
    watching.begin_anew(false_alarm=True)
    assert watching.rounds_per_window == 40
    assert not any(windows(watching, [other] * 6)), "it is the new reference"


def test_links_are_renewed_in_proportion_to_their_messages():
    link, buckets = Link(1e-4, 1e6, messages=2e6), (BucketProfile(1, 4, 0.0),)
    profile = Profile(2, (2,), 0.1, 0.0, buckets, link)
    same, slower = Links(Link(1e-4, 2.2e6), None), Links(Link(1e-3, 5e5), None)
    assert not changed(profile, same)
    assert changed(profile, slower)
    between = renewed(profile, slower).between
    assert (between.bandwidth, between.messages, between.latency) == (2.5e5, 5e5, 1e-3)


def test_times_of_steps_leave_out_what_is_asked_and_what_is_blocked():
    now = [0.0]
    with mock.patch("time.perf_counter", side_effect=lambda: now[0]):
        times = StepTimes()
        times.restart(leave_out=1)
        for _ in range(4):
            times.forward_begins()
            times.forward_begins()  # a second forward of the step
            now[0] += 5.0
            times.backward_ended(2.0)
            now[0] += 1.0
    assert times.whole() == 6.0
    assert times.compute() == (3.0, 1.0)
    assert times.steps == 3
