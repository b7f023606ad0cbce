"""Islands that meet in a mailbox. Where one process has several they take turns."""

import collections
import contextlib
import copy
import errno
import gc
import io
import itertools
import os
import random
import shutil
import signal
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import bagua.torch_api as bagua
import pytest
import torch
import torch.distributed as dist
from bagua import BaguaError, BaguaMismatchError, BaguaTimeoutError
from bagua.__main__ import main
from bagua._outer import leaving
from bagua._outer.mailbox import bodies, box, claims, patience, rounds as mailbox_rounds, store
from bagua._outer.mailbox.letters import Contribution
from bagua.torch_api.algorithms import DiLoCoAlgorithm, Mailbox, OuterSGD
from fsspec.implementations.memory import MemoryFileSystem
from oracle.mailbox import Islands
from ranks.test_diloco import own_step
from support import training
from torch import nn
from torch.nn.parallel import DistributedDataParallel

NAMES = "oslo", "paris", "rome"
RULE = OuterSGD(0.7, 0.3)
SOON = 0.01  # seconds of grace
PATIENT = box._LOOKS, box._BETWEEN_FIRST_AND_LAST  # before a test is hasty


def island(folder, name, *, seed=0, group=None, mailbox=None, model=None, **arguments):
    """(model, optimizer) of an island that has its own process group, of one rank."""
    model = training.network(seed) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = {"quorum": 1, "grace": SOON} | (mailbox or {})
    arguments = {"outer_optimizer": RULE, "interval": 2} | arguments
    algorithm = DiLoCoAlgorithm(elastic=Mailbox(str(folder), island=name, **own), **arguments)
    model.with_bagua([optimizer], algorithm, process_group=group)
    return model, optimizer


def train(model, optimizer, steps, seed=0, samples=0):
    for step in steps:
        optimizer.zero_grad()
        if samples:
            model.bagua_samples(samples)
        loss = training.squared_error(model, training.batch(step, seed))
        loss.backward()
        optimizer.step()


def hasty(silence=15.0):
    """Have claims change more often, and files be refused at the first look."""
    claims._BEAT, claims._SILENCE = 0.05, silence
    box._LOOKS, box._BETWEEN_FIRST_AND_LAST = 1, 0.0


def outer_state(model):
    state = model.bagua_algorithm.state_dict()
    own = "mean/", "rank0/"
    return {key: value for key, value in state.items() if "/" in key and not key.startswith(own)}


def anchor_bits(model):
    return training.bits(outer_state(model).values())


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


# Three islands.


@training.with_group
def forty_rounds(folder, codec):
    """Losses and bits of anchors of this island, losses of a group, and bytes that it counted."""
    size, rank = dist.get_world_size(), dist.get_rank()
    groups = [bagua.communication.new_group([member]) for member in range(size)]
    own = {"quorum": size, "grace": 60.0, "keep": 100}
    arguments = {"codec": codec, "interval": 1}
    mailed = island(folder, NAMES[rank], group=groups[rank], mailbox=own, **arguments)
    model = training.network()
    grouped = model, torch.optim.SGD(model.parameters(), lr=0.1)
    model.with_bagua([grouped[1]], DiLoCoAlgorithm(RULE, **arguments))
    losses = []
    for each in (mailed, grouped):
        losses.append([])
        for step in range(40):
            own_step(*each, step)
            with torch.no_grad():
                loss = training.squared_error(each[0], training.batch(0, 0))
            losses[-1].append(loss.item())
    outer = mailed[0].bagua_stats()["outer"]
    dist.barrier()  # or a mailbox could lose an island in the last round
    return losses, anchor_bits(mailed[0]), outer


def test_forty_rounds_of_three_islands_are_those_of_a_group(ranks, tmp_path):
    found = ranks(3, forty_rounds, str(tmp_path), None)
    assert len({bits for _, bits, _ in found}) == 1
    for (mailed, grouped), _, outer in found:
        assert (outer["rounds"], outer["late_rounds"]) == (40, 0)
        torch.testing.assert_close(torch.tensor(mailed), torch.tensor(grouped), rtol=0, atol=1e-6)


def test_islands_at_four_bits_hold_equal_anchors_and_send_what_the_codec_makes(ranks, tmp_path):
    found = ranks(3, forty_rounds, str(tmp_path), "int4_block")
    assert len({bits for _, bits, _ in found}) == 1
    payload = sum(p.numel() for p in training.network().parameters()) * 0.5
    for file in tmp_path.glob("round-*/from-*"):
        assert payload <= file.stat().st_size <= 2 * payload + 1024  # tiny blocks have statistics
    assert len(list(tmp_path.glob("round-*/from-*"))) == 3 * 40
    first = [each[0] for (each, _), _, _ in found]
    last = [each[-1] for (each, _), _, _ in found]
    assert sum(last) < sum(first)


# Late, weighted, of another seed.


@training.with_group
def late_and_weighted(folder):
    """Trains two islands, one of which misses a round, beside the oracle."""
    shared = {"weight": "samples", "overlap_steps": 1}
    oslo = island(folder, "oslo", mailbox={"quorum": 2}, **shared)
    paris = island(folder, "paris", seed=5, mailbox={"quorum": 2}, **shared)
    expected = Islands(weights(oslo[0]), RULE.lr, RULE.momentum)
    close = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(weights(paris[0]), weights(oslo[0]), **close)  # it has joined
    own = {}
    for name, each, samples in (("oslo", oslo, 3), ("paris", paris, 5)):
        train(*each, range(2), samples, samples)
        own[name] = weights(each[0])
    expected.round([own["oslo"], own["paris"]], [6, 10])
    twins = {}
    for name, each, samples in (("oslo", oslo, 3), ("paris", paris, 5)):
        twins[name] = trained_alone(each, own[name], 2, samples)
        train(*each, range(2, 3), samples, samples)
        now = expected.after(0, twins[name], own[name])
        torch.testing.assert_close(weights(each[0]), now, **close)
    # Paris makes a round alone.
    of_paris = paris[0].bagua_algorithm._ranks._mailbox
    object.__setattr__(of_paris, "quorum", 1)
    train(*paris, range(3, 4), 5, 5)
    expected.round([weights(paris[0])], [10])
    train(*paris, range(4, 5), 5, 5)
    object.__setattr__(of_paris, "quorum", 2)
    # Oslo hears of it at its launch, and its steps count in the round after.
    before = trained_alone(oslo, weights(oslo[0]), 3, 3)
    train(*oslo, range(3, 4), 3, 3)
    torch.testing.assert_close(weights(oslo[0]), expected.late(1, before), **close)
    train(*paris, range(5, 6), 5, 5)
    expected.round([weights(oslo[0]), weights(paris[0])], [6, 10])
    for each, samples in ((oslo, 3), (paris, 5)):
        train(*each, range(6, 7), samples, samples)
        found = [value for key, value in outer_state(each[0]).items() if key.startswith("anchor/")]
        torch.testing.assert_close(found, expected.anchors[3], **close)
    return anchor_bits(oslo[0]), anchor_bits(paris[0])


def trained_alone(each, start, step, seed):
    """Weights after a step from `start`, which nothing averages."""
    twin = training.network()
    with torch.no_grad():
        for p, value in zip(twin.parameters(), start, strict=True):
            p.copy_(value)
    train(twin, torch.optim.SGD(twin.parameters(), lr=0.1), range(step, step + 1), seed)
    return weights(twin)


def test_a_late_island_and_weights_are_those_of_the_oracle(ranks, tmp_path):
    ((oslo, paris),) = ranks(1, late_and_weighted, str(tmp_path))
    assert oslo == paris


