"""CountNonFinite: exactly the rounds whose result holds NaN or infinity."""

import math

import torch
from bagua import _C
from support.cases import over
from support.threads.op_ranks import BAD_VALUES, COMPLEX, DTYPES, per_dtype

STRETCH = 16384  # elements that are looked at before the answer is


def nothing(_):
    pass


def counted(flat, result=None):
    rounds = _C.NonFiniteRounds()
    _C.CountNonFinite(_C.PythonOp(nothing), rounds, result).run(flat)
    return rounds.count


@over(dtype=[*DTYPES.values(), *COMPLEX], bad=BAD_VALUES.values())
def test_one_bad_element_anywhere_is_a_bad_round(dtype, bad):
    for numel in (1, 31, STRETCH, STRETCH + 5):
        flat = torch.zeros(numel, dtype=dtype)
        assert counted(flat) == 0
        for place in {0, numel // 2, numel - 1, min(STRETCH, numel - 1)}:
            changed = flat.clone()
            changed[place] = complex(0.0, bad) if dtype.is_complex else bad
            assert counted(changed) == 1, (numel, place)


@per_dtype
def test_no_finite_number_is_taken_for_a_bad_one(dtype):
    limits = torch.finfo(dtype)
    numbers = [0.0, -0.0, limits.max, limits.min, limits.tiny, limits.tiny / 4, 1.0, -1.0]
    assert counted(torch.tensor(numbers, dtype=dtype).repeat(100)) == 0
    assert counted(torch.empty(0, dtype=dtype)) == 0


@over(dtype=[torch.float16, torch.bfloat16])
def test_every_pattern_of_sixteen_bits_is_classified_correctly(dtype):
    everything = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    finite = everything[everything.isfinite()]
    assert counted(finite) == 0
    for bad in everything[~everything.isfinite()][::7]:
        assert counted(torch.cat([finite[:50], bad.view(1)])) == 1


def test_integers_are_finite():
    assert counted(torch.tensor([2**31 - 1, -1], dtype=torch.int32)) == 0


def test_where_the_result_is_elsewhere_it_is_looked_at_there():
    good, bad = torch.ones(3), torch.tensor([1.0, math.nan, 1.0])
    assert counted(good, bad) == 1
    assert counted(bad, good) == 0


def test_rounds_are_counted_and_the_op_is_seen_as_itself():
    rounds = _C.NonFiniteRounds()
    alone = _C.ThreadCommunicator(_C.ThreadHub(1, 1.0), 0)
    inner = _C.AllReduce(alone, _C.ReduceOp.SUM)
    op = _C.CountNonFinite(inner, rounds)
    assert op.describe() == inner.describe()
    for value in (1.0, math.nan, 2.0, math.inf):
        op.run(torch.tensor([value]))
    assert rounds.count == 2
