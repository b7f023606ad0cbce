"""The ledger over random plans: ranks, nodes, dtypes, shapes, kinds, buckets; saved and loaded."""

import io
import random
from types import SimpleNamespace

import pytest
import torch
from bagua import _C
from bagua._core.compression import low_rank_matrices
from bagua._core.group.connections import by_node
from bagua._core.state.ledger import Commit, Ledger, Page

SHAPES = [(), (1,), (7,), (3, 5), (0,), (4, 3, 2, 2), (64,), (12, 9)]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
KINDS = ["residuals", "no residuals", "low rank", "low rank without residuals", "parts"]


class Plan:
    """Parameters by name, in buckets, and what is kept of them; drawn at random."""

    def __init__(self, chance, kind=None):
        self.chance = chance
        self.kind = kind or chance.choice(KINDS)
        self.dtype = chance.choice(DTYPES)
        self.sizes = {f"layer.{i}": chance.choice(SHAPES) for i in range(chance.randint(1, 6))}
        self.memory_format = chance.choice([torch.contiguous_format, torch.channels_last])
        if self.kind.startswith("low rank"):
            self.sizes["matrix"] = (12, 9)
        self.buckets()

    @property
    def names(self):
        return list(self.sizes)

    def buckets(self):
        """Other buckets of the same parameters."""
        names = self.chance.sample(self.names, len(self.names))
        cuts = sorted(
            self.chance.sample(range(1, len(names)), self.chance.randint(0, 1) if names[1:] else 0)
        )
        self.groups = [names[a:b] for a, b in zip([0, *cuts], [*cuts, len(names)], strict=True)]
        self.padding = self.chance.randint(0, 40)

    def pages(self, ledger, rank, outcome=None, names=None):
        outcome = outcome or _C.RoundOutcome()
        groups = [[n for n in group if names is None or n in names] for group in self.groups]
        return [self.page(group, ledger, rank, outcome) for group in groups if group]

    def page(self, names, ledger, rank, outcome):
        tensors = [self.empty(name) for name in names]
        flat = torch.zeros(sum(t.numel() for t in tensors) + self.padding, dtype=self.dtype)
        named, first = [], 0
        for name, tensor in zip(names, tensors, strict=True):
            named.append((name, flat.as_strided(tensor.size(), tensor.stride(), first)))
            first += tensor.numel()
        if self.kind == "parts":
            return Page.of_parts(flat, named, outcome, ledger.members(), rank)
        matrices = low_rank_matrices(named, 2, 1.0) if self.kind.startswith("low rank") else None
        feedback = not self.kind.endswith("no residuals") and "without" not in self.kind
        return Page(flat, named, outcome, error_feedback=feedback, matrices=matrices, seed=3)

    def empty(self, name):
        tensor = torch.empty(self.sizes[name], dtype=self.dtype)
        last = tensor.dim() == 4 and self.memory_format is torch.channels_last
        return tensor.to(memory_format=torch.channels_last) if last else tensor


class Job:
    """Ranks on nodes, each with a ledger."""

    def __init__(self, chance, ranks, hierarchical, fill=False, counters=("rounds",)):
        nodes = sorted(chance.randint(0, 2) for _ in range(ranks))
        self.ranks = ranks
        self.ledgers = [
            Ledger("A", connections(rank, nodes), counters=counters, hierarchical=hierarchical)
            for rank in range(ranks)
        ]

    def take(self, plan, names=None):
        for rank, ledger in enumerate(self.ledgers):
            ledger.take(*plan.pages(ledger, rank, names=names))
        return self

    def fill(self, seed):
        """Give all entries values, equal ones on all ranks where they are to be."""
        for rank, ledger in enumerate(self.ledgers):
            ledger.counters = {name: seed + 5 for name in ledger.counters}
            for page in ledger.pages:
                page.communications.fill_(seed + 4)
                for name, query in page.queries():
                    query.copy_(values(query, f"{name} {seed}"))
                if rank in ledger.members():
                    for name, error in page.errors():
                        error.copy_(values(error, f"{name} {seed} {rank}"))
                for name, first, server in page.servers():
                    server.copy_(values(server, f"{name} {seed} {first}"))
        return self

    def states(self):
        return [through_a_file(ledger.state()) for ledger in self.ledgers]


def connections(rank, nodes):
    leaders = [node[0] for node in by_node(nodes)]
    here = SimpleNamespace(rank=rank, size=len(nodes), leaders=lambda: leaders)
    return lambda: here


def values(like, text):
    generator = torch.Generator().manual_seed(random.Random(text).randrange(2**31))
    return torch.randn(like.shape, generator=generator)


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def same(first, second):
    return first.keys() == second.keys() and all(
        torch.equal(first[key], second[key])
        if isinstance(first[key], torch.Tensor)
        else first[key] == second[key]
        for key in first
    )


