"""Islands of a mailbox whose ranks hold shards: FSDP2, HSDP, stages of a pipeline."""

import copy
import functools
import gc
import math
import os
import re
import threading
import time
from pathlib import Path

import bagua.torch_api as bagua
import pytest
import torch
import torch.distributed as dist
from bagua._outer.mailbox import bodies
from ranks.test_mailbox import (
    NAMES,
    come_at_once,
    counted_requests,
    hasty,
    island,
    killed,
    run_command,
)
from support import sharded, training
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

BLOCK = 256  # elements; a multiple of those of int4_block


def network(seed=0):
    """Half of each parameter is whole blocks of a codec."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, BLOCK), nn.Tanh(), nn.Linear(BLOCK, BLOCK))


def uneven():
    """Sizes that two do not divide; one rank has nothing of the last bias."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 1))


def by_fsdp(model, mesh):
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def anchor_bits(model):
    return training.bits(model.bagua_algorithm._loop.state.named().values())


def train(model, optimizer, steps, samples=0):
    """On data of this rank; the targets of models with one output are the first ones."""
    for step in steps:
        optimizer.zero_grad()
        draw = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        inputs = torch.randn(4, 8, generator=draw)
        targets = torch.randn(4, BLOCK, generator=draw)
        if samples:
            model.bagua_samples(samples)
        outputs = model(inputs)
        functional.mse_loss(outputs, targets[:, : outputs.shape[1]]).backward()
        optimizer.step()


def islands_of_two():
    """(number of this rank's island, its bagua group, its torch group, its mesh)."""
    bagua.init_process_group()
    number = dist.get_rank() // 2
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("island", "shard"))["shard"]
    group = bagua.communication.new_group([[0, 1], [2, 3]][number])
    return number, group, mesh


@sharded.with_torch_group
def beside_whole_ones(folder, arguments):
    """Distance of anchors from those of islands whose ranks hold all, and figures of rounds."""
    number, group, mesh = islands_of_two()
    samples = 1 + dist.get_rank() if arguments.get("weight") == "samples" else 0
    own = {"quorum": 2, "grace": None, "keep": 2}
    made = {}
    for kind in ("shards", "whole"):
        model = network() if arguments else uneven()
        if kind == "shards":
            model = by_fsdp(model, mesh)
        else:
            model = DistributedDataParallel(model, process_group=mesh.get_group())
        there = os.path.join(folder, kind)
        island(there, NAMES[number], group=group, mailbox=own, model=model, **arguments)
        train(model, model.bagua_optimizers[0], range(9), samples)
        model.bagua_algorithm.sync()
        made[kind] = model
    outer = {kind: model.bagua_stats()["outer"] for kind, model in made.items()}
    whole, cut = (made[kind].bagua_algorithm.state_dict() for kind in ("whole", "shards"))
    keys = [key for key in cut if key.startswith(("anchor/", "momentum/"))]
    assert len(keys) == 8
    pairs = ((cut[key].full_tensor(), whole[key.replace("/", "/module.")]) for key in keys)
    distance = max((own - other).abs().max().item() for own, other in pairs)
    payload = [
        sum(bodies.body_bytes(bucket) for bucket in model.bagua_algorithm._loop.buckets)
        for model in made.values()
    ]
    bits = training.gather(anchor_bits(made["shards"]))
    dist.barrier()  # or a mailbox could lose an island in the last round
    return distance, bits, outer, payload


CASES = {
    "exact": {},
    "4 bits": {"codec": "int4_block"},
    "samples": {"codec": "int4_block", "weight": "samples"},
    "overlap": {"codec": "int4_block", "overlap_steps": 1, "interval": 4, "fragments": 2},
}


@pytest.mark.parametrize("case", CASES)
def test_islands_of_shards_train_as_whole_ones(ranks, tmp_path, case):
    found = ranks(4, beside_whole_ones, str(tmp_path), CASES[case])
    payloads = [payload for *_, payload in found]
    # Codes are aligned.
    assert payloads[0][1] <= payloads[0][0] + payloads[1][0] <= payloads[0][1] + 256
    for distance, bits, outer, _ in found:
        assert outer["shards"]["rounds"] == outer["whole"]["rounds"] >= 5
        assert distance == 0.0  # the sums of two ranks, and the blocks of the codec, are equal
        assert bits[0] == bits[2] != bits[1] == bits[3]