@training.with_group
def late_after_sending(folder):
    """Has an island send after the others have decided; its samples count in the round after."""
    shared = {"weight": "samples", "overlap_steps": 1, "mailbox": {"quorum": 2}}
    oslo = island(folder, "oslo", **shared)
    paris = island(folder, "paris", **shared)
    expected = Islands(weights(oslo[0]), RULE.lr, RULE.momentum)
    close = {"rtol": 1e-5, "atol": 1e-6}
    train(*oslo, range(1), 3, 3)
    train(*paris, range(1), 5, 5)
    decided = threading.Event()
    of_oslo, of_paris = (each[0].bagua_algorithm._ranks for each in (oslo, paris))
    contribute = of_oslo._post.box.contribute
    of_oslo._post.box.contribute = lambda *letter: decided.wait(60) and contribute(*letter)
    train(*oslo, range(1, 2), 3, 3)
    object.__setattr__(of_paris._mailbox, "quorum", 1)
    train(*paris, range(1, 2), 5, 5)
    expected.round([weights(paris[0])], [10])
    train(*paris, range(2, 3), 5, 5)
    object.__setattr__(of_paris._mailbox, "quorum", 2)
    decided.set()
    before = trained_alone(oslo, weights(oslo[0]), 2, 3)
    train(*oslo, range(2, 3), 3, 3)
    torch.testing.assert_close(weights(oslo[0]), expected.late(0, before), **close)
    for each, samples in ((oslo, 3), (paris, 5)):
        train(*each, range(3, 4), samples, samples)
    expected.round([weights(oslo[0]), weights(paris[0])], [4 * 3, 2 * 5], [2, 1])
    for each, samples in ((oslo, 3), (paris, 5)):
        train(*each, range(4, 5), samples, samples)
        found = [value for key, value in outer_state(each[0]).items() if key.startswith("anchor/")]
        torch.testing.assert_close(found, expected.anchors[2], **close)
    return of_oslo.stats()["late_rounds"], anchor_bits(oslo[0]) == anchor_bits(paris[0])


def test_samples_of_an_island_that_is_late_after_sending_count_later(ranks, tmp_path):
    assert ranks(1, late_after_sending, str(tmp_path)) == [(1, True)]


@training.with_group
def elsewhere_in_the_cycle(folder):
    """An island that joins while the fragments are in the middle of their cycle."""
    shared = {"fragments": 2, "interval": 4, "codec": "int4_block"}
    model, optimizer = island(folder, "oslo", **shared)
    train(model, optimizer, range(6))  # three rounds
    other = island(folder, "paris", **shared)
    train(*other, range(5))
    train(model, optimizer, range(6, 9))
    rounds = [each.bagua_algorithm._loop.state.communications for each in (model, other[0])]
    model.bagua_algorithm.sync()
    other[0].bagua_algorithm.sync()
    model.bagua_algorithm._ranks._catch_up(model.bagua_algorithm._loop)
    assert training.bits(other[0].parameters()) == training.bits(
        value for key, value in outer_state(other[0]).items() if key.startswith("anchor/")
    )
    return rounds, anchor_bits(model), anchor_bits(other[0])


def test_an_island_goes_on_where_the_others_are_in_the_cycle_of_fragments(ranks, tmp_path):
    (((first, second), model, other),) = ranks(1, elsewhere_in_the_cycle, str(tmp_path))
    assert first > 3
    assert second > 3
    assert model == other


# Ends and beginnings.


def killed(model):
    """Let an island end as a killed one does: it leaves its claim."""
    members = model.bagua_algorithm._ranks
    place, left = members._post.box.place, members._post.claim._name
    remove, place.remove = place.remove, lambda *_: None
    members._post.claim.release(60.0)
    members._post.claim._thread.join()
    place.remove = remove
    assert left in os.listdir(os.path.join(place.url, "islands"))


def begin_again():
    gc.collect()
    bagua.destroy_process_group()
    bagua.init_process_group()


@training.with_group
def killed_and_started(folder):
    hasty(silence=0.5)
    arguments = {"mailbox": {"keep": 2}, "codec": "int4_block"}
    model, optimizer = island(folder, "oslo", **arguments)
    train(model, optimizer, range(15))  # and a step in which no round was
    before = anchor_bits(model)
    killed(model)
    begin_again()
    model, optimizer = island(folder, "oslo", seed=3, **arguments)
    found = model.bagua_algorithm.outer_rounds, before == anchor_bits(model)
    train(model, optimizer, range(10))
    rounds, claim = model.bagua_algorithm.outer_rounds, model.bagua_algorithm._ranks._post.claim
    model.bagua_algorithm.close()
    claim._thread.join()
    return found, rounds


def test_islands_that_were_all_killed_go_on_after_the_last_round(ranks, tmp_path):
    ((found, rounds),) = ranks(1, killed_and_started, str(tmp_path))
    assert found == (7, True)
    assert rounds == 12
    assert len(list(tmp_path.glob("anchor-*"))) == 2  # and no round before the older one
    assert len(list(tmp_path.glob("round-*"))) <= 2 * 2 + 1
    assert list(tmp_path.glob("islands/*")) == []  # given back at the end


@training.with_group
def loads(folder, counts, gone):
    """What an island has trained beyond the anchors when it saved, and when that was loaded, and
    the steps since it counted.

    `counts`: it was killed after a round that had what it had saved. `gone`: others have removed
    that round.
    """
    hasty(silence=0.5)
    own = {"keep": 1 if gone else 16}
    model, optimizer = island(folder, "oslo", mailbox=own)
    other = island(folder, "paris", mailbox=own)
    train(model, optimizer, range(3))  # a round, and one step of the next
    saved = copy.deepcopy((model.state_dict(), model.bagua_algorithm.state_dict()))
    before = differences(weights(model), anchors(model))
    train(model, optimizer, range(3, 3 + counts))
    killed(model)
    train(*other, range(8))
    del model, optimizer, other
    begin_again()
    model, _ = island(folder, "oslo", mailbox=own)
    for part, state in zip((model, model.bagua_algorithm), saved, strict=True):
        part.load_state_dict(state)
    training.squared_error(model, training.batch(0, 0))  # the next step begins
    steps = model.bagua_algorithm.state_dict()["rank0/trained_steps"].tolist()
    return before, differences(weights(model), anchors(model)), steps, files_of(folder)[0]


def test_what_a_checkpoint_has_and_a_round_after_it_counted_counts_once(ranks, tmp_path):
    for counts, gone in itertools.product((True, False), (True, False)):
        folder = tmp_path / f"{counts}-{gone}"
        ((before, after, steps, rounds),) = ranks(1, loads, str(folder), counts, gone)
        assert (1 in rounds) != gone
        assert steps == [[1.0 - counts, 0.0]]
        for own, found in zip(before, after, strict=True):
            assert own.any()
            torch.testing.assert_close(found, own * (1 - counts), rtol=0, atol=1e-6)


