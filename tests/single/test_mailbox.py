"""Files of a mailbox: what a reader refuses, and how a place keeps them."""

import dataclasses
import errno
import io
import json
import os
import random
import subprocess
import threading

import pytest
import torch
from bagua.__main__ import main
from bagua._core.group.grace import Grace
from bagua._core.state.step_folder import Damaged
from bagua._outer.mailbox import box, claims, letters, store
from bagua._outer.mailbox.box import Box
from bagua._outer.mailbox.letters import Contribution, Counted, Manifest
from bagua._outer.mailbox.patience import Patience
from bagua._outer.mailbox.places import place_at
from bagua._outer.mailbox.store import Folder, Remote
from bagua.torch_api.algorithms import DiLoCoAlgorithm, Mailbox
from oracle.mailbox import loss_where_some_count

SECRET = b"known to all islands"


def letter(kind=letters.CONTRIBUTION, fields=None, body=b"body", secret=SECRET):
    data = letters.written(kind, {"a": 1} if fields is None else fields, len(body), secret)
    letters.body_of(data)[:] = body
    letters.sealed(data, secret)
    return data


def opened(data, kind=letters.CONTRIBUTION, most=2**16, secret=SECRET):
    return letters.opened("round-000000003/from-oslo", bytearray(data), kind, most, secret)


def test_a_letter_is_read_as_it_was_written():
    found = opened(letter())
    assert (found.fields, bytes(found.body)) == ({"a": 1}, b"body")
    assert len(letter()) % 4 == 0
    assert (len(letter()) - len(b"body")) % 64 == 0  # tensors in it are aligned


def test_every_changed_bit_of_a_letter_is_refused():
    good = letter(body=b"some numbers")
    for place in range(len(good)):
        changed = bytearray(good)
        changed[place] ^= 1 << place % 8
        with pytest.raises(Damaged, match="from-oslo"):
            opened(changed)


def test_random_letters_are_refused_or_what_was_written():
    draw, good = random.Random(7), letter(body=bytes(range(200)))
    for _ in range(10_000):
        data = bytearray(good)
        for _ in range(draw.randrange(1, 4)):
            begin, end = sorted(draw.randrange(len(data) + 1) for _ in range(2))
            data[begin:end] = draw.randbytes(draw.choice([0, end - begin, draw.randrange(40)]))
        if data != good:
            with pytest.raises(Damaged):
                opened(data)


def test_letters_of_another_kind_secret_or_size_are_refused_by_name():
    for words, data, options in (
        ("it is of version 1 and kind 2, not 1 and 3", letter(), {"kind": letters.MANIFEST}),
        ("its seal differs", letter(secret=b"another secret of 16"), {}),
        ("sealed without a secret", letter(secret=None), {}),
        ("give secret=", letter(), {"secret": None}),
        ("of 3 at most", letter(), {"most": 3}),
        ("truncated", letter()[:-1], {}),
        ("truncated", letter()[:20], {}),
        ("not a file of a mailbox", b"x" * 200, {}),
    ):
        with pytest.raises(Damaged, match=words):
            opened(data, **options)


def test_a_letter_that_claims_a_huge_body_is_refused_before_memory_is_taken():
    data = letter()
    data[16:24] = (2**62).to_bytes(8, "little")
    with pytest.raises(Damaged, match="it claims"):
        opened(data, most=2**16)


def strange(draw):
    return draw.choice(
        [None, True, -1, 2**200, 1.5, "", "a/b", "x" * 70, [], {}, [[]], ["oslo"], "0" * 16]
    )