# Islands of which two ranks hold shards each; they take turns.


def of_shards(folder, name, *, seed=0, mailbox=None, **arguments):
    """(model, optimizer) of an island of all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return island(folder, name, model=by_fsdp(network(seed), mesh), mailbox=mailbox, **arguments)


def with_islands(function):
    """Bagua begins inside, over all ranks, and files are refused at the first look."""

    @sharded.with_torch_group
    @functools.wraps(function)
    def run(*args):
        bagua.init_process_group()
        hasty()
        return function(*args)

    return run


@with_islands
def bytes_of_rounds(folder):
    """Payload of this rank, and calls for files of rounds that it made in each island."""
    own = {"quorum": 2, "grace": 60.0, "keep": 100}
    shared = {"mailbox": own, "codec": "int4_block", "overlap_steps": 1}
    made = [of_shards(folder, name, **shared) for name in NAMES[:2]]
    calls = [counted_calls(model.bagua_algorithm._ranks._post.box.place) for model, _ in made]
    for step in range(7):
        for each in made:
            train(*each, range(step, step + 1))
    buckets = made[0][0].bagua_algorithm._loop.buckets
    sent = [model.bagua_stats()["outer"]["sent_bytes"] for model, _ in made]
    return sum(map(bodies.body_bytes, buckets)), calls, sent


def counted_calls(place):
    """(call, kind of file, island, bytes) of a place from now on, where a file is of a round."""
    calls, read, create = [], place.read, place.create

    def note(call, name, data):
        found = re.match(r"round-\d+/(from|shard-\d|manifest)-([a-z]*)", name)
        if found and data is not None:
            calls.append((call, *found.groups(), len(data)))

    def reads(name, most):
        data = read(name, most)
        note("read", name, data)
        return data

    def creates(name, data):
        made = create(name, data)
        if made:
            note("create", name, data)
        return made

    place.read, place.create = reads, creates
    return calls


def test_each_rank_sends_its_shard_once_and_reads_that_of_each_other_island_once(ranks, tmp_path):
    found = ranks(2, bytes_of_rounds, str(tmp_path))
    for rank, (payload, of_islands, _) in enumerate(found):
        for name, calls in zip(NAMES[:2], of_islands, strict=True):
            other = NAMES[1 - NAMES.index(name)]
            shards = [each for each in calls if each[1].startswith("shard")]
            expected = [("create", f"shard-{rank}", name), ("read", f"shard-{rank}", other)]
            assert sorted(each[:3] for each in shards) == sorted(expected * 3)
            assert all(payload <= size <= payload + 1024 for *_, size in shards)
            others = [each for each in calls if not each[1].startswith("shard")]
            assert all(size <= 1024 for *_, size in others)
            assert sum(each[:2] == ("create", "from") for each in others) == 3 * (rank == 0)


@with_islands
def requests_of_rounds(folder):
    """Requests to the storage of this rank in three rounds of each island."""
    own = {"quorum": 2, "grace": 60.0, "keep": 100}
    made = [of_shards(folder, name, mailbox=own, overlap_steps=1) for name in NAMES[:2]]
    boxes = [model.bagua_algorithm._ranks._post.box for model, _ in made]
    if dist.get_rank() == 0:
        come_at_once(boxes, "contribute_shards")
    calls = [counted_requests(each.place) for each in boxes]
    for step in range(7):
        for each in made:
            train(*each, range(step, step + 1))
    return calls


def test_ranks_of_shards_ask_the_storage_as_often_as_their_page_says(ranks, tmp_path):
    first, second = ranks(2, requests_of_rounds, str(tmp_path))
    # For the other rank's shard and, while another island decides, for the manifest. Behind such a
    # look is one for newer anchors, and one more behind a decision.
    looks, newer = ("names", "round", ""), ("names", "", "")
    for each in first:
        assert each["names", "islands", ""] <= 3, "looks while it waits"
        assert each[newer] <= each[looks] + 3, each
        assert sum(each.values()) - each[looks] - each[newer] <= 3 * (3 * 2 + 5), each
    looks_for_manifest = ("read", "round", "manifest"), ("names", "", "")
    for each in second:
        assert sum(each.values()) - sum(each[kind] for kind in looks_for_manifest) == 3 * 2 * 2


# Late, gone, come back.


@with_islands
def comes_and_goes(folder, kind):
    """Anchors, as whole tensors, of islands that miss rounds, and of one that comes when the
    rounds before are gone."""
    mailbox = {"keep": 2}
    arguments = {"mailbox": mailbox, "codec": "int4_block", "interval": 4, "fragments": 2}

    def new(name, seed):
        if kind == "shards":
            return of_shards(folder, name, seed=seed, **arguments)
        model = DistributedDataParallel(network(seed))
        return island(folder, name, model=model, **arguments)

    oslo = new("oslo", 0)
    train(*oslo, range(6))
    paris = new("paris", 5)
    train(*paris, range(5))
    train(*oslo, range(6, 9))
    train(*paris, range(5, 27))
    train(*oslo, range(9, 20))  # what it has was of rounds that are gone
    rome = new("rome", 7)
    train(*rome, range(5))
    for model, _ in (oslo, paris, rome):
        model.bagua_algorithm.sync()
    for model, _ in (oslo, paris, rome):
        members = model.bagua_algorithm._ranks
        members._catch_up(model.bagua_algorithm._loop)
    late = [model.bagua_stats()["outer"]["late_rounds"] for model, _ in (oslo, paris, rome)]
    state = oslo[0].bagua_algorithm.state_dict()
    anchors = [
        value.full_tensor() if kind == "shards" else value
        for key, value in state.items()
        if key.startswith(("anchor/", "momentum/"))
    ]
    rounds = oslo[0].bagua_algorithm.outer_rounds
    return anchors, [anchor_bits(model) for model, _ in (oslo, paris, rome)], rounds, late


def test_islands_of_shards_that_come_late_count_as_whole_ones(ranks, tmp_path):
    cut, whole = (
        ranks(2, comes_and_goes, str(tmp_path / kind), kind)[0] for kind in ("shards", "whole")
    )
    assert cut[2] == whole[2] > 12
    assert len(set(cut[1])) == 1
    torch.testing.assert_close(cut[0], whole[0], rtol=0, atol=1e-6)
    assert not (tmp_path / "shards" / "round-000000000").exists()


def killed_island(model):
    """End an island as one whose ranks are all killed."""
    if dist.get_rank() == 0:
        killed(model)
    dist.barrier()


def begin_again():
    gc.collect()
    bagua.destroy_process_group()
    dist.barrier()
    bagua.init_process_group()


@with_islands
def killed_and_started(folder):
    hasty(silence=0.5)
    arguments = {"mailbox": {"keep": 2}, "codec": "int4_block"}
    model, optimizer = of_shards(folder, "oslo", **arguments)
    train(model, optimizer, range(15))  # and a step in which no round was
    before = anchor_bits(model)
    killed_island(model)
    del model, optimizer
    begin_again()
    model, optimizer = of_shards(folder, "oslo", seed=3, **arguments)
    found = model.bagua_algorithm.outer_rounds, before == anchor_bits(model)
    train(model, optimizer, range(10))
    rounds = model.bagua_algorithm.outer_rounds
    model.bagua_algorithm.close()
    return found, rounds


def test_islands_of_shards_that_were_all_killed_go_on_after_the_last_round(ranks, tmp_path):
    for found, rounds in ranks(2, killed_and_started, str(tmp_path)):
        assert found == (7, True)
        assert rounds == 12
    anchors = sorted(file.name.partition("-")[2] for file in tmp_path.glob("anchor-*"))
    assert len(anchors) == 2
    assert sorted(file.name.partition("-")[2] for file in tmp_path.glob("shards-*")) == anchors
    assert all(len(list(folder.iterdir())) == 2 for folder in tmp_path.glob("shards-*"))
    assert len(list(tmp_path.glob("round-*"))) <= 2 * 2 + 1


@with_islands
def loads(folder, counts):
    """What a rank has trained beyond the anchors when it saved, and when that was loaded, and the
    steps since the island counted. `counts`: it was killed after a round that had them."""
    hasty(silence=0.5)
    model, optimizer = of_shards(folder, "oslo")
    other = of_shards(folder, "paris")
    train(model, optimizer, range(3))  # a round, and one step of the next
    saved = copy.deepcopy((model.state_dict(), model.bagua_algorithm.state_dict()))
    before = beyond_anchors(model)
    train(model, optimizer, range(3, 3 + counts))
    killed_island(model)
    train(*other, range(8))
    del model, optimizer, other
    begin_again()
    model, _ = of_shards(folder, "oslo", seed=3)
    for part, state in zip((model, model.bagua_algorithm), saved, strict=True):
        part.load_state_dict(state)
    model(torch.zeros(1, 8))  # the next step begins
    for module in (model[0], model):
        module.reshard()
    state = model.bagua_algorithm.state_dict()
    (steps,) = (value.tolist() for key, value in state.items() if key.endswith("/trained_steps"))
    return before, beyond_anchors(model), steps


def beyond_anchors(model):
    anchors = model.bagua_algorithm._loop.state.named()
    named = model.named_parameters()
    return [p.detach().to_local() - anchors[f"anchor/{name}"] for name, p in named]


def test_what_a_checkpoint_of_shards_has_counts_once(ranks, tmp_path):
    for counts in (True, False):
        for before, after, steps in ranks(2, loads, str(tmp_path / f"{counts}"), counts):
            assert steps == [[1.0 - counts, 0.0]]
            for own, found in zip(before, after, strict=True):
                assert own.any()
                torch.testing.assert_close(found, own * (1 - counts), rtol=0, atol=1e-6)


@with_islands
def killed_in_each_round(folder):
    """Rounds and anchors that lie there after each life of an island, which ends with a round."""
    hasty(silence=0.2)
    found = []
    for _ in range(12):
        model, optimizer = of_shards(folder, "oslo", mailbox={"keep": 2})
        train(model, optimizer, range(2))
        names = os.listdir(folder)
        found.append([sum(n.startswith(k) for n in names) for k in ("round-", "anchor-", "shards")])
        killed_island(model)
        del model, optimizer
        begin_again()
    return found


def test_islands_of_shards_that_are_killed_in_each_round_leave_few_files(ranks, tmp_path):
    for found in ranks(2, killed_in_each_round, str(tmp_path)):
        assert max(rounds for rounds, *_ in found) <= 2 * (2 + 1) + 1 + 2
        assert max(max(others) for _, *others in found) <= 3
        assert found[-1][1] >= 2


# Contributions of which a rank's part is missing.


@with_islands
def without_a_rank(folder):
    """Counted islands of two rounds, in the first of which a rank of oslo does not mail."""
    shared = {"weight": "samples", "mailbox": {"quorum": 1}, "overlap_steps": 1}
    oslo, paris = (of_shards(folder, name, **shared) for name in NAMES[:2])
    mails = threading.Event()
    own = oslo[0].bagua_algorithm._ranks._post.box
    mail = own.mail
    if dist.get_rank() == 1:
        own.mail = lambda file: mails.wait(60) and mail(file)
    train(*oslo, range(2), 1)
    train(*paris, range(2), 1)
    train(*paris, range(2, 3), 1)  # the round is over
    dist.barrier()
    files = sorted(name.rpartition("-")[0] for name in os.listdir(f"{folder}/round-000000000"))
    dist.barrier()
    mails.set()
    train(*oslo, range(2, 4), 1)
    train(*paris, range(3, 4), 1)
    train(*oslo, range(4, 5), 1)
    train(*paris, range(4, 5), 1)
    box = paris[0].bagua_algorithm._ranks._post.box
    counted = [[each.island for each in box.manifest(number).counted] for number in (0, 1)]
    late = oslo[0].bagua_stats()["outer"]["late_rounds"]
    for model, _ in (oslo, paris):
        model.bagua_algorithm._ranks._catch_up(model.bagua_algorithm._loop)
    return files, counted, late, anchor_bits(oslo[0]) == anchor_bits(paris[0])


def test_an_island_of_which_a_rank_has_not_mailed_does_not_count(ranks, tmp_path):
    found = ranks(2, without_a_rank, str(tmp_path))
    for rank, (files, counted, late, same) in enumerate(found):
        assert files == ["from-paris", "manifest", "shard-0-oslo", "shard-0-paris", "shard-1-paris"]
        assert counted[0] == ["paris"]
        assert "oslo" in counted[1]
        assert late == (1 if rank == 0 else 0)
        assert same


@with_islands
def without_a_file(folder):
    """Islands that count in a round of which a file was removed when it was there as a whole."""
    shared = {"overlap_steps": 1}
    oslo = of_shards(folder, "oslo", mailbox={"quorum": 3}, **shared)  # which never decides
    paris = of_shards(folder, "paris", **shared)
    train(*oslo, range(2))
    there = Path(folder) / "round-000000000"
    if dist.get_rank() == 0:
        while not list(there.glob("from-oslo-*")):
            time.sleep(0.01)
        for shard in there.glob("shard-1-oslo-*"):
            shard.unlink()
    dist.barrier()
    train(*paris, range(3))
    counted = paris[0].bagua_algorithm._ranks._post.box.manifest(0).counted
    train(*oslo, range(2, 3))
    same = anchor_bits(oslo[0]) == anchor_bits(paris[0])
    return [each.island for each in counted], same


def test_an_island_of_which_a_shard_is_gone_does_not_count(ranks, tmp_path):
    assert ranks(2, without_a_file, str(tmp_path)) == [(["paris"], True)] * 2


@with_islands
def shown(folder):
    """Output of `bagua mailbox`, and bytes of the files of a round."""
    model, optimizer = of_shards(folder, "oslo")
    train(model, optimizer, range(2))
    dist.barrier()
    told = run_command(["mailbox", folder, "--once"]) if dist.get_rank() == 0 else (0, "")
    names = os.listdir(f"{folder}/round-000000000")
    sizes = [
        os.path.getsize(f"{folder}/round-000000000/{name}")
        for name in names
        if not name.startswith("manifest")
    ]
    dist.barrier()
    return told, len(sizes), sum(sizes)


def test_the_command_shows_the_bytes_of_all_shards(ranks, tmp_path):
    (told, count, size), _ = ranks(2, shown, str(tmp_path))
    assert (told[0], count) == (0, 3)
    words = [line.split() for line in told[1].splitlines()]
    assert ["oslo", "trains", "1/1", "0", f"{size / 1e6:.3f}"] in words, told[1]


@with_islands
def nan_in_a_shard(folder):
    """Rounds of two islands, of which one has NaN in the shard of its second rank alone."""
    shared = {"mailbox": {"quorum": 2, "grace": 60.0}, "overlap_steps": 1}
    oslo, paris = (of_shards(folder, name, **shared) for name in NAMES[:2])
    if dist.get_rank() == 1:
        with torch.no_grad():
            next(paris[0].parameters()).to_local()[0, 0] = math.nan
    texts = []
    for step in range(5):
        for each in (oslo, paris):
            texts += training.warnings_of(lambda each=each, step=step: train(*each, [step]))
    outer = [model.bagua_stats()["outer"] for model, _ in (oslo, paris)]
    return [(each["rounds"], each["skipped_rounds"]) for each in outer], texts


def test_nan_in_one_shard_skips_the_round_on_all_ranks(ranks, tmp_path):
    found = ranks(2, nan_in_a_shard, str(tmp_path))
    assert [counts for counts, _ in found] == [[(1, 1)] * 2] * 2
    words = "The weights of island(s) paris hold NaN or infinity"
    assert words in " ".join(text for _, texts in found for text in texts)


@with_islands
def told_to_leave(folder):
    """Status of the ranks of an island of which one is told to leave."""
    model, optimizer = of_shards(folder, "oslo")
    if dist.get_rank() == 1:
        bagua.leave()
    with pytest.raises(SystemExit) as left:
        train(model, optimizer, range(2))
    dist.barrier()
    return left.value.code, os.path.exists(os.path.join(folder, "islands/oslo-1"))


def test_an_island_of_shards_leaves_where_one_rank_is_told(ranks, tmp_path):
    assert ranks(2, told_to_leave, str(tmp_path)) == [(0, False)] * 2


@with_islands
def of_one_rank(folder):
    """Kinds of files in a round, and anchors of an island of one shard and of a whole one."""
    oslo, paris = of_shards(folder, "oslo"), island(folder, "paris", model=network())
    train(*oslo, range(4))
    train(*paris, range(2))
    oslo[0].bagua_algorithm._ranks._catch_up(oslo[0].bagua_algorithm._loop)
    kinds = sorted(name.partition("-")[0] for name in os.listdir(f"{folder}/round-000000002"))
    return kinds, anchor_bits(oslo[0]) == anchor_bits(paris[0])


def test_an_island_of_one_rank_by_fsdp_meets_a_plain_one(ranks, tmp_path):
    assert ranks(1, of_one_rank, str(tmp_path)) == [(["from", "manifest"], True)]


# Shards that several ranks hold, and stages.


def by_hsdp():
    """A network that two pairs of ranks hold, in shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return by_fsdp(network(), mesh)