@training.with_group
def loads_with_a_round_in_flight(folder, counts):
    """Changes of an island beyond the anchors, and the steps that will count, after a load.

    It saved a step behind the launch of a round, in which it `counts`, or came late to.
    """
    hasty(silence=0.5)
    own = {"overlap_steps": 2, "interval": 4, "mailbox": {"keep": 16}}
    model, optimizer = island(folder, "oslo", **own)
    other = island(folder, "paris", **own)
    first = weights(model)
    post = model.bagua_algorithm._ranks._post
    others = threading.Thread()
    if not counts:
        others = cut_off_after_mailing(post.box, False, partial(train, *other, range(7)))
    train(model, optimizer, range(4))
    launched = weights(model)
    train(model, optimizer, range(4, 5))
    saved = copy.deepcopy((model.state_dict(), model.bagua_algorithm.state_dict()))
    assert saved[1]["in_flight"] == 1
    if not counts:
        others.join()
    expected = differences(weights(model), launched if counts else first)
    killed(model)
    del model, optimizer, other
    begin_again()
    model, _ = island(folder, "oslo", **own)
    model.bagua_algorithm._ranks.counted = not counts  # of another round
    for part, state in zip((model, model.bagua_algorithm), saved, strict=True):
        part.load_state_dict(state)
    training.squared_error(model, training.batch(0, 0))  # the next step begins
    ((steps, _),) = model.bagua_algorithm.state_dict()["rank0/trained_steps"].tolist()
    return differences(weights(model), anchors(model)), expected, steps


def test_a_contribution_to_a_round_in_flight_counts_once_after_a_load(ranks, tmp_path):
    for counts in (True, False):
        folder = str(tmp_path / str(counts))
        ((found, expected, steps),) = ranks(1, loads_with_a_round_in_flight, folder, counts)
        assert steps == (1.0 if counts else 5.0)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@training.with_group
def loads_what_lies_in_a_round(folder):
    """As above: the island was killed when it had mailed what it saved, to a round that is open."""
    hasty(silence=0.5)
    own = {"overlap_steps": 1, "mailbox": {"quorum": 2}}
    model, optimizer = island(folder, "oslo", **own)
    train(model, optimizer, range(1))
    saved = copy.deepcopy((model.state_dict(), model.bagua_algorithm.state_dict()))
    train(model, optimizer, range(1, 2))
    while not list(Path(folder).glob("round-000000000/from-oslo-*")):
        threading.Event().wait(0.01)
    killed(model)
    model.bagua_algorithm._ranks._stop.set()  # its thread waits for another island
    del model, optimizer
    begin_again()
    model, _ = island(folder, "oslo", **own)
    for part, state in zip((model, model.bagua_algorithm), saved, strict=True):
        part.load_state_dict(state)
    training.squared_error(model, training.batch(0, 0))
    steps = model.bagua_algorithm.state_dict()["rank0/trained_steps"].tolist()
    return differences(weights(model), anchors(model)), steps


def test_what_a_killed_island_has_mailed_to_an_open_round_is_not_mailed_again(ranks, tmp_path):
    ((found, steps),) = ranks(1, loads_what_lies_in_a_round, str(tmp_path))
    assert steps == [[0.0, 0.0]]
    assert not any(each.any() for each in found)


def files_of(folder):
    """Numbers of the rounds and of the anchors that lie in a mailbox."""
    names = sorted(os.listdir(folder))
    return [
        [int(name.split("-")[1]) for name in names if name.startswith(kind)]
        for kind in ("round-", "anchor-")
    ]


@training.with_group
def killed_in_each_round(folder):
    """Files after each round of an island that is killed as soon as it has decided one."""
    hasty(silence=0.2)
    found = []
    for _ in range(9):
        model, optimizer = island(folder, "oslo", mailbox={"keep": 2})
        train(model, optimizer, range(2))
        found.append(files_of(folder))
        killed(model)
        del model, optimizer
        begin_again()
    return found


@training.with_group
def whose_authors_do_nothing_more(folder):
    """Files after each round of islands that do not know who has decided one; bits of anchors."""
    own = {"quorum": 3, "keep": 2}
    made = [island(folder, name, mailbox=own, overlap_steps=1) for name in NAMES]
    for model, _ in made:
        box = model.bagua_algorithm._ranks._post.box
        box.decide = lambda *manifest, decide=box.decide: decide(*manifest) and False
    found = []
    for step in range(41):
        for name, each in zip(NAMES, made, strict=True):
            train(*each, range(step, step + 1), len(name))
        found.append(files_of(folder))
    return found, len({anchor_bits(model) for model, _ in made})


@training.with_group
def killed_before_it_removes(folder):
    """Files when an island is killed between an anchor and what is old, and two rounds later."""
    hasty(silence=0.2)
    own = {"keep": 4}
    model, optimizer = island(folder, "oslo", mailbox=own)
    other = island(folder, "paris", mailbox=own)
    train(model, optimizer, range(16))
    model.bagua_algorithm._ranks._post.box.forget = None  # fails the thread that would call it
    with pytest.raises(TypeError):
        train(model, optimizer, range(16, 18))
    killed(model)
    before = files_of(folder)
    train(*other, range(4))
    return before, files_of(folder)


def test_a_mailbox_keeps_its_bound_while_those_are_killed_who_should_keep_it(ranks, tmp_path):
    (lives,) = ranks(1, killed_in_each_round, str(tmp_path / "lives"))
    assert lives[-1][0][-1] == 8
    for numbers, anchors in lives:
        assert len(numbers) <= 2 * 2 + 1, lives
        assert len(anchors) <= 3, lives
    ((steps, bits),) = ranks(1, whose_authors_do_nothing_more, str(tmp_path / "authors"))
    assert (steps[-1][0][-1], bits) == (19, 1)
    for numbers, anchors in steps:
        assert len(numbers) <= 2 * (2 + 3) + 1, steps
        assert len(anchors) <= 3, steps
    ((before, after),) = ranks(1, killed_before_it_removes, str(tmp_path / "removes"))
    assert before == [[*range(9)], [0, 4, 8]]
    assert after == [[*range(4, 10)], [4, 8]]


@training.with_group
def two_of_one_name(folder):
    hasty(silence=30.0)
    model, optimizer = island(folder, "oslo")
    with pytest.raises(BaguaError) as refused:
        island(folder, "oslo")
    train(model, optimizer, range(2))
    return str(refused.value), model.bagua_algorithm.outer_rounds


def test_a_second_process_of_one_name_is_refused(ranks, tmp_path):
    ((text, rounds),) = ranks(1, two_of_one_name, str(tmp_path))
    assert "another process is island 'oslo', and lives" in text
    assert rounds == 1


@training.with_group
def another_plan(folder):
    island(folder, "oslo")
    with pytest.raises(BaguaMismatchError) as refused:
        island(folder, "paris", codec="int4_block")
    return str(refused.value)


def test_an_island_of_another_plan_is_refused(ranks, tmp_path):
    (text,) = ranks(1, another_plan, str(tmp_path))
    assert "its run was begun with 'codec=None" in text
    assert "this island has 'codec=int4_block" in text


@training.with_group
def another_anchor(folder):
    """Oslo's anchor has another bit than that of two others."""
    model, optimizer = island(folder, "oslo")
    train(model, optimizer, range(2))
    with torch.no_grad():
        model.bagua_algorithm._loop.state.fragments[0].anchors[0].view(-1)[0] += 1
    other = island(folder, "paris")
    train(*other, range(2))
    with pytest.raises(BaguaMismatchError) as refused:
        train(model, optimizer, range(2, 4))
    return str(refused.value)


def test_an_island_whose_anchor_differs_is_refused_by_name(ranks, tmp_path):
    (text,) = ranks(1, another_anchor, str(tmp_path))
    assert "the anchor of island 'oslo' before outer round 2 differs from that of paris" in text


# Waits, and islands that have left.


def briefly():
    """Begin anew with waits of three seconds at most."""
    bagua.destroy_process_group()
    bagua.init_process_group(timeout=timedelta(seconds=3))


