"""``bagua mailbox``: shows the rounds and islands of a mailbox. It writes nothing there."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from bagua import BaguaError
from bagua._core.state.step_folder import Damaged
from bagua._outer.mailbox import secret_of
from bagua._outer.mailbox.box import Box
from bagua._outer.mailbox.claims import Lives
from bagua._outer.mailbox.letters import Manifest
from bagua._outer.mailbox.places import place_at
from bagua._outer.mailbox.store import without_credentials

SUMMARY = "show the rounds and islands of a mailbox"
DESCRIPTION = """\
Shows a mailbox of DiLoCoAlgorithm(elastic=Mailbox(url, ...)): its last rounds,
who counted in them, who was late, and which islands are at work.

  trains   its claim changes
  silent   its claim has not changed while this looked: killed, stopped, cut off
  left     it has given its name back

It ends by Ctrl-C. The secret is that of --secret-file, or BAGUA_MAILBOX_SECRET.
"""

_CLEAR = "\x1b[H\x1b[J"
_ROUNDS = 8  # the last ones
_MOST_SECRET = 4096  # bytes
_BEFORE_FIRST = 5.0  # seconds: every claim of a process that lives changes within them


class Round(NamedTuple):
    """A round: islands that count, those that came too late, and bytes of each contribution.

    Shards are those of all ranks; where an island has contributed twice, of both times.
    """

    number: int
    counted: list[str]
    late: list[str]
    sizes: dict[str, int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="a folder, or a URL of fsspec")
    parser.add_argument(
        "--secret-file", metavar="FILE", help="holds the islands' secret; the last newline is not"
    )
    parser.add_argument(
        "--interval", type=float, default=5.0, metavar="S", help="seconds between two looks (5)"
    )
    parser.add_argument("--once", action="store_true", help="print one table and end")


def main(arguments: argparse.Namespace) -> int:
    try:
        secret = secret_of(_secret_in(arguments.secret_file))
        place = place_at(arguments.url, "", writes=False)
        view = View(Box(place, secret, []))
        _show(view, arguments)
    except KeyboardInterrupt:
        sys.stdout.write("\n")
    except (BaguaError, Damaged, ImportError, OSError, ValueError) as error:
        sys.stderr.write(f"bagua mailbox: {without_credentials(str(error), arguments.url)}\n")
        return 1
    return 0


def _secret_in(file: str | None) -> bytes | None:
    if file is None:
        return None
    with open(file, "rb") as opened:
        return opened.read(_MOST_SECRET).removesuffix(b"\n")


def _show(view: View, arguments: argparse.Namespace) -> None:
    view.look()
    if arguments.once:
        end = time.monotonic() + _BEFORE_FIRST
        while time.monotonic() < end and not view.all_known:
            time.sleep(0.2)
            view.look()
        sys.stdout.write("\n".join(view.lines()) + "\n")
        return
    while True:
        sys.stdout.write(_CLEAR + "\n".join(view.lines()) + "\n")
        sys.stdout.flush()
        time.sleep(max(0.1, arguments.interval))
        view.look()


class View:
    """Contents of a mailbox at the last look. OSError, Damaged, BaguaError: it cannot be read."""

    def __init__(self, box: Box) -> None:
        self._box, self._place = box, box.place
        box.run = box.known_run()
        self._lives = Lives(self._place, box.run, box.secret)
        self._claimed: set[str] = set()
        self._rounds: list[Round] = []
        self._anchors: list[int] = []

    @property
    def all_known(self) -> bool:
        """Whether every claim has changed while this looked."""
        return all(self._lives.beats(island) for island in self._claimed)

    def look(self) -> None:
        self._claimed = set(self._lives.look())
        self._anchors = self._box.anchors()
        self._rounds = [self._round(number) for number in self._box.rounds()[-_ROUNDS:]]

    def _round(self, number: int) -> Round:
        found = self._box.manifest(number)
        counted = found.counted if isinstance(found, Manifest) else []
        files = self._box.contributions(number)
        there = {name for names in files.values() for name in names}
        folder = f"round-{number:09d}"
        shards = self._box.shard_paths(number)
        sizes = {
            each.island: sum(
                self._place.size(path)
                for path in (f"{folder}/{each.name}", *shards.get(each.island, []))
            )
            for each in counted
            if each.name in there
        }
        islands = [each.island for each in counted]
        return Round(number, islands, sorted(files.keys() - set(islands)), sizes)

    def lines(self) -> list[str]:
        made = [each for each in self._rounds if each.counted]
        rounds = made[-1].number + 1 if made else max(self._anchors, default=0)
        anchors = ", ".join(map(str, self._anchors)) or "none"
        title = f"bagua mailbox: {self._place.url}, {rounds} round(s), anchors after {anchors}"
        return [title, "", *self._of_islands(made), "", *_of_rounds(self._rounds)]

    def _of_islands(self, made: Sequence[Round]) -> list[str]:
        islands = self._claimed.union(*(each.counted + each.late for each in self._rounds))
        lines = [f"{'island':<20} {'state':<8} {'counted':>8} {'late':>5} {'MB/round':>9}"]
        for island in sorted(islands):
            sizes = [each.sizes[island] for each in made if island in each.sizes]
            size = f"{sizes[-1] / 1e6:.3f}" if sizes else ""
            counted = sum(island in each.counted for each in made)
            late = sum(island in each.late for each in made)
            of = f"{counted}/{len(made)}"
            lines.append(f"{island:<20} {self._state(island):<8} {of:>8} {late:>5} {size:>9}")
        return lines

    def _state(self, island: str) -> str:
        if island not in self._claimed:
            return "left"
        return "trains" if self._lives.beats(island) else "silent"


def _of_rounds(rounds: Sequence[Round]) -> list[str]:
    lines = [f"{'round':>9}  islands"]
    for each in rounds:
        text = ", ".join(each.counted) or f"under way: {', '.join(each.late)}"
        late = f"; late: {', '.join(each.late)}" if each.counted and each.late else ""
        lines.append(f"{each.number + 1:>9}  {text}{late}")
    return lines