def merged(states):
    return {key: value for state in states for key, value in state.items()}


def debt(states, plan, ranks=None):
    """What is owed in the mean, by parameter; nothing where there are no residuals."""
    members = [int(rank) for rank in states[0]["ranks"].split()]
    with_residuals = [states[rank] for rank in members]
    if not any("/error/" in key for key in states[members[0]]):
        return {}
    renamed = [
        {key.replace(f"rank{rank}/", f"rank{i}/"): value for key, value in state.items()}
        for i, (rank, state) in enumerate(zip(members, with_residuals, strict=True))
    ]
    return {name: owed_of(renamed, name, plan) for name in plan.names}


def owed_of(states, name, plan):
    """The mean of residuals, and server residuals by the places of elements in memory."""
    mean = plan.empty(name).zero_().double()
    flat = mean.as_strided((mean.numel(),), (1,))
    for rank, state in enumerate(states):
        if f"rank{rank}/error/{name}" in state:
            mean += state[f"rank{rank}/error/{name}"].double() / len(states)
        for key, value in state.items():
            if key.startswith(f"rank{rank}/server/") and key.endswith(f"/{name}"):
                first = int(key.split("/")[2])
                flat[first : first + value.numel()] += value
    return mean


def assert_owed(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)


def plans(number, **more):
    """(chance, plan, ranks, hierarchical), with the seed in the output of a failure."""
    for seed in range(number):
        print(f"plan {seed}")
        chance = random.Random(seed)
        yield chance, Plan(chance, **more), chance.choice([1, 2, 3, 4, 7]), chance.random() < 0.3


def test_ranks_that_load_their_own_states_continue_to_the_bit():
    for _, plan, ranks, hierarchical in plans(60):
        layout = random.Random(0)
        before = Job(layout, ranks, hierarchical).take(plan).fill(1).states()
        assert len(before[0]["ranks"].split()) > 0
        # Into pages with other values, and into a ledger whose pages are to come.
        used = Job(random.Random(0), ranks, hierarchical).take(plan).fill(2)
        fresh = Job(random.Random(0), ranks, hierarchical)
        for job in (used, fresh):
            for ledger, state in zip(job.ledgers, before, strict=True):
                ledger.restore(state | {"further": 1, "other/key": torch.ones(2)})
            assert all(map(same, job.states(), before))
        assert all(map(same, fresh.take(plan).states(), before))
        # A second save has the values of its own time.
        assert not same(used.fill(3).states()[0], before[0])


@pytest.mark.parametrize("of_all", [False, True], ids=["own", "merged"])
def test_states_owe_the_same_in_other_buckets_and_merged_ones_on_other_ranks(of_all):
    for chance, plan, ranks, hierarchical in plans(80):
        layout = chance.random()
        before = Job(random.Random(layout), ranks, hierarchical).take(plan).fill(1).states()
        plan.buckets()
        if of_all:
            ranks, layout = chance.choice([1, 2, 3, 5]), chance.random()
        live = Job(random.Random(layout), ranks, hierarchical).take(plan).fill(2)
        waiting = Job(random.Random(layout), ranks, hierarchical and not of_all)
        for job in (live, waiting):
            for rank, ledger in enumerate(job.ledgers):
                ledger.restore(merged(before) if of_all else before[rank])
        expected, waited = debt(before, plan), waiting.states()
        if of_all:
            assert_owed(debt(waited, plan), expected)
        for after in (live.states(), waiting.take(plan).states()):
            assert_owed(debt(after, plan), expected)
            for key in (k for k in before[0] if k.startswith(("query/", "comm"))):
                assert torch.equal(after[0][key], before[0][key])
        for name in expected if before[0]["ranks"] != waited[0]["ranks"] else ():
            errors = [s[f"rank{r}/error/{name}"] for r, s in enumerate(waited)]
            assert all(torch.equal(error, errors[0]) for error in errors)


def test_parameters_that_come_later_begin_at_zero_among_those_that_continue():
    for chance, plan, ranks, hierarchical in plans(60):
        some = chance.sample(plan.names, chance.randint(1, len(plan.names)))
        job = Job(chance, ranks, hierarchical).take(plan, names=some).fill(1)
        before = job.states()
        plan.buckets()
        after = job.take(plan).states()
        assert_owed(debt(after, plan), debt(before, plan))
        assert int(after[0]["communications"]) == 5
        for key in (key for key in after[0] if key.startswith("query/")):
            # A query that is drawn among others is not zero, or the matrix would vanish.
            assert all(torch.equal(state[key], after[0][key]) for state in after)
            assert after[0][key].any()
            assert key not in before[0] or torch.equal(before[0][key], after[0][key])