@training.with_group
def begun_without_an_anchor(folder):
    hasty()
    briefly()
    island(folder, "oslo")
    (Path(folder) / "anchor-000000000").write_bytes(b"half of it")
    with pytest.raises(BaguaTimeoutError) as failed:
        island(folder, "paris")
    return str(failed.value)


def test_an_island_that_finds_no_whole_anchor_stops_waiting_and_names_it(ranks, tmp_path):
    (text,) = ranks(1, begun_without_an_anchor, str(tmp_path))
    assert f"mailbox {tmp_path}: anchor-000000000, which others have mailed, is not there" in text
    assert "3 s are over. Remove it and start this island again" in text


@training.with_group
def overtaken_while_it_saves(folder):
    """The others make rounds, and remove one in which this island has just launched its part."""
    briefly()
    shared = {"overlap_steps": 1, "mailbox": {"keep": 1}}
    model, optimizer = island(folder, "oslo", **shared)
    other = island(folder, "paris", **shared)
    overtaken = threading.Event()
    box = model.bagua_algorithm._ranks._post.box
    contribute, anchor = box.contribute, box.anchor
    box.contribute = lambda *letter: overtaken.wait(60) and contribute(*letter)
    train(model, optimizer, range(2))
    train(*other, range(9))
    overtaken.set()
    box.anchor = lambda *_: None  # it is listed, and cannot be read yet
    with pytest.raises(BaguaTimeoutError) as failed:
        model.bagua_algorithm.state_dict()
    box.anchor = anchor
    rounds = model.bagua_algorithm.state_dict()["outer_rounds"]
    train(model, optimizer, range(2, 4))
    return str(failed.value), rounds, anchor_bits(model) == anchor_bits(other[0])


def test_an_island_that_is_overtaken_while_it_saves_goes_on_with_an_anchor(ranks, tmp_path):
    ((text, rounds, same),) = ranks(1, overtaken_while_it_saves, str(tmp_path))
    assert ", which others have mailed, is not there or not whole" in text
    assert rounds == 0  # before the next look
    assert same


@training.with_group
def overtaken_as_it_saves(folder):
    """Counters in a state whose saving finds that the others are further, and its anchor's bits."""
    shared = {"overlap_steps": 1, "mailbox": {"keep": 1}}
    model, optimizer = island(folder, "oslo", **shared)
    other = island(folder, "paris", **shared)
    overtaken = threading.Event()
    box = model.bagua_algorithm._ranks._post.box
    contribute = box.contribute
    box.contribute = lambda *letter: overtaken.wait(60) and contribute(*letter)
    train(model, optimizer, range(2))
    train(*other, range(9))
    overtaken.set()
    state, theirs = (each.bagua_algorithm.state_dict() for each in (model, other[0]))
    same = all(torch.equal(state[key], theirs[key]) for key in state if key.startswith("anchor/"))
    return [state[key] for key in ("outer_rounds", "communications", "in_flight")], same


def test_a_state_has_the_counters_of_the_anchor_that_is_found_as_it_is_saved(ranks, tmp_path):
    assert ranks(1, overtaken_as_it_saves, str(tmp_path)) == [([4, 4, 0], True)]


@training.with_group
def overtaken_in_a_round(folder, codec, overlap, counts):
    """Oslo has launched a round, in which it `counts` or not, that others remove before it looks.

    Its changes beyond the anchor, those expected, whether it has a residual, and its weight in the
    round of a `sync()`, by which its weights are the anchor's.
    """
    shared = {"codec": codec, "overlap_steps": overlap, "weight": "samples", "mailbox": {"keep": 1}}
    model, optimizer = island(folder, "oslo", **shared)
    other = island(folder, "paris", **shared)
    first, post = weights(model), model.bagua_algorithm._ranks._post
    overtaken = cut_off_after_mailing(post.box, counts, lambda: train(*other, range(11), 7, 5))
    train(model, optimizer, range(1), 0, 3)
    launched = trained_alone((model, optimizer), weights(model), 1, 0)
    now = trained_alone((model, optimizer), launched, 2, 0) if overlap else launched
    train(model, optimizer, range(1, 2 + overlap), 0, 3)
    overtaken.join()
    expected = differences(now, launched if counts else first)
    found = differences(weights(model), anchors(model))
    buckets = model.bagua_algorithm._loop.buckets if codec else []
    residual = any(bucket.ops[0].page.memory.value(0).any() for bucket in buckets)
    model.bagua_algorithm.sync()
    torch.testing.assert_close(weights(model), anchors(model), rtol=0, atol=0)
    counted = post.box.manifest(model.bagua_algorithm.outer_rounds - 1).counted
    weight = sum(each.weight for each in counted if each.island == "oslo")
    return found, expected, residual, weight


def cut_off_after_mailing(box, counts, others):
    """Have the next contribution come before `others` act, or after it, and be looked at later."""
    contribute, mailed, over = box.contribute, threading.Event(), threading.Event()

    def slowly(*letter):
        box.contribute = contribute
        assert counts or over.wait(60)
        made = contribute(*letter)
        mailed.set()
        assert over.wait(60)
        return made

    def act():
        assert not counts or mailed.wait(60)
        others()
        over.set()

    box.contribute = slowly
    thread = threading.Thread(target=act)
    thread.start()
    return thread


def anchors(model):
    return [each.detach() for each in model.bagua_algorithm._loop.state.fragments[0].anchors]


def differences(ones, others):
    return [one - other for one, other in zip(ones, others, strict=True)]


def test_an_island_that_is_overtaken_contributes_what_it_has_trained_once(ranks, tmp_path):
    for number, (codec, overlap, counts) in enumerate(
        itertools.product((None, "int4_block"), (0, 1), (True, False))
    ):
        case = ranks(1, overtaken_in_a_round, str(tmp_path / str(number)), codec, overlap, counts)
        ((found, expected, residual, weight),) = case
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
        assert residual == (counts and codec is not None)
        assert weight == 3 * (overlap if counts else 2 + overlap)


@training.with_group
def overtaken_in_sync(folder, counts):
    """As above, in a `sync()`; the islands that count in its last round."""
    shared = {"weight": "samples", "mailbox": {"keep": 1}}
    model, optimizer = island(folder, "oslo", **shared)
    other = island(folder, "paris", **shared)
    post = model.bagua_algorithm._ranks._post
    train(model, optimizer, range(1), 0, 3)
    overtaken = cut_off_after_mailing(post.box, counts, lambda: train(*other, range(11), 7, 5))
    model.bagua_algorithm.sync()
    overtaken.join()
    torch.testing.assert_close(weights(model), anchors(model), rtol=0, atol=0)
    counted = post.box.manifest(model.bagua_algorithm.outer_rounds - 1).counted
    return [each.island for each in counted]


def test_sync_of_an_island_that_is_overtaken_ends_at_the_anchor_with_all_it_has_trained(
    ranks, tmp_path
):
    for counts, islands in ((True, ["paris"]), (False, ["oslo"])):
        folder = str(tmp_path / str(counts))
        assert ranks(1, overtaken_in_sync, folder, counts) == [islands]