def test_fields_of_any_type_are_refused_or_hold_their_ranges():
    draw = random.Random(3)
    counted = [["oslo", "ab" * 32, 1], ["paris", "cd" * 32, 4]]
    contribution = {"run": "0" * 16, "island": "oslo", "round": 3, "part": 0}
    contribution |= {"anchor": "f" * 16, "weight": 1}
    manifest = {"run": "0" * 16, "round": 3, "part": 0, "anchor": "f" * 16}
    manifest |= {"author": "oslo", "counted": counted}
    assert Contribution.of("x", contribution).weight == 1
    assert [each.island for each in Manifest.of("x", manifest).counted] == ["oslo", "paris"]
    of_shards = {**contribution, "shards": ["ab" * 32, "cd" * 32]}
    read = Contribution.of("x", of_shards)
    assert json.loads(json.dumps(read.fields())) == of_shards
    assert "shards" not in Contribution.of("x", contribution).fields()
    for bad in ({}, "ab", ["ab"], ["ab" * 31], ["xy" * 32], ["ab" * 32] * 513, None):
        with pytest.raises(Damaged):
            Contribution.of("x", {**contribution, "shards": bad})
    kinds = (Contribution, contribution), (Contribution, of_shards), (Manifest, manifest)
    for kind, good in kinds:
        for _ in range(2000):
            fields = json.loads(json.dumps(good))
            inner = fields.get("counted", fields.get("shards", [fields]))
            place = fields if draw.random() < 0.6 else inner
            key = draw.choice(list(place) if isinstance(place, dict) else range(len(place)))
            place[key] = strange(draw)
            try:
                found = kind.of("x", fields)
            except Damaged:
                continue
            assert 0 <= found.round < 10**9
            assert letters.is_hex(found.run)
            assert letters.is_hex(found.anchor)
            assert all(len(each) == 64 for each in getattr(found, "shards", ()))


def test_last_rounds_of_any_type_are_refused_or_those_of_islands():
    draw = random.Random(4)
    good = [["oslo", 3], ["paris", 10**9 - 1]]
    assert letters.last_rounds("x", good) == dict(good)
    assert len(letters.last_rounds("x", [[f"{i}", i] for i in range(256)])) == 256
    for bad in (None, {"ab": 1}, "ab", [["oslo", 1]] * 2, [[f"{i}", i] for i in range(257)]):
        with pytest.raises(Damaged):
            letters.last_rounds("x", bad)
    for _ in range(500):
        rows = json.loads(json.dumps(good))
        draw.choice(rows)[draw.randrange(2)] = strange(draw)
        try:
            found = letters.last_rounds("x", rows)
        except Damaged:
            continue
        assert all(letters.is_island(each) and 0 <= found[each] < 10**9 for each in found)


def test_a_manifest_lists_every_island_once_and_in_order():
    rows = [["paris", "cd" * 32, 4], ["oslo", "ab" * 32, 1]]
    fields = {"run": "0" * 16, "round": 3, "part": 0, "anchor": "f" * 16, "author": "oslo"}
    for bad in (rows, [rows[0], rows[0]], [], [["oslo", "ab" * 32, 0]], [rows[0]] * 300):
        with pytest.raises(Damaged):
            Manifest.of("x", {**fields, "counted": bad})
    assert Counted("oslo", "ab" * 32, 1).name == f"from-oslo-{'ab' * 8}"


def test_tensors_come_back_or_their_table_is_refused():
    draw = random.Random(5)
    tensors = {
        "a": torch.randn(3, 5),
        "empty": torch.zeros(0, 4),
        "b": torch.tensor(2.5, dtype=torch.float64),
        "c": torch.randn(7).bfloat16(),
        "d": torch.arange(3),
    }
    table, size = letters.table_of(tensors)
    body = bytearray(len(table) + size)
    body[: len(table)] = table
    letters.pack(tensors, memoryview(body)[len(table) :])
    found = letters.unpacked("anchor", len(table), memoryview(body))
    assert all(torch.equal(found[name], each) for name, each in tensors.items())
    for _ in range(2000):
        rows = json.loads(table)
        row = draw.choice(rows)
        row[draw.randrange(3)] = draw.choice([strange(draw), [2**60], [3, 5, 2], "int64"])
        text = json.dumps(rows).encode()
        data = memoryview(bytearray(text) + body[len(table) :])
        try:
            other = letters.unpacked("anchor", len(text), data)
        except Damaged:
            continue
        assert sum(each.nbytes for each in other.values()) == size
    for wrong in (None, -1, len(body) + 1, True, 0):
        with pytest.raises(Damaged):
            letters.unpacked("anchor", wrong, memoryview(body))


# Shards of islands.