def test_parameters_without_a_bucket_keep_what_they_have():
    for chance, plan, ranks, hierarchical in plans(40):
        job = Job(chance, ranks, hierarchical).take(plan).fill(1)
        before = job.states()
        for ledger in job.ledgers:
            ledger.put_aside(*ledger.pages)
            assert ledger.pages == []
        assert all(map(same, job.states(), before))
        some = chance.sample(plan.names, chance.randint(1, len(plan.names)))
        plan.buckets()
        assert_owed(debt(job.take(plan, names=some).states(), plan), debt(before, plan))
        plan.buckets()
        assert_owed(debt(job.take(plan).states(), plan), debt(before, plan))


def test_what_is_owed_survives_a_change_of_ranks_but_for_what_was_lost():
    for chance, plan, ranks, _ in plans(60):
        if "no residuals" in plan.kind or "without" in plan.kind:
            continue
        job = Job(chance, ranks, False).take(plan).fill(1)
        before, size = job.states(), chance.randint(1, 5)
        expected = debt(before, plan)
        survivors = chance.sample(range(ranks), min(ranks, size))
        for lost in set(range(ranks)) - set(survivors):
            own = [before[r] if r == lost else zeroed(before[r]) for r in range(ranks)]
            for name, value in debt(own, plan).items():
                expected[name] = expected[name] - value
        plan.buckets()
        after = Job(chance, size, False)
        for rank, old in enumerate(survivors):
            ledger, of_rank = job.ledgers[old], after.ledgers[rank]
            ledger._connections = of_rank._connections
            after.ledgers[rank] = ledger
        assert_owed(debt(after.take(plan).states(), plan), expected)


def test_a_page_that_stays_when_others_come_counts_among_the_ranks_it_had():
    ledger = Ledger("A", connections(0, [0, 0]))

    def page(name):
        flat = torch.zeros(3)
        return Page(flat, [(name, flat)], _C.RoundOutcome(), error_feedback=True)

    stays = page("stays")
    ledger.take(stays)
    for _, error in stays.errors():
        error.fill_(1.0)
    stays.communications.fill_(1)
    ledger._connections = connections(0, [0] * 4)
    ledger.take(page("comes"))
    again = page("stays")
    ledger.take(again)
    assert [error.tolist() for _, error in again.errors()] == [[2.0] * 3]  # of twice as many ranks


def zeroed(state):
    return {
        key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
    }


@pytest.mark.parametrize("how", ["whole", "not finite", "incomplete", "not used"])
def test_entries_change_with_a_whole_finite_round(how):
    for _, plan, _, _ in plans(20):
        ledger, commit = Ledger("A", connections(0, [0])), Commit()
        ledger.take(*plan.pages(ledger, 0, commit.outcome))
        before = ledger.state()
        for number, page in enumerate(ledger.pages):
            counter = page.memory.next(2 if plan.kind.startswith("low rank") else 1)
            counter.fill_(9)
            if how != "incomplete" or number > 0:
                page.memory.leave(1, finite=how != "not finite")
        if how != "not used":
            commit.commit()
            commit.commit()
        state = ledger.state()
        assert (int(state["communications"]) == 9) == (how == "whole")
        assert how == "whole" or same(state, before)


def test_a_state_that_does_not_fit_is_refused_whole_and_names_the_entry():
    refused = 0
    for chance, plan, ranks, hierarchical in plans(40):
        states = Job(random.Random(2), ranks, hierarchical).take(plan).fill(1).states()
        job = Job(random.Random(2), ranks, hierarchical).take(plan).fill(2)
        rank = chance.randrange(ranks)
        ledger, before = job.ledgers[rank], job.states()[rank]
        whole = ranks == 1 or len(states[0]["ranks"].split()) == 1
        for key in list(states[rank]):
            bad = []
            if "/server/" in key:
                bad.append(states[rank] | {key: torch.ones(10_000)})  # longer than the parameter
            if "/server/" not in key or whole:  # else in a part that another rank may have now
                bad += [states[rank] | {key: torch.ones(3, 1, 2)}, states[rank] | {key: "text"}]
                if any("/" in other for other in states[rank]) or key == "rounds":
                    bad.append({k: v for k, v in states[rank].items() if k != key})
            for state in bad:
                name = key.rsplit("/", 1)[-1]
                with pytest.raises(ValueError, match=name.replace(".", r"\.")):
                    ledger.restore(state)
                refused += 1
                assert same(job.states()[rank], before)
    assert refused > 250