@training.with_group
def cut_off_while_it_decides(folder):
    """The others make the round that this island decides, and remove it, before its file comes."""
    shared = {"mailbox": {"keep": 1}}
    model, optimizer = island(folder, "oslo", **shared)
    other = island(folder, "paris", **shared)
    cut, over = threading.Event(), threading.Event()
    box = model.bagua_algorithm._ranks._post.box
    decide = box.decide

    def late(manifest, attempt):
        cut.set()
        return over.wait(60) and decide(manifest, attempt)

    box.decide = late

    def others():
        assert cut.wait(60)
        train(*other, range(6), 7)  # of three rounds the files of the first are gone
        over.set()

    thread = threading.Thread(target=others)
    thread.start()
    train(model, optimizer, range(2))
    thread.join()
    train(model, optimizer, range(2, 4))
    algorithm = other[0].bagua_algorithm
    algorithm._ranks._catch_up(algorithm._loop)
    rounds = [each.bagua_algorithm.outer_rounds for each in (model, other[0])]
    return rounds, anchor_bits(model) == anchor_bits(other[0])


def test_an_island_that_was_cut_off_while_it_decides_a_round_takes_that_of_the_others(
    ranks, tmp_path
):
    assert ranks(1, cut_off_while_it_decides, str(tmp_path)) == [([4, 4], True)]


@training.with_group
def out_of_reach_for_a_while(folder):
    """The islands that live after minutes in which no claim could be renewed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(claims, "_BEAT", 10_000.0)
        made = [island(folder, name)[0] for name in NAMES[:2]]
        lives = made[0].bagua_algorithm._ranks._post._lives
        lives.look()
        later = claims.time.monotonic() + 600.0
        patch.setattr(claims.time, "monotonic", lambda: later)
        lives.look()
        return sorted(lives.alive())


def test_islands_are_not_taken_for_dead_while_the_storage_answers_nobody(ranks, tmp_path):
    assert ranks(1, out_of_reach_for_a_while, str(tmp_path)) == [["oslo", "paris"]]


@training.with_group
def left_alone(folder):
    """Syncs an island after the other one has ended, with a quorum of two."""
    shared = {"mailbox": {"quorum": 1}, "weight": "samples"}
    model, optimizer = island(folder, "oslo", **shared)
    other, its = island(folder, "paris", **shared)
    train(other, its, range(2), samples=1)
    other.bagua_algorithm.close()  # as its process does when it ends
    object.__setattr__(model.bagua_algorithm._ranks._mailbox, "quorum", 2)
    train(model, optimizer, range(1), samples=1)
    model.bagua_algorithm.sync()
    return model.bagua_algorithm.outer_rounds, model.bagua_algorithm._ranks._post.ending


def test_sync_does_not_wait_for_islands_that_have_ended(ranks, tmp_path):
    assert ranks(1, left_alone, str(tmp_path)) == [(2, False)]


@training.with_group
def broken_elsewhere(folder):
    """Warnings of an island while another one's weights hold NaN."""
    model, optimizer = island(folder, "oslo")
    other = island(folder, "paris")
    train(*other, range(1))
    with torch.no_grad():
        next(other[0].parameters()).view(-1)[0] = torch.nan
    theirs = training.warnings_of(lambda: train(*other, range(1, 2)))
    return theirs, training.warnings_of(lambda: train(model, optimizer, range(2)))


def test_a_mean_that_is_not_finite_names_the_island_that_broke_it(ranks, tmp_path):
    ((theirs, own),) = ranks(1, broken_elsewhere, str(tmp_path))
    for said in (theirs, own):
        assert sum("The weights of island(s) paris hold NaN" in text for text in said) == 1, said


@training.with_group
def buffers_by_samples(folder):
    """A mean buffer of two islands with 1 and 3 samples, and those two before the round."""
    shared = {"weight": "samples", "overlap_steps": 1, "mailbox": {"quorum": 2}}
    made, own = [], []
    for name in NAMES[:2]:
        normalised = nn.Sequential(nn.BatchNorm1d(5), *training.network())
        made.append(island(folder, name, model=normalised, **shared))
    for (model, optimizer), samples in zip(made, (1, 3), strict=True):
        train(model, optimizer, range(2), samples, samples)
        own.append(model[0].running_mean.clone())
    for (model, optimizer), samples in zip(made, (1, 3), strict=True):
        train(model, optimizer, range(2, 3), samples, samples)
    return own, [model[0].running_mean for model, _ in made]


def test_buffers_of_islands_are_weighted_by_samples_as_their_weights(ranks, tmp_path):
    (((oslo, paris), means),) = ranks(1, buffers_by_samples, str(tmp_path))
    for mean in means:
        torch.testing.assert_close(mean, 0.25 * oslo + 0.75 * paris)


# Files of others, and a folder that fails.


@training.with_group
def among_bad_files(folder):
    """Trains with bad files in the folder of each round; returns warnings and the rounds made."""
    hasty()  # a file is damaged for good
    folder, secret = Path(folder), "of all islands, 16 bytes"
    model, optimizer = island(folder, "oslo", mailbox={"secret": secret, "keep": 100})
    other = island(folder / "other", "rome", mailbox={"secret": "of another mailbox!!"})
    train(*other, range(2))
    train(model, optimizer, range(2))
    (good,) = folder.glob("round-000000000/from-oslo-*")
    (forged,) = (folder / "other").glob("round-000000000/from-rome-*")
    place = folder / "round-000000001"
    place.mkdir()
    shutil.copy(good, place / good.name.replace("oslo", "replay"))
    shutil.copy(forged, place / forged.name)
    (place / "from-paris-0123456789abcdef").write_bytes(good.read_bytes()[:-1])
    (place / "from-nobody-0123456789abcdef").write_bytes(b"")
    with open(place / "from-huge-0123456789abcdef", "wb") as huge:
        huge.truncate(2**40)
    (place / "from-link-0123456789abcdef").symlink_to("/etc/passwd")
    (place / "alien").write_bytes(b"hello")
    (place / "manifest-0").write_bytes(b"BAGUAbox, says somebody else" * 9)
    said = training.warnings_of(lambda: train(model, optimizer, range(2, 6)))
    return said, model.bagua_algorithm.outer_rounds


def test_bad_files_are_refused_by_name_while_training_goes_on(ranks, tmp_path):
    ((said, rounds),) = ranks(1, among_bad_files, str(tmp_path))
    assert rounds == 3
    refused = [text for text in said if "is refused" in text]
    names = "from-replay", "from-rome", "from-paris", "from-nobody", "from-huge", "from-link"
    for name in ("manifest-0", "alien", *names):
        assert any(f"round-000000001/{name}" in text for text in refused), (name, said)


@training.with_group
def among_many_bad_files(folder, rounds, count):
    """Files that are refused by name, of so many in each round, and the rounds made."""
    hasty()
    folder, draw = Path(folder), random.Random(11)
    model, optimizer = island(
        folder, "oslo", mailbox={"secret": "of all islands, 16 bytes", "keep": 4}
    )
    other = island(folder / "other", "rome", mailbox={"secret": "of another mailbox!!"})
    train(*other, range(2))
    train(model, optimizer, range(2))
    (good,) = (each.read_bytes() for each in folder.glob("round-000000000/from-oslo-*"))
    (forged,) = (each.read_bytes() for each in folder.glob("other/round-000000000/from-rome-*"))
    refused = set()
    for number in range(1, rounds + 1):
        place = folder / f"round-{number:09d}"
        place.mkdir()
        for i in range(count):
            cut = good[: draw.randrange(len(good))]
            name = "alien" if i % 5 == 4 else f"from-island{i}"
            with open(place / f"{name}-{draw.randrange(2**64):016x}", "wb") as file:
                file.write([forged, good, cut, b"", b"alien"][i % 5])
                if i % 5 == 3:
                    file.truncate(2**40)
        said = training.warnings_of(lambda: train(model, optimizer, range(2)))
        refused |= {text.partition(" is refused: ")[0] for text in said if " is refused: " in text}
    return len(refused), model.bagua_algorithm.outer_rounds


