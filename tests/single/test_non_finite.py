"""Lanes count exactly the rounds whose result holds NaN or infinity."""

import math

import torch
from bagua import _C
from support.cases import over
from support.threads.engine_ranks import Meeting
from support.threads.op_ranks import BAD_VALUES, COMPLEX, DTYPES, per_dtype

STRETCH = 16384  # elements that are looked at before the answer is


def counted(flats, operation):
    """Counts of the lane of one rank after a round for each of `flats`."""
    meeting = Meeting(1)
    lane = _C.DynamicLane(
        name="Net",
        incarnation=1,
        ops=[meeting.connect(meeting.lanes[0], 0)],
        control=meeting.connect(meeting.control, 0),
    )
    operations = _C.BucketOperations("0", "an operation", [operation])
    for number, flat in enumerate(flats, start=1):
        lane.post(operations, flat, round=number).wait()
    (bucket,) = lane.stats()["buckets"]
    lane.stop()
    return bucket["nonfinite_rounds"]


@over(dtype=[*DTYPES.values(), *COMPLEX], bad=BAD_VALUES.values())
def test_one_bad_element_anywhere_is_a_bad_round(dtype, bad):
    for numel in (1, 31, STRETCH, STRETCH + 5):
        flat = torch.zeros(numel, dtype=dtype)
        assert _C.all_finite(flat)
        for place in {0, numel // 2, numel - 1, min(STRETCH, numel - 1)}:
            changed = flat.clone()
            changed[place] = complex(0.0, bad) if dtype.is_complex else bad
            assert not _C.all_finite(changed), (numel, place)


@per_dtype
def test_no_finite_number_is_taken_for_a_bad_one(dtype):
    limits = torch.finfo(dtype)
    numbers = [0.0, -0.0, limits.max, limits.min, limits.tiny, limits.tiny / 4, 1.0, -1.0]
    assert _C.all_finite(torch.tensor(numbers, dtype=dtype).repeat(100))
    assert _C.all_finite(torch.empty(0, dtype=dtype))


@over(dtype=[torch.float16, torch.bfloat16])
def test_every_pattern_of_sixteen_bits_is_classified_correctly(dtype):
    everything = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    finite = everything[everything.isfinite()]
    assert _C.all_finite(finite)
    for bad in everything[~everything.isfinite()][::7]:
        assert not _C.all_finite(torch.cat([finite[:50], bad.view(1)]))


def test_integers_are_finite():
    assert _C.all_finite(torch.tensor([2**31 - 1, -1], dtype=torch.int32))


def test_where_the_result_is_elsewhere_it_is_looked_at_there():
    good, bad = torch.ones(3), torch.tensor([1.0, math.nan, 1.0])
    for flat, result, expected in ((good, bad, 1), (bad, good, 0)):
        peer = torch.zeros(3)
        averaging = _C.PythonOp(lambda _, peer=peer, result=result: peer.copy_(result))
        operation = _C.AverageWeights(peer, torch.zeros((), dtype=torch.int64), averaging)
        assert counted([flat], operation) == expected
        assert counted([flat], _C.Sampled(operation)) == expected


def test_a_bad_round_is_counted_once():
    alone = _C.ThreadCommunicator(_C.ThreadHub(1, 1.0), 0)
    values = (1.0, math.nan, 2.0, math.inf)
    flats = [torch.tensor([value]) for value in values]
    assert counted(flats, _C.AllReduce(alone, _C.ReduceOp.SUM)) == 2
