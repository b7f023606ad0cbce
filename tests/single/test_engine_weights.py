"""The sample of the weights in the agreement of each round: thread ranks that differ raise."""

import torch
from bagua import _C
from support.cases import over
from support.threads.engine_ranks import Meeting, calls, endings, mark_all, ones, plan, run_round


def weights_of(sizes):
    return [(f"w{i}", torch.arange(float(size))) for i, size in enumerate(sizes)]


def run_rounds(n, rounds, change, sizes=(6, 0, 5, 4), every=100, lanes=1):
    """(error, rounds done) of each rank; change(rank, round, tensors) goes before each round."""
    meeting = Meeting(n, lanes)
    done = [0] * n

    def run(rank):
        named = weights_of(sizes)
        buckets = [plan(str(i), ones(), 2, calls(lambda _: None)) for i in range(lanes)]
        sample = _C.WeightsSample(named, every)
        engine = meeting.engine(rank, buckets, weights=sample)
        for number in range(1, rounds + 1):
            options = change(rank, number, [tensor for _, tensor in named]) or {}
            engine.begin_round(**options)
            mark_all(engine)
            engine.wait()
            done[rank] = number

    errors = [error for error, _ in endings(n, run)]
    return list(zip(errors, done, strict=True))


@over(culprit=[0, 1, 2])
def test_one_bit_on_one_rank_is_found_in_the_next_round_on_all_ranks(culprit):
    def change(rank, number, tensors):
        if rank == culprit and number == 4:
            tensors[2][3] = torch.nextafter(tensors[2][3], torch.tensor(9.0))

    camps = {
        0: "rank 0 against ranks 1, 2",
        1: "ranks 0, 2 against rank 1",
        2: "ranks 0, 1 against rank 2",
    }[culprit]
    for rank, (error, done) in enumerate(run_rounds(3, 9, change)):
        assert isinstance(error, _C.BaguaMismatchError)
        message = str(error)
        start = f"module 'Net', rank {rank} of 3, round 4: ranks hold different weights at the "
        assert message.startswith(start)
        assert message.count("ranks hold different weights") == 1
        assert f"at the start of round 4. First difference: 'w2' ({camps}). Since" in message
        assert "Since these were compared last, 1 round(s) before, something" in message
        assert "BAGUA_CHECK_WEIGHTS_EVERY=0" in message
        assert done == 3


def test_each_version_is_named_and_how_many_weights_differ_too():
    def change(rank, number, tensors):
        tensors[0] += rank // 2
        tensors[3][0] = rank

    for error, done in run_rounds(4, 2, change):
        assert "First difference: 'w0' (ranks 0, 1 against ranks 2, 3); 1 more of 3 differ too" in (
            str(error)
        )
        assert done == 0


def test_a_rank_that_does_not_take_part_ends_no_round_and_hides_nothing():
    def change(rank, number, tensors):
        if rank == 1 and number == 2:
            tensors[0] += 1
        return {"has_inputs": rank != 1 or number != 2}

    for error, done in run_rounds(3, 5, change):
        assert "round 3: ranks hold different weights" in str(error)
        assert done == 2


def moved_for_a_forward(early_is_equal):
    """Errors of two ranks of which one moves its weights between a first forward and the round."""
    meeting = Meeting(2)

    def run(rank):
        named = weights_of([5])
        engine = meeting.engine(rank, [plan("b", ones())], weights=_C.WeightsSample(named, 1))
        for number in range(4):
            if number == 2 and not early_is_equal:
                named[0][1].add_(rank)
            engine.note_forward()
            if number == 2 and early_is_equal:
                named[0][1].add_(rank)
            engine.begin_round()
            engine.note_forward()  # inside a round nothing is noted
            mark_all(engine)
            engine.wait()
            if number == 2:
                named[0][1].sub_(rank)

    return [error for error, _ in endings(2, run)]


def test_weights_that_differ_for_the_time_of_a_forward_only_have_not_drifted_apart():
    assert moved_for_a_forward(early_is_equal=True) == [None] * 2
    for error in moved_for_a_forward(early_is_equal=False):
        assert "round 3: ranks hold different weights" in str(error)


def test_equal_weights_are_never_found_different():
    def change(rank, number, tensors):
        for tensor in tensors:
            tensor.mul_(0.99).add_(number)

    for n, lanes in ((1, 1), (2, 1), (3, 2)):
        assert run_rounds(n, 50, change, (3000, 17), 7, lanes) == [(None, 50)] * n


def test_another_plan_is_reported_before_other_weights():
    meeting = Meeting(2)

    def run(rank):
        sample = _C.WeightsSample([("w", torch.full((3,), float(rank)))], 1)
        run_round(meeting.engine(rank, [plan("b", ones())], fingerprint=rank, weights=sample))

    for error, _ in endings(2, run):
        assert "ranks differ in the bucket plan" in str(error)