def test_ten_thousand_bad_files_are_refused_by_name_while_training_goes_on(ranks, tmp_path):
    assert ranks(1, among_many_bad_files, str(tmp_path), 40, 250) == [(10_000, 41)]


def lags(place, seen):
    """Listings are those of the look before, the first one empty."""
    names = place.names

    def before(folder):
        old, seen[folder] = seen.get(folder, []), names(folder)
        return old

    place.names = before


def first_read(place, seen, gives):
    """Of a file that is there the first read finds what `gives` makes of it."""
    read = place.read

    def late(name, most):
        found, known = read(name, most), name in seen
        if found is None:
            return None
        seen[name] = True
        return found if known else gives(found)

    place.read = late


def stale(place, seen):
    first_read(place, seen, lambda data: None)


def partial_at_first(place, seen):
    first_read(place, seen, lambda data: data[: len(data) // 2])


def delivers_twice(place, seen):
    """A file is created again by who has created it."""
    create = place.create

    def twice(name, data):
        made = create(name, data)
        seen[name] = create(name, data)
        return made

    place.create = twice


def clocks_apart(place, seen):
    """The clock of an island's machine, and its files' times, are hours from the other's."""
    create, names = place.create, place.names
    hours = 5.0 if place._owner == "oslo" else -7.0

    def apart(call, *arguments):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "time", lambda: TIME() + hours * 3600)
            return call(*arguments)

    def created(name, data):
        made = apart(create, name, data)
        os.utime(os.path.join(place.url, name), (0.0, TIME() + hours * 3600))
        return made

    place.create, place.names = created, lambda folder: apart(names, folder)


TIME = time.time


@training.with_group
def where_a_storage_is_lax(folder, fault):
    """Rounds, late rounds, bits of anchors and refusals of two islands."""
    box._LOOKS, box._BETWEEN_FIRST_AND_LAST = PATIENT
    own = {"overlap_steps": 1, "codec": "int4_block", "mailbox": {"quorum": 2, "grace": None}}
    made = [island(folder, name, **own) for name in NAMES[:2]]
    for model, _ in made:
        fault(model.bagua_algorithm._ranks._post.box.place, {})

    def both():
        for step in range(7):
            for name, each in zip(NAMES, made, strict=False):
                train(*each, range(step, step + 1), len(name))

    said = training.warnings_of(both)
    outer = [model.bagua_stats()["outer"] for model, _ in made]
    found = [(each["rounds"], each["late_rounds"]) for each in outer]
    refused = [text for text in said if "is refused" in text]
    return found, len({anchor_bits(model) for model, _ in made}), refused


@pytest.mark.parametrize("fault", [lags, stale, partial_at_first, delivers_twice, clocks_apart])
def test_islands_meet_where_a_storage_is_lax(ranks, tmp_path, fault):
    ((found, bits, refused),) = ranks(1, where_a_storage_is_lax, str(tmp_path), fault)
    assert (found, bits, refused) == ([(3, 0)] * 2, 1, [])


@training.with_group
def in_a_folder_that_vanishes(folder):
    bagua.destroy_process_group()
    bagua.init_process_group(timeout=timedelta(seconds=5))
    model, optimizer = island(folder, "oslo")
    train(model, optimizer, range(3))
    before = anchor_bits(model)
    os.rename(folder, f"{folder}-elsewhere")
    with pytest.raises(BaguaError) as failed:
        train(model, optimizer, range(3, 4))
    return str(failed.value), before == anchor_bits(model)


def test_a_folder_that_vanishes_is_an_error_that_names_it(ranks, tmp_path):
    folder = str(tmp_path / "mailbox")
    ((text, same),) = ranks(1, in_a_folder_that_vanishes, folder)
    assert f"mailbox {folder}: " in text
    assert "See that it exists, has room and may be written" in text
    assert same


@training.with_group
def on_a_full_disk(folder):
    """Puts fail some times, as the disk is full, and then succeed."""
    model, optimizer = island(folder, "oslo")
    link, left = os.link, [5]

    def full(*arguments):
        if left[0] > 0:
            left[0] -= 1
            raise OSError(28, "No space left on device")
        return link(*arguments)

    os.link = full
    try:
        train(model, optimizer, range(4))
    finally:
        os.link = link
    return left[0], model.bagua_algorithm.outer_rounds


def test_puts_that_fail_for_a_while_are_tried_again(ranks, tmp_path):
    assert ranks(1, on_a_full_disk, str(tmp_path)) == [(0, 2)]


@training.with_group
def where_nothing_answers(folder):
    """Errors and warnings of islands that begin in a folder, and in a bucket, that hang."""
    briefly()
    answers = threading.Event()

    def hangs(*_, **__):
        answers.wait(60)
        raise ConnectionError("this storage was away")

    def begun(url):
        return training.error_of(lambda: island(url, "oslo"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patience, "_FIRST_WORD", 0.1)
        patch.setattr(patience, "_OF_A_CALL", 0.1)
        patch.setattr(os, "mkdir", hangs)
        patch.setattr(MemoryFileSystem, "pipe_file", hangs)
        with pytest.warns(RuntimeWarning) as warned:
            texts = [begun(f"{folder}/new"), begun("memory://hangs")]
    answers.set()
    return texts, [str(each.message) for each in warned]


def test_a_storage_that_hangs_at_the_start_is_told_and_given_up(ranks, tmp_path):
    ((texts, warned),) = ranks(1, where_nothing_answers, str(tmp_path))
    for url, text in zip((f"{tmp_path}/new", "memory://hangs"), texts, strict=True):
        assert text.startswith("BaguaTimeoutError: module '"), text
        assert "': island 'oslo', entering, has waited for " in text, text
        assert f" s, and mailbox {url} does not answer (reaching it)" in text, text
        assert "See that this machine reaches it, then start this island again" in text, text
        assert any(each.endswith(f" s: mailbox {url}: no answer yet") for each in warned), warned


CALLS = "pipe_file", "cat_file", "ls", "rm_file", "makedirs"


@training.with_group
def where_each_call_hangs_once():
    """Kinds of calls of a client of which one has hung, and the rounds of an island beside that."""
    answers, hung = threading.Event(), set()
    model, optimizer = island("memory://hangs-at-times", "oslo", mailbox={"keep": 1})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "_SECONDS_OF_A_CALL", 0.1)
        for kind in CALLS:
            patch.setattr(MemoryFileSystem, kind, hangs_once(kind, hung, answers))
        train(model, optimizer, range(12))
        answers.set()
    return hung, model.bagua_algorithm.outer_rounds


def hangs_once(kind, hung, answers):
    original = getattr(MemoryFileSystem, kind)

    def call(*args, **options):
        if kind not in hung:
            hung.add(kind)
            answers.wait(60)
        return original(*args, **options)

    return call


def test_a_call_of_a_client_that_hangs_is_repeated(ranks):
    assert ranks(1, where_each_call_hangs_once) == [(set(CALLS), 6)]


@training.with_group
def in_a_read_only_folder(folder):
    """Errors of an island that begins in such a folder, and of one whose folder becomes one."""
    briefly()
    model, optimizer = island(folder, "oslo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "mkdir", read_only)
        patch.setattr(os, "link", read_only)
        begins = training.error_of(lambda: island(f"{folder}/new", "paris"))
        becomes = training.error_of(lambda: train(model, optimizer, range(2)))
    return begins, becomes


def read_only(*_, **__):
    """As a file system that is mounted read-only."""
    raise OSError(errno.EROFS, "Read-only file system")


def test_a_read_only_folder_is_an_error_with_the_remedy(ranks, tmp_path):
    ((begins, becomes),) = ranks(1, in_a_read_only_folder, str(tmp_path))
    assert begins.startswith(f"BaguaError: mailbox {tmp_path}/new: it cannot be reached or written")
    assert "Give this island the right to write there" in begins
    assert "failed for 3 s (OSError: [Errno 30] Read-only file system)" in becomes
    assert "See that it exists, has room and may be written" in becomes


@training.with_group
def bytes_of_rounds(folder):
    """Files of contributions that each of three islands has read and written, and their sizes."""
    own = {"quorum": 3, "keep": 100}
    shared = {"mailbox": own, "codec": "int4_block", "overlap_steps": 1}
    made = [island(folder, name, **shared) for name in NAMES]
    payload = sum(bodies.body_bytes(bucket) for bucket in made[0][0].bagua_algorithm._loop.buckets)
    calls = [counted_calls(model.bagua_algorithm._ranks._post.box.place) for model, _ in made]
    for step in range(7):
        for name, each in zip(NAMES, made, strict=True):
            train(*each, range(step, step + 1), len(name))
    return payload, calls


def counted_calls(place):
    """(call, name of a contribution, bytes) of a place from now on."""
    calls, read, create = [], place.read, place.create

    def reads(name, most):
        data = read(name, most)
        if "/from-" in name:
            calls.append(("read", name.partition("/from-")[2].partition("-")[0], len(data)))
        return data

    def creates(name, data):
        if "/from-" in name:
            calls.append(("create", name.partition("/from-")[2].partition("-")[0], len(data)))
        return create(name, data)

    place.read, place.create = reads, creates
    return calls


def test_an_island_sends_its_part_of_a_round_once_and_reads_each_other_once(ranks, tmp_path):
    ((payload, calls),) = ranks(1, bytes_of_rounds, str(tmp_path))
    for name, own in zip(NAMES, calls, strict=True):
        expected = [("create", name)] + [("read", other) for other in NAMES if other != name]
        assert sorted(each[:2] for each in own) == sorted(expected * 3)
        assert all(payload <= size <= payload + 1024 for *_, size in own)


@training.with_group
def requests_of_rounds(folder, names):
    """Requests to the storage in three rounds of each island, whose contributions come at once."""
    own = {"quorum": len(names), "grace": 60.0, "keep": 100}
    made = [island(folder, name, mailbox=own, overlap_steps=1) for name in names]
    boxes = [model.bagua_algorithm._ranks._post.box for model, _ in made]
    come_at_once(boxes, "contribute")
    calls = [counted_requests(each.place) for each in boxes]
    for step in range(7):
        for name, each in zip(names, made, strict=True):
            train(*each, range(step, step + 1), len(name))
    return calls


def come_at_once(boxes, method):
    """Have a call of each box return when all have made it."""
    together = threading.Barrier(len(boxes))
    for each in boxes:
        original = getattr(each, method)

        def call(*args, original=original):
            result = original(*args)
            together.wait(60)
            return result

        setattr(each, method, call)


def counted_requests(place):
    """Calls of a place from now on, by kinds of folders and files.

    Those of its claim are left out: they are of seconds, not of rounds.
    """
    calls = collections.Counter()
    for name in ("create", "replace", "read", "names", "size", "remove"):
        original = getattr(place, name)

        def call(path, *args, name=name, original=original):
            if threading.current_thread().name != "bagua claim":
                folder, _, file = path.partition("/")
                calls[name, folder.partition("-")[0], file.partition("-")[0]] += 1
            return original(path, *args)

        setattr(place, name, call)
    return calls


def test_an_island_asks_the_storage_as_often_as_its_page_says(ranks, tmp_path):
    for count in (2, 3, 5):
        names = (*NAMES, "bergen", "lyon")[:count]
        (calls,) = ranks(1, requests_of_rounds, str(tmp_path / str(count)), names)
        for each in calls:
            assert each["create", "round", "from"] == 3
            assert each["read", "round", "from"] == 3 * (count - 1)
            assert each["names", "islands", ""] <= 3, "looks while it waits"
            assert sum(each.values()) <= 3 * (2 * count + 10), each


@training.with_group
def beyond_a_folder():
    found = []
    for name in NAMES[:2]:
        model, optimizer = island("memory://a-run", name, codec="int4_block")
        train(model, optimizer, range(6))
        found.append((model, model.bagua_algorithm.outer_rounds))
    first = found[0][0].bagua_algorithm
    first._ranks._catch_up(first._loop)
    return [rounds for _, rounds in found], len({anchor_bits(model) for model, _ in found})


def test_islands_meet_where_fsspec_reaches(ranks):
    assert ranks(1, beyond_a_folder) == [([3, 6], 1)]


@training.with_group
def refusals(folder):
    texts = []
    for own, arguments in (
        ({"island": "a/b"}, {}),
        ({"quorum": 0}, {}),
        ({"keep": 0}, {}),
        ({"secret": "short"}, {}),
        ({}, {"warmup_steps": 2}),
        ({}, {"hierarchical": True}),
    ):
        with pytest.raises(ValueError) as refused:  # noqa: PT011, the texts are compared
            island(folder, own.pop("island", "oslo"), mailbox=own, **arguments)
        texts.append(str(refused.value))
    return texts


def test_what_a_mailbox_cannot_do_is_refused(ranks, tmp_path):
    (texts,) = ranks(1, refusals, str(tmp_path))
    words = ["island='a/b'", "quorum=0", "keep=0", "16 bytes", "warmup_steps=2", "hierarchical"]
    assert all(word in text for word, text in zip(words, texts, strict=True)), texts


# Notices.


@contextlib.contextmanager
def patient_end():
    """Have islands that leave wait until their claims are gone, on a busy machine as well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mailbox_rounds, "_OF_A_NOTICE", 60.0)
        patch.setattr(mailbox_rounds, "_SECONDS_TO_END", (30.0, 30.0))
        yield


@training.with_group
def told_before_a_round(folder):
    """Statuses, claims that are left, and who counts in the round after the notice."""
    first = {"quorum": 2, "leave_within": 1.0}
    bagua.leave()  # without a mailbox: nothing
    model, optimizer = island(folder, "oslo", mailbox=first)
    other = island(folder, "paris")
    nothing = leaving.noticed()
    bagua.leave()
    with patient_end(), pytest.raises(SystemExit) as left:
        train(model, optimizer, range(1))
    claims_left = os.listdir(os.path.join(folder, "islands"))
    noticed = leaving.noticed()
    train(*other, range(2))
    counted = other[0].bagua_algorithm._ranks._post.box.manifest(0).counted
    return left.value.code, claims_left, (nothing, noticed), [each.island for each in counted]


def test_an_island_that_is_told_to_leave_mails_its_steps_and_ends_well(ranks, tmp_path):
    (found,) = ranks(1, told_before_a_round, str(tmp_path))
    assert found == (0, ["paris-1"], (None, None), ["oslo", "paris"])


@training.with_group
def told_while_it_waits(folder, hangs):
    """Status and claims of an island that is told when it waits, and who counts in that round."""
    mailbox = {"quorum": 2, "leave_within": 1.0}
    others, waits = island(folder, "paris"), threading.Event()

    def told(*args):
        bagua.leave()
        if hangs:
            waits.wait(60)
        return look(*args)

    own = island(folder, "oslo", mailbox=mailbox)
    there = own[0].bagua_algorithm._ranks._post.box
    look, there.contributions = there.contributions, told
    with patient_end(), pytest.raises(SystemExit) as left:
        train(*own, range(2))
    waits.set()
    claims_left = os.listdir(os.path.join(folder, "islands"))
    train(*others, range(2))
    counted = others[0].bagua_algorithm._ranks._post.box.manifest(0).counted
    return left.value.code, claims_left, [each.island for each in counted]


def test_an_island_that_waits_for_others_or_for_the_storage_leaves_when_it_is_told(ranks, tmp_path):
    for hangs in (False, True):
        (found,) = ranks(1, told_while_it_waits, str(tmp_path / f"{hangs}"), hangs)
        assert found == (0, ["paris-1"], ["oslo", "paris"])


@training.with_group
def told_while_nothing_answers(folder):
    """Seconds that an island with a round under way waits, when the storage does not answer."""
    seconds, answers = [], threading.Event()
    own = {"quorum": 2, "leave_within": 0.5}
    model, optimizer = island(folder, "oslo", mailbox=own, overlap_steps=1)
    post = model.bagua_algorithm._ranks._post
    post.box.contributions = lambda number: answers.wait(60) and {}
    train(model, optimizer, range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patience.Task, "end", lambda self, most: seconds.append(most))
        patch.setattr(post.claim, "release", seconds.append)
        bagua.leave()
        with pytest.raises(SystemExit) as left:
            train(model, optimizer, range(2, 3))
        model.bagua_algorithm.close()
    answers.set()
    return left.value.code, seconds


def test_an_island_leaves_in_time_while_the_storage_does_not_answer(ranks, tmp_path):
    ((code, seconds),) = ranks(1, told_while_nothing_answers, str(tmp_path))
    assert (code, len(seconds)) == (0, 1)
    assert seconds[0] <= 0.25 * 0.5  # of the notice


@training.with_group
def told_when_alone(folder):
    """Rounds of an island that leaves alone, and whether its weights are the anchor."""
    island(os.path.join(folder, "elsewhere"), "oslo")  # whose handler takes the signal
    model, optimizer = island(os.path.join(folder, "here"), "oslo", mailbox={"keep": 1})
    train(model, optimizer, range(3))
    handler = signal.getsignal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)  # noticed after the next step
    with pytest.raises(SystemExit):
        train(model, optimizer, range(3, 4))
    bits = training.bits(value.to(torch.float32) for value in weights(model))
    anchors = [value for key, value in outer_state(model).items() if key.startswith("anchor/")]
    same = bits == training.bits(anchors)
    default = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert leaving._last is None, "a timer would end this process later"
    return handler != signal.SIG_DFL, model.bagua_algorithm.outer_rounds, same, default


def test_sigterm_is_a_notice_to_an_island(ranks, tmp_path):
    assert ranks(1, told_when_alone, str(tmp_path)) == [(True, 3, True, True)]


# The command.


@training.with_group
def shown(folder):
    """Output of `bagua mailbox` for three islands: one at work, one late, one that has left."""
    hasty()
    oslo, paris, rome = (island(folder, name) for name in NAMES)
    train(*rome, range(2))
    rome[0].bagua_algorithm.close()
    train(*oslo, range(4))
    late = paris[0].bagua_algorithm._ranks._post
    own = Contribution(late.box.run, "paris", 1, 0, "0" * 16, 1.0)
    late.box.contribute(own, late.box.new_contribution(own))
    killed(paris[0])
    told = run_command(["mailbox", folder, "--once"])
    renews = oslo[0].bagua_algorithm._ranks._post.claim._thread
    oslo[0].bagua_algorithm.close()
    renews.join()  # nothing is written any more
    return [told]


def run_command(arguments):
    """(exit code, what it writes) of `bagua`."""
    written = io.StringIO()
    with contextlib.redirect_stdout(written), contextlib.redirect_stderr(written):
        code = main(arguments)
    return code, written.getvalue()


def test_the_command_shows_rounds_and_who_was_late_and_writes_nothing(ranks, tmp_path):
    (((code, text),),) = ranks(1, shown, str(tmp_path))
    assert code == 0
    lines = [line.split() for line in text.splitlines()]
    assert f"bagua mailbox: {tmp_path}, 3 round(s), anchors after 0" in text, text
    assert ["oslo", "trains", "2/3", "0", "0.001"] in lines, text
    assert ["paris", "silent", "0/3", "1"] in lines, text
    assert ["rome", "left", "1/3", "0", "0.001"] in lines, text
    assert ["2", "oslo;", "late:", "paris"] in lines, text
    before = sorted(map(str, tmp_path.rglob("*")))
    run_command(["mailbox", str(tmp_path), "--once"])
    assert sorted(map(str, tmp_path.rglob("*"))) == before


# Islands of several ranks.


@training.with_group
def of_two_ranks(folder, weight):
    """Anchors of two islands of two ranks, and their weights inside before the last round."""
    rank = dist.get_rank()
    members = [[0, 1], [2, 3]][rank // 2]
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    group = bagua.communication.new_group(members)
    model = DistributedDataParallel(training.network(rank // 2), process_group=inside)
    own = {"quorum": 2, "grace": None, "keep": 2}
    arguments = {"codec": "int4_block", "weight": weight}
    island(folder, NAMES[rank // 2], group=group, mailbox=own, model=model, **arguments)
    optimizer = model.bagua_optimizers[0]
    train(model, optimizer, range(9), rank, 1 + rank if weight == "samples" else 0)
    bits = training.gather((anchor_bits(model), training.bits(model.parameters())))
    model.bagua_algorithm.sync()
    outer = model.bagua_stats()["outer"]
    dist.barrier()  # or a mailbox could lose an island in the last round
    return bits, outer["rounds"], outer["sent_bytes"] > 0, model.bagua_ddp.process_group.size


def test_islands_of_two_ranks_hold_equal_anchors_and_each_mails_once(ranks, tmp_path):
    for weight in ("ranks", "samples"):
        folder = tmp_path / weight
        found = ranks(4, of_two_ranks, str(folder), weight)
        for bits, rounds, _, size in found:
            assert (rounds, size) == (5, 1)
            assert len({anchor for anchor, _ in bits}) == 1
            first, second, third, fourth = (own for _, own in bits)
            assert first == second != third == fourth
        assert [sends for *_, sends, _ in found] == [True, False] * 2
        for number in (2, 3, 4):
            mailed = list(folder.glob(f"round-{number:09d}/from-*"))
            assert sorted(file.name.split("-")[1] for file in mailed) == ["oslo", "paris"]


@training.with_group
def apart_inside(folder):
    """Errors of an island whose ranks nothing averages, and of one whose first rank fails."""
    errors = [training.error_of(lambda: island("no-such-protocol://there", "oslo"))]
    model, optimizer = island(folder, "oslo")
    errors.append(training.error_of(lambda: train(model, optimizer, range(2), dist.get_rank())))
    return errors


def test_ranks_of_an_island_fail_together_and_must_hold_equal_weights(ranks, tmp_path):
    (first, apart), (second, other) = ranks(2, apart_inside, str(tmp_path))
    assert "needs fsspec" in first or "fsspec does not reach it" in first
    assert "the first rank of island 'oslo', which has the mailbox, has failed" in second
    for text in (apart, other):
        assert "the 2 ranks of island 'oslo' hold different weights" in text
        assert "wrap DistributedDataParallel(model) with bagua" in text
