"""Low-rank means: the oracle's values, equal bits on all ranks, zeros and bad values."""

import torch
from oracle import low_rank as oracle
from support.cases import over
from support.threads.low_rank_ranks import MATRICES, NUMEL, Rank, gradients
from support.threads.op_ranks import BAD_VALUES, assert_same_bits, bits, per_dtype
from support.threads.thread_ranks import run_thread_ranks


def part(flat, matrix):
    offset, rows, columns, _ = matrix
    return flat[offset : offset + rows * columns].view(rows, columns)


def rest(flat, matrices=MATRICES):
    keep = torch.ones(flat.numel(), dtype=torch.bool)
    for offset, rows, columns, _ in matrices:
        keep[offset : offset + rows * columns] = False
    return flat[keep]


def queries_of(flat, matrices=MATRICES):
    out, at = [], 0
    for _, _, columns, rank in matrices:
        out.append(flat[at : at + columns * rank].view(rank, columns).T)
        at += columns * rank
    return out


def train(n, brought, scale=1.0, **options):
    """Results and memories of all ranks after each step."""

    def run(comm):
        rank = Rank(comm, dtype=brought[0][0].dtype, **options)
        history = []
        for step, flat in enumerate(brought[comm.rank], start=1):
            result = rank.run(flat * scale, step, scale)
            history.append((result, *rank.remembered()))
        return history

    return run_thread_ranks(n, run)


@per_dtype
@over(n=[2, 3, 4, 7], scale=[1.0, 1024.0])
def test_rounds_follow_the_oracle_with_equal_bits_on_all_ranks(n, dtype, scale):
    brought = gradients(n, 5, dtype=dtype)
    if dtype == torch.float16:
        scale = min(scale, 64.0)
    histories = train(n, brought, scale)
    tolerance = {torch.float64: 1e-10, torch.float32: 2e-4}.get(dtype, 2e-2)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for i, matrix in enumerate(MATRICES):
        errors = [torch.zeros_like(part(brought[0][0], matrix), dtype=wide) for _ in range(n)]
        for step in range(1, 5):
            # From what the op itself remembered, so that differences do not add up.
            before = [history[step - 1] for history in histories]
            errors = [part(e, matrix) for _, e, _, _ in before]
            query = queries_of(before[0][2])[i]
            given = [part(brought[r][step] * scale, matrix) for r in range(n)]
            result, errors, query = oracle.power_step(given, errors, query, scale)
            for r, history in enumerate(histories):
                got, error, queries, _ = history[step]
                size = result.abs().max()
                assert (part(got, matrix) - result).abs().max() <= tolerance * size
                assert (part(error, matrix) - errors[r]).abs().max() <= tolerance * size / scale
                assert (queries_of(queries)[i] - query).abs().max() <= tolerance * query.abs().max()
    for step in range(5):
        assert_same_bits([history[step][0] for history in histories])
        assert_same_bits([history[step][2] for history in histories])
        mean = sum(rest(brought[r][step].to(wide)) for r in range(n)) / n * scale
        assert (rest(histories[0][step][0]) - mean).abs().max() <= tolerance * mean.abs().max()
        assert not any(rest(history[step][1]).any() for history in histories)


def test_full_rank_is_exact():
    matrices = [(0, 6, 9, 6), (54, 9, 6, 6)]
    brought = gradients(3, 3, numel=108)
    histories = train(3, brought, numel=108, matrices=matrices)
    for step in range(3):
        mean = sum(brought[r][step] for r in range(3)) / 3
        assert (histories[0][step][0] - mean).abs().max() < 1e-5


def test_zero_gradients_give_zero_and_training_goes_on_after_them():
    brought = [[torch.zeros(NUMEL), *rank] for rank in gradients(2, 6)]
    histories = train(2, brought)
    assert histories[0][0][0].abs().max() == 0
    assert (histories[0][0][2] != 0).all()  # queries survive: zero ones would stay zero
    energy = [part(history[0], MATRICES[0]).norm() for history in histories[0][1:]]
    assert min(energy) > 0.1


@over(bad=BAD_VALUES.values(), place=[0, 10, 1300, NUMEL - 1])
def test_a_bad_value_reaches_all_ranks_and_leaves_memory(bad, place):
    brought = gradients(3, 4)
    brought[1][2][place] = bad
    histories = train(3, brought)
    for history in histories:
        assert not torch.isfinite(history[2][0]).any()
        for before, after in zip(history[1][1:], history[2][1:], strict=True):
            assert torch.equal(bits(before), bits(after))
        assert torch.isfinite(history[3][0]).all()
    clean = [[*rank[:2], rank[3]] for rank in brought]
    assert_same_bits([histories[0][3][0], train(3, clean)[0][2][0]])


def test_a_result_that_overflows_the_dtype_leaves_memory():
    brought = gradients(2, 2, dtype=torch.float16)
    for rank in brought:
        rank[1].fill_(60000.0)
        rank[1] *= torch.tensor([1.0, 1.0826]).repeat(NUMEL // 2 + 1)[:NUMEL]  # finite: < 65504

    def run(comm):
        rank = Rank(comm, dtype=torch.float16)
        rank.run(brought[comm.rank][0], 1)
        before = rank.remembered()
        owed = torch.zeros(NUMEL)
        owed[: NUMEL // 2] = 6e4
        rank.memory.set(0, owed)
        result = rank.run(brought[comm.rank][1], 2)
        return result, before, rank.remembered(), owed

    for result, before, after, owed in run_thread_ranks(2, run):
        assert torch.isinf(result).any()
        assert torch.equal(after[0], owed)
        assert torch.equal(after[1], before[1])
        assert after[2] == before[2] == 1


def test_cold_queries_are_fresh_equal_on_all_ranks_and_leave_the_global_generator_alone():
    brought = [[flat, flat, flat] for (flat,) in gradients(2, 1)]
    torch.manual_seed(3)
    state = torch.get_rng_state()
    histories = train(2, brought, warm_start=False, error_feedback=False)
    assert torch.equal(torch.get_rng_state(), state)
    first, second = histories[0][0][0], histories[0][1][0]
    assert (first - second).abs().max() > 1e-3
    assert_same_bits([histories[0][2][0], histories[1][2][0]])
    other = train(2, brought, warm_start=False, error_feedback=False, seed=1)
    assert (other[0][0][0] - first).abs().max() > 1e-3


def test_one_rank_keeps_its_gradients():
    (history,) = train(1, gradients(1, 2))
    assert torch.equal(history[1][0], gradients(1, 2)[0][1])