def test_a_state_of_the_warm_up_clears_all():
    for chance, plan, ranks, hierarchical in plans(20):
        job = Job(chance, ranks, hierarchical).take(plan).fill(1)
        for ledger in job.ledgers:
            ledger.restore({"rounds": 3})
        for state in job.states():
            assert state["rounds"] == 3
            tensors = [v for v in state.values() if isinstance(v, torch.Tensor)]
            assert tensors
            assert not any(value.any() for value in tensors)
        for ledger in job.ledgers:
            ledger.put_aside(*ledger.pages)
        assert job.states() == [{"rounds": 3}] * ranks


def test_states_of_other_ranks_are_merged_or_refused_with_the_remedy():
    for chance, plan, ranks, _ in plans(30, kind="parts"):
        states = Job(chance, ranks + 1, False).take(plan).fill(1).states()
        job = Job(chance, ranks, False)
        with pytest.raises(ValueError, match=r"saved by ranks .* loaded by .*merge what all ranks"):
            job.ledgers[0].restore(states[0])
        alone = Ledger("A", connections(0, [0] * ranks), only_same_ranks="because of shards")
        with pytest.raises(ValueError, match=r"'ranks' is .* in the state, .* because of shards"):
            alone.restore(merged(states))


def test_own_tensors_are_of_the_ranks_that_saved_them():
    for chance, _, ranks, hierarchical in plans(20):
        reason = chance.choice([None, "because of neighbours"])
        nodes, others = [0] * ranks, [0] * (ranks + 1)

        def made(nodes, rank, reason=reason, hierarchical=hierarchical):
            arguments = {"hierarchical": hierarchical, "only_same_ranks": reason, "pages": False}
            ledger = Ledger("A", connections(rank, nodes), counters=["rounds"], **arguments)
            ledger.own = {"left/x": torch.full((2,), float(rank)), "right/x": torch.zeros(3)}
            return ledger

        for rank in range(ranks):
            state = made(nodes, rank).state()
            member = rank == 0 or not hierarchical
            assert (f"rank{rank}/left/x" in state) == member
            loaded = made(nodes, rank)
            loaded.own["left/x"].zero_()
            loaded.restore(state)
            assert loaded.own["left/x"].tolist() == [rank * member] * 2
            if member:
                del state[f"rank{rank}/right/x"]
                with pytest.raises(ValueError, match=f"no 'rank{rank}/right/x'"):
                    loaded.restore(state)
        state = made(nodes, 0).state() | {"rounds": 4}
        elsewhere = made(others if not hierarchical else [1, *others], 0)
        if reason is None:
            elsewhere.restore(state)
            assert elsewhere.counters == {"rounds": 4}
        else:
            with pytest.raises(ValueError, match=r"'ranks' is .* because of neighbours"):
                elsewhere.restore(state)


def test_a_ledger_without_pages_refuses_entries():
    for _, plan, ranks, _ in plans(10, kind="residuals"):
        state = Job(random.Random(0), ranks, False).take(plan).fill(1).states()[0]
        ledger = Ledger("A", connections(0, [0] * ranks), counters=["rounds"], pages=False)
        with pytest.raises(ValueError, match=r"A remembers \['rounds'\], but its state has"):
            ledger.restore(state)
        ledger.restore({"rounds": 3})
        assert ledger.state() == {"rounds": 3}


def test_a_state_shares_no_memory_with_the_ledger():
    for _, plan, ranks, hierarchical in plans(20):
        job = Job(random.Random(0), ranks, hierarchical).take(plan).fill(1)
        before, state = job.states()[0], job.ledgers[0].state()
        waiting = Job(random.Random(0), ranks, hierarchical).ledgers[0]
        for ledger in (job.ledgers[0], waiting):
            ledger.restore(state)
        aside = waiting.state()
        for value in (*state.values(), *aside.values()):
            if isinstance(value, torch.Tensor):
                value.zero_()
        assert same(job.states()[0], before)
        assert same(waiting.state(), before)


def test_a_server_residual_with_a_gap_is_refused():
    gaps = 0
    for chance, plan, ranks, hierarchical in plans(40, kind="parts"):
        state = merged(Job(chance, ranks, hierarchical).take(plan).fill(1).states())
        long = [key for key, value in state.items() if "/server/" in key and value.numel() > 1]
        for key in chance.sample(long, min(1, len(long))):
            gaps += 1
            ledger = Job(chance, 1, False).take(plan).ledgers[0]
            said = rf"no server residual of '{plan_name(key)}' from element \d+ on: merge"
            with pytest.raises(ValueError, match=said):
                ledger.restore(state | {key: state[key][:-1]})
    assert gaps > 10


def plan_name(key):
    return key.rsplit("/", 1)[-1].replace(".", r"\.")