SHARED = {"codec": "int4_block", "weight": "samples", "mailbox": {"keep": 1}}


@with_islands
def of_copies(folder):
    """(anchors of this rank, whole anchors, of two islands; files of rounds; what each sent)."""
    hasty(silence=0.5)
    made = [island(folder, name, model=by_hsdp(), **SHARED) for name in NAMES[:2]]
    for step in range(9):
        for model, optimizer in made:
            train(model, optimizer, range(step, step + 1), samples=1 + dist.get_rank())
    for model, _ in made:
        model.bagua_algorithm._ranks._catch_up(model.bagua_algorithm._loop)
    rounds = made[0][0].bagua_algorithm.outer_rounds
    dist.barrier()
    there = Path(folder).glob("round-*")
    files = [sorted(file.name.rpartition("-")[0] for file in each.iterdir()) for each in there]
    dist.barrier()
    sent = [model.bagua_stats()["outer"]["sent_bytes"] for model, _ in made]
    # A checkpoint resumes, and all islands that were killed go on.
    before = [anchor_bits(model) for model, _ in made]
    saved = copy.deepcopy((made[0][0].state_dict(), made[0][0].bagua_algorithm.state_dict()))
    for model, _ in made:
        killed_island(model)
    del made, model
    begin_again()
    model, optimizer = island(folder, "oslo", model=by_hsdp(), **SHARED)
    for part, state in zip((model, model.bagua_algorithm), saved, strict=True):
        part.load_state_dict(state)
    again = anchor_bits(model)
    train(model, optimizer, range(4), samples=1 + dist.get_rank())
    return before, again, anchor_bits(model), rounds, files, sent