def of_rank(folder, rank, ranks=2, sizes=(8,)):
    box = Box(Folder(folder, "oslo"), SECRET, sizes, rank, ranks)
    box.run = "0" * 16
    return box


def contributed(folder, boxes, island="oslo", fill=7):
    """A contribution of shards that its ranks have mailed, but for the file that names them."""
    own = Contribution("0" * 16, island, 3, 0, "f" * 16, 1.0)
    sealed = []
    for rank, each in enumerate(boxes):
        data = each.new_contribution(own)
        letters.body_of(data)[:] = bytes([fill + rank]) * 8
        sealed.append(each.sealed_shard(own, data))
        each.mail(sealed[-1])
    return dataclasses.replace(own, shards=tuple(each.seal for each in sealed)), sealed


def test_a_contribution_of_shards_is_read_by_rank_and_is_whole_with_all(tmp_path):
    boxes = [of_rank(tmp_path, rank) for rank in range(2)]
    own, sealed = contributed(tmp_path, boxes)
    assert boxes[0].contributions(3) == {}
    received = boxes[0].contribute_shards(own, sealed[0])
    (name,) = boxes[0].contributions(3)["oslo"]
    assert name == received.counted.name
    for rank in range(2):
        found = of_rank(tmp_path, rank).contribution(3, 0, name)
        assert (found.counted, bytes(found.body)) == (received.counted, bytes([7 + rank]) * 8)
        assert found.contribution == own
        assert boxes[rank].contribution(3, 0, name).body.obj is sealed[rank].data  # not read anew
    assert boxes[0].shards_there(own)
    (tmp_path / sealed[1].path).unlink()
    assert not boxes[0].shards_there(own)
    assert of_rank(tmp_path, 1).contribution(3, 0, name) is None
    assert boxes[0].shard_paths(3) == {"oslo": [sealed[0].path]}


def test_shards_that_their_contribution_does_not_name_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(box, "_LOOKS", 1)
    monkeypatch.setattr(box, "_BETWEEN_FIRST_AND_LAST", 0.0)
    boxes = [of_rank(tmp_path, rank) for rank in range(2)]
    own, sealed = contributed(tmp_path, boxes)
    name = boxes[0].contribute_shards(own, sealed[0]).counted.name
    _, others = contributed(tmp_path / "other", [of_rank(tmp_path / "other", r) for r in range(2)])
    _, changed = contributed(
        tmp_path / "third", [of_rank(tmp_path / "third", r) for r in range(2)], fill=9
    )
    place, good = tmp_path / sealed[1].path, bytes(sealed[1].data)
    assert bytes(others[1].data) == good
    for words, data in (
        ("it is not the shard", changed[1].data),
        ("it is not the shard", sealed[0].data),
        ("its seal differs", good[:-1] + b"x"),
        ("truncated", good[:-1]),
        ("of kind 2|kind 2", letter(fields=own.fields(), body=b"")),
    ):
        place.write_bytes(data)
        with pytest.warns(RuntimeWarning, match=words):
            assert of_rank(tmp_path, 1).contribution(3, 0, name) is None
    place.write_bytes(good)
    assert bytes(of_rank(tmp_path, 1).contribution(3, 0, name).body) == b"\x08" * 8
    for wrong in (of_rank(tmp_path, 0, 3), of_rank(tmp_path, 0, 1), of_rank(tmp_path, 1, 2, (9,))):
        with pytest.warns(RuntimeWarning, match="shards, and not|8 bytes, and not 9"):
            assert wrong.contribution(3, 0, name) is None


