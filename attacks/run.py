"""Hostile files, messages and words that a job may meet: `python attacks/run.py [PART OF A NAME]`.

Prints what each attack tries and how it is refused. Exits with 1 if one is not refused as the table
says. `make test` and `make fuzz` try millions of drawn ones; these are the named ones, made by the
same builders. docs/security.md has what is trusted, and what is not.
"""

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
import torch.distributed as dist
from bagua import _C, BaguaError
from bagua._core.eager import objects
from bagua._core.group import rendezvous
from bagua._core.state import initial_state
from bagua._core.state.archive import load_archive
from bagua._core.state.step_folder import Damaged
from bagua._outer.mailbox import letters
from bagua._outer.mailbox.store import Folder
from deep import test_fuzz_messages as of_messages, test_fuzz_state as of_files
from single import test_checksums as of_wire, test_mailbox as of_mailbox


class Attack(NamedTuple):
    """An attack, made in an empty folder by `run`, which raises or returns the answer to it."""

    name: str
    tries: str
    run: Callable[[Path], object]
    answer: str  # regular expression


def archive(kind):
    return lambda _: load_archive(of_files.ARCHIVES[kind])


def checkpoint(change):
    """Reads a checkpoint whose part of rank 0 has been changed."""

    def run(folder):
        place = of_files.written(folder)
        change(place / "rank-0/values.pt")
        return of_files.read_all(place)

    return run


def replaced(make):
    def change(path):
        path.unlink()
        make(path)

    return change


def forged(path):
    path.write_bytes(of_files.archive_of({"leaves": None}))
    of_files.forge_digests(path.parents[1])


def optimizer(kind):
    """Reads another rank's description of an Adam's state."""

    def run(_):
        own = of_messages.adam()
        whole = json.loads(of_messages.text_of(own))
        dict_of = {json.dumps(pair[0]): pair for pair in whole["state"][1]["dict"]}
        dict_of['{"value": "exp_avg"}'][1] = of_messages.HOSTILE[kind][0]
        return initial_state.read_description(json.dumps(whole).encode(), own)

    return run


def message(make):
    """Receives a message of sparse gradients."""

    def run(_):
        x = of_wire.inputs(1, 1000, torch.float32)[0]
        return of_wire.sparse_refusals(x, 20, [make(x)], with_checksum=False)[0]

    return run


def damaged(x):
    data = of_wire.sparse_message(x, 20, False)
    data[-32:] = 255
    return data


def heartbeat(word):
    """Asks a rank about another one that has written such a heartbeat."""

    def run(_):
        store = dist.HashStore()
        store.set("beat/1", word)
        board = _C.FailureBoard(store, 0, 2)
        board.beat(7, "communicating", waits=True)
        return board.survey(7)

    return run


def letter(make, **options):
    return lambda _: of_mailbox.opened(make(), **options)


def huge_letter():
    data = of_mailbox.letter()
    data[16:24] = (2**62).to_bytes(8, "little")
    return data


def linked(folder):
    (folder / "anchor").symlink_to("/etc/passwd")
    return Folder(folder, "oslo").read("anchor", 10**6)


def counted_twice(_):
    row = ["oslo", "ab" * 32, 1]
    fields = {"run": "0" * 16, "round": 3, "part": 0, "anchor": "f" * 16, "author": "oslo"}
    return letters.Manifest.of("a manifest", fields | {"counted": [row, row]})


def huge_tensor(_):
    table = json.dumps([["weight", "float32", [2**60]]]).encode()
    return letters.unpacked("anchor", len(table), memoryview(bytearray(table)))


def stored(read, word, *arguments):
    return lambda _: read(of_messages.stored(word), "key", *arguments)


def meeting(_):
    store = dist.HashStore()
    store.set("words", "\x1b[2J" * 99)
    for rank in (0, 1):
        _C.Gathering(store, "words", rank, 2, 20.0).bring("")
    again = _C.Gathering(store, "words", 0, 2, 20.0, counted=True)
    again.bring("")
    return again.texts()