def test_islands_of_hsdp_mail_each_shard_once(ranks, tmp_path):
    found = ranks(4, of_copies, str(tmp_path))
    for rank, (before, again, later, rounds, files, sent) in enumerate(found):
        assert before[0] == before[1] == again
        assert rounds >= 4
        assert later == found[(rank + 2) % 4][2] != found[(rank + 1) % 4][2]
        for name in NAMES[:2]:
            mailed = [[file for file in each if file.endswith(name)] for each in files]
            whole = [f"from-{name}", f"shard-0-{name}", f"shard-1-{name}"]
            assert whole in mailed
            assert all(each in ([], whole) for each in mailed)
        assert [bytes_ > 0 for bytes_ in sent] == [rank < 2] * 2


@sharded.with_torch_group
def beside_fsdp(folder):
    """Distance of anchors of islands of HSDP from those of islands by DistributedDataParallel."""
    bagua.init_process_group()
    hasty()
    made = {}
    for kind in ("copies", "whole"):
        there = os.path.join(folder, kind)
        model = by_hsdp() if kind == "copies" else DistributedDataParallel(network())
        model, optimizer = made[kind] = island(there, "oslo", model=model)
        train(model, optimizer, range(6))
    states = [made[kind][0].bagua_algorithm.state_dict() for kind in ("whole", "copies")]
    keys = [key for key in states[1] if key.startswith(("anchor/", "momentum/"))]
    assert len(keys) == 8
    return max(
        (states[1][key].full_tensor() - states[0][key.replace("/", "/module.")]).abs().max().item()
        for key in keys
    )