def test_an_anchor_of_shards_is_whole_with_all_and_goes_with_them(tmp_path, monkeypatch):
    monkeypatch.setattr(box, "_LOOKS", 1)
    monkeypatch.setattr(box, "_BETWEEN_FIRST_AND_LAST", 0.0)
    boxes = [of_rank(tmp_path, rank) for rank in range(2)]
    tensors = [{"a": torch.full((2, 3), float(rank))} for rank in range(2)]

    def read(rank):
        return of_rank(tmp_path, rank).anchor(number, tensors[rank], lambda found: found)

    for number in (0, 2, 4):
        counters = {"rounds": number, "outer_rounds": number}
        shards = [boxes[r].sealed_anchor_shard(number, tensors[r]) for r in range(2)]
        seals = [each.seal for each in shards]
        for each in shards:
            assert not boxes[0].anchor_shards_there(number, seals)
            assert boxes[0].anchors()[-1:] != [number]
            boxes[0].mail(each)
        assert boxes[0].anchor_shards_there(number, seals)
        assert boxes[0].put_anchor_of_shards(counters, {"oslo": 3}, seals)
        assert not boxes[1].put_anchor_of_shards(counters, {}, seals)
        for rank in range(2):
            found = read(rank)
            assert found[:2] == (counters, {"oslo": 3})
            assert torch.equal(found[2]["a"], tensors[rank]["a"])
    boxes[0].forget()
    names = sorted(os.listdir(tmp_path))
    assert [n for n in names if n.startswith("shards-")] == ["shards-000000002", "shards-000000004"]
    place = tmp_path / shards[1].path
    unnamed = boxes[1].sealed_anchor_shard(4, {"a": torch.full((2, 3), 9.0)}).data
    for words, data in (
        ("it is not the shard", shards[0].data),
        ("it is not the shard", unnamed),
        ("truncated", bytes(shards[1].data)[:-1]),
    ):
        place.write_bytes(data)
        with pytest.warns(RuntimeWarning, match=f"anchor-000000004 is refused: .*{words}"):
            assert read(1) is None
        assert read(0) is not None
    place.unlink()
    assert read(1) is None


# Claims.


def test_a_name_of_a_process_of_this_machine_that_has_ended_is_taken_at_once(tmp_path, monkeypatch):
    place, pauses = Folder(tmp_path, "oslo"), []
    with subprocess.Popen(["sleep", "600"]) as process:
        began = claims._began(process.pid)
        left = claims.Claim(place, "0" * 16, SECRET, "oslo")
        left._process = claims.Process.own()._replace(pid=process.pid, began=began)
        left._name = "oslo-1"
        left._create()
        lives = claims.Lives(place, "0" * 16, SECRET)
        lives.look()
        assert not lives.is_gone("oslo")
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert lives.is_gone("oslo")  # a zombie
    assert lives.is_gone("oslo")
    monkeypatch.setattr(Patience, "pause", pauses.append)
    claim = claims.Claim(place, "0" * 16, SECRET, "oslo")
    claim.take(Patience(str(tmp_path), 60.0, 60.0, threading.Event()))
    assert (place.names("islands"), pauses) == (["oslo-2"], [])
    claim.release(60.0)
    elsewhere = left._process._replace(at="1" * 16)
    assert not elsewhere.is_gone()


# Places.


def places(folder):
    yield Folder(folder / "one", "oslo")
    linkless = Folder(folder / "two", "oslo")
    yield linkless
    yield Remote("memory://test-places")