ATTACKS = [
    Attack("checkpoint/code", "a pickle that calls os.system",
           archive("code"), "names os.system, which is not plain data"),
    Attack("checkpoint/allocation", "64 GiB of a bytearray, from 60 bytes of pickle",
           archive("bytearray of a number"), "its pickle has LONG1 behind"),
    Attack("checkpoint/storage", "64 GiB of a storage of torch, from a number",
           archive("storage of a number"), "its pickle has LONG1 behind"),
    Attack("checkpoint/bomb", "256 MiB, compressed to 256 kB",
           archive("compressed"), "longer than the archive"),
    Attack("checkpoint/nesting", "100,000 lists in each other",
           archive("deep"), "nested too deeply"),
    Attack("checkpoint/circle", "a list that holds itself",
           archive("within itself"), "nested too deeply"),
    Attack("checkpoint/device", "a link to /dev/zero, which never ends",
           checkpoint(replaced(lambda path: path.symlink_to("/dev/zero"))), "it is a link"),
    Attack("checkpoint/pipe", "a pipe, which blocks its reader",
           checkpoint(replaced(os.mkfifo)), "not a regular file"),
    Attack("checkpoint/forgery", "other values under digests that are right",
           checkpoint(forged), "cannot be understood"),
    Attack("optimizer/code", "a state that is os.system",
           optimizer("import"), "own optimizer does not"),
    Attack("optimizer/allocation", "a state of 2^40 numbers", optimizer("too_large"), "more than"),
    Attack("optimizer/emptiness", "no bytes, but 2^62 columns",
           optimizer("zero_but_huge"), "more than"),
    Attack("optimizer/objects", "an array of pointers",
           optimizer("objects"), "of no dtype of numpy"),
    Attack("message/replay", "the message of another round",
           message(lambda x: of_wire.sparse_message(x, 20, False, step=2)),
           "round is 2, expected 1"),
    Attack("message/other", "the message of another bucket",
           message(lambda x: of_wire.sparse_message(x, 20, False, bucket="other")), "fingerprint"),
    Attack("message/zeros", "as many zeros",
           message(lambda x: torch.zeros_like(damaged(x))), "magic"),
    Attack("message/indices", "places behind the end of the gradient",
           message(damaged), "must ascend below 1000"),
    Attack("message/object", "a broadcast object that calls os.system",
           lambda _: objects._read(bytearray(of_files.ARCHIVES["code"]), 3, "broadcast_object"),
           "came from rank 3 cannot be read as plain data: it needs os.system, which is not"),
    Attack("store/number", "a port beyond all ports",
           stored(rendezvous.stored_number, b"9" * 30, 2**16), "not a number from 0 to"),
    Attack("store/lines", "the ranks' plan, as a deep list",
           stored(rendezvous.stored_lines, b"[" * 10**5), "not a list of lines"),
    Attack("store/terminal", "words that clear the reader's terminal", meeting, "not of the form"),
    Attack("heartbeat/terminal", "a position that clears the reader's terminal",
           heartbeat("12 5 0 \x1b[2Jowned"), r"in round 5 \(\?\[2Jowned"),
    Attack("heartbeat/size", "a heartbeat of a megabyte", heartbeat("1" * 2**20), "no heartbeat"),
    Attack("mailbox/secret", "a contribution sealed with another secret",
           letter(lambda: of_mailbox.letter(secret=b"another secret of 16")), "its seal differs"),
    Attack("mailbox/unsealed", "a contribution without a seal",
           letter(lambda: of_mailbox.letter(secret=None)), "sealed without a secret"),
    Attack("mailbox/allocation", "a file that says it has 2^62 bytes",
           letter(huge_letter), "it claims"),
    Attack("mailbox/kind", "a contribution in place of a manifest",
           letter(of_mailbox.letter, kind=letters.MANIFEST), "kind 2, not 1 and 3"),
    Attack("mailbox/link", "an anchor that is a link to /etc/passwd", linked, "it is a link"),
    Attack("mailbox/votes", "an island that is counted twice", counted_twice, "out of its range"),
    Attack("mailbox/tensor", "an anchor of 2^60 numbers",
           huge_tensor, "a shape is out of its range"),
]  # fmt: skip


def answer_to(attack):
    """The words of the refusal, in one line that a terminal can show; None: it was taken."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            answer = attack.run(Path(folder))
        except (ValueError, BaguaError, Damaged) as error:
            answer = str(error)
    return answer if isinstance(answer, str) and answer.replace("\n", " ").isprintable() else None


def main(attacks=ATTACKS, part=""):
    """How many were not refused as the table says; prints all of them."""
    missed = 0
    for attack in attacks:
        if part not in attack.name:
            continue
        answer = answer_to(attack)
        refused = answer is not None and re.search(attack.answer, answer) is not None
        missed += not refused
        print(f"{attack.name}: {attack.tries}")
        print(f"    {'refused' if refused else 'NOT REFUSED'}: {(answer or '')[:300]}")
    return missed


if __name__ == "__main__":
    sys.exit(min(1, main(part="".join(sys.argv[1:2]))))