def test_islands_of_hsdp_train_as_whole_ones(ranks, tmp_path):
    assert max(ranks(4, beside_fsdp, str(tmp_path))) < 1e-6


@with_islands
def copies_that_differ(folder):
    model, optimizer = island(folder, "oslo", model=by_hsdp())
    if dist.get_rank() == 3:
        with torch.no_grad():
            next(model.parameters()).to_local().add_(1)
    return training.error_of(lambda: train(model, optimizer, range(2)))


def test_copies_of_a_shard_that_differ_are_named(ranks, tmp_path):
    for text in ranks(4, copies_that_differ, str(tmp_path)):
        assert "ranks of island 'oslo' that hold the same parameters have other weights" in text


def stage(number):
    """A stage of a pipeline; each has parameters of its own."""
    torch.manual_seed(number)
    name, sizes = (("first", (8, BLOCK)), ("second", (8, 8 + BLOCK)))[number]
    return nn.ModuleDict({name: nn.Linear(*sizes)})


class Stage(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.parts = stage(number)

    def forward(self, inputs):
        (part,) = self.parts.values()
        return part(inputs)[:, :BLOCK]


@with_islands
def stages(folder, copies):
    """Anchors of stages that meet in one mailbox, and of each in a mailbox of its own."""
    rank = dist.get_rank()
    number = rank // copies
    pairs = [dist.new_group([n * copies + i for i in range(copies)]) for n in range(2)]
    alone = [bagua.communication.new_group(dist.get_process_group_ranks(pair)) for pair in pairs]
    found = []
    for there, group in ((f"{folder}/both", None), (f"{folder}/{number}", alone[number])):
        made = []
        for name in NAMES[:2]:
            model = Stage(number)
            if copies > 1:
                model = DistributedDataParallel(model, process_group=pairs[number])
            shared = {"codec": "int4_block", "mailbox": {"quorum": 2, "grace": 60.0}}
            made.append(island(there, name, model=model, group=group, overlap_steps=1, **shared))
        for step in range(9):
            for model, optimizer in made:
                train(model, optimizer, range(step, step + 1))
        found += [anchor_bits(model) for model, _ in made]
        rounds = made[0][0].bagua_algorithm.outer_rounds
        dist.barrier()
    return found, rounds


@pytest.mark.parametrize("copies", [1, 2])
def test_stages_of_a_pipeline_meet_as_shards(ranks, tmp_path, copies):
    found = ranks(2 * copies, stages, str(tmp_path), copies)
    for bits, rounds in found:
        assert len(set(bits)) == 1
        assert rounds >= 3
    assert len({bits[0] for bits, _ in found}) == 2
    assert len(list((tmp_path / "both").glob("round-000000000/shard-*"))) == 4


# What cannot meet.


@with_islands
def refusals(folder):
    """Errors of islands that cannot meet in a mailbox."""
    rank = dist.get_rank()
    of_shards(folder, "oslo")
    alone = [bagua.communication.new_group([member]) for member in range(2)][rank]
    texts = [
        training.error_of(lambda: island(folder, NAMES[1 + rank], model=network(), group=alone))
    ]
    flat = init_device_mesh("cpu", (2,))
    by_rows = fully_shard(network(), mesh=flat, shard_placement_fn=lambda p: Shard(p.dim() - 1))
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    copied = network()
    fully_shard(copied[0], mesh=mesh)
    copies = fully_shard(copied, mesh=flat)
    beside = nn.Sequential(fully_shard(network(), mesh=flat), nn.Linear(1, 1))
    stage = nn.Sequential(*[nn.Linear(1, 1) for _ in range(1 + rank)])
    for model in (by_rows, copies, beside, stage):
        texts.append(training.error_of(lambda model=model: island(folder, "paris", model=model)))
    return texts


def test_islands_that_cannot_meet_are_refused_by_name(ranks, tmp_path):
    for texts in ranks(2, refusals, str(tmp_path)):
        assert "begun with 'islands of 2 shard(s)', and this island has 'islands of 1" in texts[0]
        assert "number of shards, or this one another URL" in texts[0]
        assert "begun with 'shard 0: " in texts[1] or "a rank of island" in texts[1]
        assert "holds shards, and copies of other parameters as well" in texts[2]
        assert "parameters '1.weight', '1.bias' are trainable and not sharded" in texts[3]
        assert "connect_islands(...)" in texts[2]
        assert "begun with 'shard 0: " in texts[4] or "a rank of island" in texts[4]