def test_a_file_is_created_once_whoever_is_first(tmp_path, monkeypatch):
    link = os.link

    def without_links(source, target):
        if "two" in str(target):
            raise OSError(errno.EPERM, "no links here")
        link(source, target)

    monkeypatch.setattr(os, "link", without_links)
    for place in places(tmp_path):
        made = []
        threads = [
            threading.Thread(
                target=lambda i=i, place=place, made=made: made.append(
                    (i, place.create("round-000000001/manifest-0", bytearray(f"{i}", "ascii")))
                )
            )
            for i in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (first,) = (i for i, was in made if was)
        assert place.read("round-000000001/manifest-0", 100) == f"{first}".encode()
        assert place.names("round-000000001") == ["manifest-0"]
        assert place.read("round-000000001/manifest-1", 100) is None
        assert place.names("round-000000002") == []
        place.replace("islands/oslo-1", bytearray(b"1"))
        place.replace("islands/oslo-1", bytearray(b"22"))
        assert place.read("islands/oslo-1", 2) == b"22"
        with pytest.raises(Damaged):
            place.read("islands/oslo-1", 1)
        place.remove("islands", ["oslo-1", "oslo-7"])
        assert place.names("islands") == []


def test_a_lost_answer_of_a_link_is_not_another_islands_file(tmp_path, monkeypatch):
    link = os.link

    def answer_lost(source, target):
        link(source, target)
        raise FileExistsError(errno.EEXIST, "it was made, and asked for again")

    monkeypatch.setattr(os, "link", answer_lost)
    assert Folder(tmp_path, "oslo").create("run", bytearray(b"mine"))


def test_a_lost_answer_of_a_put_is_not_another_islands_file(monkeypatch):
    from fsspec.implementations.memory import MemoryFileSystem

    pipe_file = MemoryFileSystem.pipe_file

    def answer_lost(self, path, value, mode="overwrite"):
        pipe_file(self, path, value, mode=mode)
        if mode == "create":
            raise FileExistsError(errno.EEXIST, "it was made, and asked for again")

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", answer_lost)
    place = place_at("memory://lost-answers", "oslo")
    assert place.create("run", bytearray(b"mine"))
    for other in (b"theirs", b"their", b"a longer one"):
        assert not place.create("run", bytearray(other))
    claims.Claim(place, "0" * 16, SECRET, "oslo").take(
        Patience("memory://lost-answers", 60.0, 60.0, threading.Event())
    )


def test_a_disk_that_is_full_leaves_no_part_of_a_file(tmp_path, monkeypatch):
    def without_links(source, target):
        raise OSError(errno.EPERM, "no links here")

    class Full(io.FileIO):
        def write(self, data):
            if self.name.parent.name == "tmp":
                return super().write(data)
            super().write(b"a part")
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "link", without_links)
    monkeypatch.setattr(store, "open", Full, raising=False)
    place = Folder(tmp_path, "oslo")
    with pytest.raises(OSError, match="No space left"):
        place.create("round-000000001/manifest-0", bytearray(b"manifest"))
    assert place.names("round-000000001") == []


def test_links_and_pipes_in_a_folder_are_refused(tmp_path):
    place = Folder(tmp_path, "oslo")
    (tmp_path / "link").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(Damaged, match=name):
            place.read(name, 100)


def test_what_a_killed_island_left_is_removed_by_the_next(tmp_path):
    (tmp_path / "tmp").mkdir()
    for name in ("oslo.1", "oslo-2.1"):
        (tmp_path / "tmp" / name).write_bytes(b"a part")
    Folder(tmp_path, "oslo").clear()
    assert os.listdir(tmp_path / "tmp") == ["oslo-2.1"]


def test_a_client_that_looks_for_a_file_before_it_writes_it_is_refused():
    from fsspec import AbstractFileSystem, register_implementation

    class LooksFirst(AbstractFileSystem):
        """A storage client without exclusive creation, in the way of fsspec's default."""

        protocol = "looks-first"

    class Overwrites(AbstractFileSystem):
        """As the client of WebDAV."""

        protocol = "overwrites"

        def __init__(self):
            super().__init__()

        def pipe_file(self, path, value):
            pass

        def makedirs(self, path, exist_ok):
            pass

    register_implementation("looks-first", LooksFirst, clobber=True)
    register_implementation("overwrites", Overwrites, clobber=True)
    with pytest.raises(ValueError, match="LooksFirst looks for a file before it writes it"):
        place_at("looks-first://there/run", "oslo")
    with pytest.raises(ValueError, match=r"exclusively there .*unexpected keyword argument 'mode'"):
        place_at("overwrites://there/run", "oslo")


def test_a_storage_without_exclusive_creation_is_refused(monkeypatch):
    from fsspec.implementations.memory import MemoryFileSystem

    pipe_file = MemoryFileSystem.pipe_file
    monkeypatch.setattr(
        MemoryFileSystem,
        "pipe_file",
        lambda self, path, value, mode="": pipe_file(self, path, value),
    )
    with pytest.raises(ValueError, match="cannot be created exclusively there"):
        place_at("memory://lax", "oslo")


def test_no_more_calls_are_begun_than_may_hang(monkeypatch):
    from fsspec.implementations.memory import MemoryFileSystem

    begun, answers, cat_file = [], threading.Event(), MemoryFileSystem.cat_file

    def hangs(self, *args, **options):
        begun.append(args)
        answers.wait(60)
        return cat_file(self, *args, **options)

    place = place_at("memory://hangs-for-ever", "oslo")
    place.create("run", bytearray(b"a run"))
    monkeypatch.setattr(MemoryFileSystem, "cat_file", hangs)
    with monkeypatch.context() as patch:
        patch.setattr(store, "_SECONDS_OF_A_CALL", 0.01)
        for number in range(2 * store._MOST_CALLS):
            words = "cat_file has not ended" if number < store._MOST_CALLS else "calls before"
            with pytest.raises(TimeoutError, match=words):
                place.read("run", 9)
    assert len(begun) == store._MOST_CALLS
    answers.set()
    assert place.read("run", 9) == b"a run"


def test_a_storage_that_is_not_installed_is_named():
    with pytest.raises(ImportError, match=r"pip install '\.\[mailbox\]'"):
        place_at("no-such-protocol://user:password@bucket/run", "oslo")
    with pytest.raises(ImportError) as refused:
        place_at("no-such-protocol://user:password@bucket/run", "oslo")
    assert "password" not in str(refused.value)


# Credentials.


def test_credentials_are_in_no_text_of_a_mailbox(monkeypatch, tmp_path, capsys):
    url = "no-such-protocol://user:pass-word@host/run?sig=token&x=other"
    monkeypatch.setenv("BAGUA_MAILBOX_SECRET", "of the environment")
    file = tmp_path / "secret"
    file.write_text("of a file, 16 letters\n")
    mailbox = Mailbox(url, island="oslo")
    assert mailbox.secret == b"of the environment"
    assert (
        Mailbox(url, island="oslo", secret="an argument is first").secret == b"an argument is first"
    )
    texts = [repr(mailbox), str(DiLoCoAlgorithm(elastic=mailbox).describe())]
    with pytest.raises(ImportError) as refused:
        place_at(url, "oslo")
    assert main(["mailbox", url, "--secret-file", str(file)]) == 1
    error = OSError("PUT https://user:pass-word@host/run?sig=token: 403")
    texts += [str(refused.value), capsys.readouterr().err, store.told(error, url)]
    for text in texts:
        for part in ("pass-word", "token", "of the environment", "of a file"):
            assert part not in text
    assert "'no-such-protocol://host/run', island='oslo'" in texts[0]


def test_a_short_secret_is_refused_wherever_it_comes_from(monkeypatch, tmp_path, capsys):
    (tmp_path / "secret").write_text("short\n")
    assert main(["mailbox", str(tmp_path), "--secret-file", str(tmp_path / "secret")]) == 1
    assert "16 bytes or more" in capsys.readouterr().err
    monkeypatch.setenv("BAGUA_MAILBOX_SECRET", "short")
    with pytest.raises(ValueError, match="16 bytes or more"):
        Mailbox("somewhere", island="oslo")


def test_the_command_says_what_it_cannot_read(tmp_path, capsys):
    assert main(["mailbox", str(tmp_path / "none"), "--once"]) == 1
    assert "no island has begun a run there" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
    Folder(tmp_path, "oslo").create("run", letter(letters.RUN, {"run": "0" * 16}))
    assert main(["mailbox", str(tmp_path), "--once"]) == 1
    assert "give secret=" in capsys.readouterr().err


# Grace.


def test_grace_waits_twice_as_long_as_the_quorum_took_within_its_bounds():
    now = [0.0]
    for seconds, quorum_after, late_after in (
        (60.0, 10.0, 20.0),
        (5.0, 10.0, 5.0),
        (60.0, 0.1, 1.0),
        (0.5, 0.1, 0.5),
        (None, 10.0, 1e9),
    ):
        now[0] = 100.0
        grace = Grace(2, seconds, lambda: now[0])
        now[0] += quorum_after
        assert not grace.over(1, 1)
        assert not grace.over(2, 1)
        now[0] += late_after
        assert not grace.over(2, 1)
        now[0] += 0.01
        assert grace.over(2, 1) == (seconds is not None)
        assert grace.over(2, 0)


def test_late_changes_are_divided_or_outer_momentum_would_amplify_them():
    in_time = loss_where_some_count(4, False)
    assert loss_where_some_count(2, False) > 1.2 * in_time
    assert loss_where_some_count(2, True) < 1.02 * in_time
