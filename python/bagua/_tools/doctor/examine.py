"""Runs the checks of ``bagua doctor``, prints their page and returns its exit code."""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from bagua import _C, BaguaError
from bagua._core.group import environment as env
from bagua._core.group.interfaces import choose_interface
from bagua._core.group.rendezvous import agree_on_incarnation, is_one_of_several
from bagua._tools.doctor.advice import advice
from bagua._tools.doctor.links import (
    Measured,
    Place,
    Post,
    all_pairs,
    failures_from,
    measure,
    measured_from,
    pairs_from,
    rounds_of_pairs,
)
from bagua._tools.doctor.sums import ELEMENTS, findings_of_sums, reduce_everywhere, sums_from
from bagua._tools.doctor.verdict import (
    Card,
    Finding,
    Pair,
    card_from,
    findings_of_cards,
    findings_of_links,
    own_card,
    ranks_text,
    slowest_direction,
)
from bagua._tools.meeting import (
    Meeting,
    MissingReplyError,
    StoreTimeoutError,
    Word,
    made,
    one_of,
)
from bagua._tools.report import printable

SUMMARY = "check the links between the ranks of a job; started by torchrun"
DESCRIPTION = """\
Start it as you start the training, on every machine:

  torchrun --nproc-per-node 2 -m bagua doctor

Rank 0 prints the ranks, the latency and the bandwidth of every link, the check
of an exact and of an 8-bit all-reduce, what is broken, the algorithm that the
slowest link asks for, and the command of `bagua plan` that says more of it.
With --train it prints instead, for every algorithm, seconds per step beside
torch's DDP, bytes, and whether the ranks hold equal weights.

exit code: 0 no fault found, 1 something is broken, 2 wrong use
"""

_PATIENCE = 60.0  # seconds that steps of a training wait for a rank, at least
_GRACE = 5.0  # seconds beyond the timeout that a rank is given for its answer
_FAREWELL = 1.0  # seconds that rank 0 leaves its store to ranks that still read
_SECRET = 32  # letters
_MANY_LINKS = 66
_COLUMNS = 80
_MOST_FINDINGS = 30
_MOST_BYTES = 64 * 1024**2
_TOLERANCE = "a link between nodes T times slower than the fastest one is broken (4)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, default, unit, meaning in (
        ("--timeout", 10.0, "S", "seconds after which a link or a rank counts as dead (10)"),
        ("--start", 60.0, "S", "seconds within which all ranks must have started (60)"),
        ("--tolerance", 4.0, "T", _TOLERANCE),
        ("--at-least", 0.0, "MB/S", "a link slower than that is broken, also inside a node"),
        ("--millions", 100.0, "N", "of parameters of your model, for the advice (100)"),
        ("--compute", 1.0, "S", "seconds of a step of one rank alone, for the advice (1)"),
    ):
        parser.add_argument(name, type=_positive, default=default, metavar=unit, help=meaning)
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="of the all-reduces (cuda where there is a GPU)",
    )
    parser.add_argument(
        "--train",
        action="store_true",
        help="train a small model with every algorithm beside torch's DDP instead",
    )


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text} must be a positive number")
    return value


def main(arguments: argparse.Namespace) -> int:
    try:
        is_rank = is_one_of_several() and "RANK" in os.environ
    except ValueError as error:  # a launcher that does not tell enough
        sys.stderr.write(f"bagua doctor: {error}\n")
        return 2
    if not is_rank:
        sys.stderr.write(
            "bagua doctor examines the ranks of a job. Start it with\n"
            "  torchrun --nproc-per-node 2 -m bagua doctor\n"
        )
        return 2
    if arguments.train:
        return _train(arguments)
    silent = (
        f"rank {os.environ['RANK']}: the job's store has stopped answering: the link to the host "
        "of rank 0 is cut"
    )
    # To reach the store, and then to meet the other ranks in it.
    limit = 2 * arguments.start + 4 * _GRACE
    met = _within(lambda: _meet(timedelta(seconds=arguments.start)), limit, silent)
    if isinstance(met, str):
        code = _say(f"BROKEN: {met}")
        time.sleep(_FAREWELL if os.environ["RANK"] == "0" else 0.0)
    else:
        rank, size, store = met
        code = _Examination(rank, size, store, arguments).run()
    sys.stdout.flush()
    sys.stderr.flush()
    # The end of the interpreter would wait for threads that wait for a dead link.
    os._exit(code)


def _train(arguments: argparse.Namespace) -> int:
    from bagua._tools.doctor import train

    return train.main(_device(arguments.device), max(_PATIENCE, arguments.timeout))


def _device(chosen: str | None) -> torch.device:
    usable = torch.cuda.device_count() > env.get_local_rank()
    if chosen == "cpu" or not (chosen or usable):
        return torch.device("cpu")
    return torch.device("cuda", env.get_local_rank())


def _meet(patience: timedelta) -> tuple[int, int, c10d.Store] | str:
    try:
        rank, size = env.get_rank(), env.get_world_size()
        store = _store(rank, size, patience)
        choose_interface(store)
        name = agree_on_incarnation(store, rank, size, patience)
    except (BaguaError, ValueError) as error:
        return str(error)
    except dist.DistError as error:
        return f"rank {rank}: the job's store, at rank 0, has gone: {error}"
    return rank, size, c10d.PrefixStore(f"bagua/doctor/{name}", store)


def _store(rank: int, size: int, patience: timedelta) -> c10d.Store:
    """The job's store: the agent's, or else one that rank 0 makes, which waits for no rank."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(f"environment variable(s) {', '.join(missing)} not set; use torchrun")
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    sockets = _C.OpenedSockets()
    makes = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store: c10d.Store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, size, makes, patience, wait_for_workers=False
        )
    except dist.DistError as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise BaguaError(
            f"rank {rank} of {size} ({socket.gethostname()}) cannot reach the job's store at "
            f"{host}:{port}, which is on the host of rank 0: {reason}. Check MASTER_ADDR and "
            "MASTER_PORT, and the routes and the firewall between the two"
        ) from error
    sockets.give_up_after(patience.total_seconds())
    return store


class _Examination:
    """One rank's part: every method that is a step is called by all ranks."""

    def __init__(
        self, rank: int, size: int, store: c10d.Store, arguments: argparse.Namespace
    ) -> None:
        self._rank = rank
        self._size = size
        self._store = store
        self._arguments = arguments
        self._meeting = Meeting(store)
        self._post: Post | None = None
        self._cards: dict[int, Card] = {}
        self._lost: set[int] = set()
        self._unreachable: dict[Pair, str] = {}
        self._links: dict[Pair, Measured | str] = {}
        self._broke: dict[Pair, str] = {}
        self._sums: dict[int, Any] = {}
        self._findings: list[Finding] = []

    def run(self) -> int:
        """The examination; returns the exit code of this rank.

        1. Every rank writes its card and its listening socket to the store.
        2. Every rank connects to every other, both ways.
        3. Rank 0 calls up pairs, a round at a time, which measure their links.
        4. Where all that went well, all ranks run the all-reduces.
        5. Rank 0 prints the page and tells the exit code.
        """
        try:
            self._exchange_cards()
            self._connect()
            self._measure()
            self._reduce()
            return self._conclude()
        except StoreTimeoutError as error:
            place = f"{env.get_master_addr()}:{os.environ.get('MASTER_PORT')}"
            return _say(
                f"BROKEN: rank {self._rank}: the job's store at {place} has stopped answering "
                f"({error}): the link between rank {self._rank} and the host of rank 0 is cut, or "
                "the processes there have ended"
            )
        except MissingReplyError as error:
            return _say(f"BROKEN: rank {self._rank}: rank 0 has stopped answering ({error})")
        except BaguaError as error:  # a word that rank 0 has not written
            return _say(f"BROKEN: rank {self._rank}: {error}")
        finally:
            if self._post is not None:
                self._post.close()

    def _exchange_cards(self) -> None:
        secret = secrets.token_hex(_SECRET // 2)
        if self._rank == 0:
            self._meeting.write("secret", secret)
        secret = self._meeting.read("secret", self._limit(), _secret_from)
        card = own_card(_device(self._arguments.device).type)
        if card.address:
            try:
                self._post = Post(
                    card.address, self._rank, secret.encode(), self._arguments.timeout
                )
                card = card._replace(port=self._post.place.port)
            except OSError as error:
                card = card._replace(address="", reason=f"{card.reason} ({error})")
        self._meeting.write(f"card/{self._rank}", card._asdict())
        self._cards = self._words(
            "card", "its description", self._by(), lambda word: made(card_from(word))
        )
        if self._rank == 0:
            self._findings += findings_of_cards(self._cards)

    def _connect(self) -> None:
        places = {
            rank: Place(card.address, card.port)
            for rank, card in self._cards.items()
            if card.address and rank != self._rank
        }
        failures = {} if self._post is None else self._post.open_all(places)
        self._meeting.write(f"connected/{self._rank}", {str(r): t for r, t in failures.items()})
        if self._rank != 0:
            return
        # Connecting takes up to two timeouts.
        words = self._words(
            "connected",
            "whom it has reached",
            self._by(self._arguments.timeout),
            lambda word: failures_from(word, self._size),
        )
        for rank, failed in words.items():
            self._unreachable |= {(rank, other): reason for other, reason in failed.items()}

    def _measure(self) -> None:
        if self._rank != 0:
            for number in range(1 << 30):
                pairs = self._meeting.read(
                    f"round/{number}", self._longest(), lambda word: pairs_from(word, self._size)
                )
                if pairs is None:
                    return
                self._measure_in(number, pairs)
        usable = []
        for a, b in all_pairs(self._size):
            if (a, b) in self._unreachable or (b, a) in self._unreachable:
                one_way = not {(a, b), (b, a)} <= self._unreachable.keys()
                self._links[a, b] = "cut one way" if one_way else "cut"
            elif {a, b} <= self._cards.keys() and self._cards[a].port and self._cards[b].port:
                usable.append((a, b))
        nodes = [self._cards[r].node if r in self._cards else -1 for r in range(self._size)]
        number = 0
        for number, pairs in enumerate(rounds_of_pairs(nodes, usable), 1):
            self._meeting.write(f"round/{number - 1}", pairs)
            # An end waits for the other one; of the steps that follow, only the last may be late.
            deadline = time.monotonic() + 5 * self._arguments.timeout + _GRACE
            self._measure_in(number - 1, pairs)
            for pair in pairs:
                self._note_link(number - 1, pair, deadline)
        self._meeting.write(f"round/{number}", None)

    def _measure_in(self, number: int, pairs: Iterable[Iterable[int]]) -> None:
        for a, b in pairs:
            if self._rank not in (a, b) or self._post is None:
                continue
            other = b if self._rank == a else a
            try:
                connection = self._post.connection(other)
                word: Any = measure(connection, self._rank == a, _MOST_BYTES)._asdict()
            except OSError as error:
                word = f"rank {self._rank}: {error}"
            self._meeting.write(f"measured/{number}/{self._rank}", word)

    def _note_link(self, number: int, pair: Pair, deadline: float) -> None:
        key, what = f"measured/{number}", "how fast its link is"
        words = self._words(key, what, deadline, measured_from, pair)
        failures = [word for word in words.values() if isinstance(word, str)]
        if len(words) < 2:
            self._links[pair] = "no answer"
        elif failures:
            self._links[pair] = "fails under load"
            self._broke[pair] = "; ".join(failures)
        else:
            ends = [word for word in words.values() if isinstance(word, Measured)]
            again = max(end.again for end in ends)
            self._links[pair] = ends[0]._replace(again=again)

    def _measured(self) -> dict[Pair, Measured]:
        return {pair: link for pair, link in self._links.items() if isinstance(link, Measured)}

    def _advice(self) -> str:
        parameters, compute = 1e6 * self._arguments.millions, self._arguments.compute
        sentence, command = advice(self._cards, self._measured(), parameters, compute)
        return f"{_wrapped(sentence, 'advice: ')}\nOf each algorithm:\n  {command}\n"

    def _reduce(self) -> None:
        if self._rank == 0:
            measured = self._measured()
            self._findings += findings_of_links(
                self._cards,
                self._unreachable,
                measured,
                self._broke,
                self._arguments.tolerance,
                self._arguments.at_least * 1e6,
            )
            whole = sorted(measured) == all_pairs(self._size)
            self._meeting.write("reduce", whole and not self._lost)
        if not self._meeting.read(
            "reduce", self._longest(), lambda word: one_of(word, True, False)
        ):
            return
        # Two connections of gloo, and four all-reduces.
        limit = timedelta(seconds=2 * self._arguments.timeout)
        device = _device(self._arguments.device)

        def reduce() -> Any:
            try:
                return reduce_everywhere(self._store, self._rank, self._size, device, limit)
            except RuntimeError as error:  # BaguaError is one
                return str(error)

        word = _within(reduce, 2 * limit.total_seconds(), "it hangs")
        self._meeting.write(f"sums/{self._rank}", word)
        if self._rank == 0:
            deadline = self._by(2 * limit.total_seconds())
            self._sums = self._words("sums", "its result", deadline, sums_from)
            self._findings += findings_of_sums(self._sums)

    def _conclude(self) -> int:
        if self._rank == 0:
            links = {pair: self._links[pair] for pair in sorted(self._links)}
            sys.stdout.write(page(self._cards, links, self._sums, self._findings))
            code = int(any(finding.broken for finding in self._findings))
            if not code and self._size > 1:
                sys.stdout.write(self._advice())
            sys.stdout.flush()
            self._meeting.write("code", code)
            self._wait_for_readers()
            return code
        code = self._meeting.read("code", self._longest(), lambda word: int(one_of(word, 0, 1)))
        self._meeting.write(f"left/{self._rank}", True)
        return code

    def _wait_for_readers(self) -> None:
        """Rank 0 may have the store, and its end would end the store."""
        deadline = time.monotonic() + _GRACE
        for rank in set(range(1, self._size)) - self._lost:
            while not self._meeting.has(f"left/{rank}") and time.monotonic() < deadline:
                time.sleep(0.01)

    def _words(
        self,
        key: str,
        what: str,
        deadline: float,
        form: Callable[[Any], Word],
        ranks: Iterable[int] | None = None,
    ) -> dict[int, Word]:
        """The word under ``key`` of every rank, or of ``ranks``; a rank without one is lost."""
        found = {}
        for rank in sorted(set(ranks or range(self._size)) - self._lost):
            left = max(0.0, deadline - time.monotonic())
            try:
                found[rank] = self._meeting.read(f"{key}/{rank}", left, form)
            except MissingReplyError:
                self._lose(rank, f"it has not told {what}")
            except BaguaError as error:
                self._lost.add(rank)
                self._findings.append(Finding(f"{ranks_text([rank])}: {error}"))
        return found

    def _by(self, more_seconds: float = 0.0) -> float:
        return time.monotonic() + self._limit() + more_seconds

    def _lose(self, rank: int, reason: str) -> None:
        host = self._cards[rank].host if rank in self._cards else "host unknown"
        self._lost.add(rank)
        self._findings.append(
            Finding(
                f"{ranks_text([rank])} ({host}) has stopped answering rank 0 through the job's "
                f"store: {reason}. Its process has ended or hangs, or the link between ranks 0 and "
                f"{rank} is cut",
            )
        )

    def _limit(self) -> float:
        return float(self._arguments.timeout) + _GRACE

    def _longest(self) -> float:
        return 6.0 * float(self._arguments.timeout) + 3 * _GRACE


def _within(work: Callable[[], Any], seconds: float, otherwise: str) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else otherwise


def _secret_from(word: Any) -> str:
    if type(word) is not str or len(word) != _SECRET or not word.isalnum():
        raise ValueError(word)
    return word


def _say(line: str) -> int:
    sys.stderr.write(line + "\n")
    return 1


# The page.


def page(
    cards: Mapping[int, Card],
    links: Mapping[Pair, Measured | str],
    sums: Mapping[int, Any],
    findings: Sequence[Finding],
) -> str:
    """The report on a cluster, of at most 80 columns."""
    parts = [_ranks(cards, links), _versions(cards), _links(links), _sums(sums)]
    return "\n".join([*(part for part in parts if part), _verdict(findings)])


def _ranks(cards: Mapping[int, Card], links: Mapping[Pair, Measured | str]) -> str:
    # Nodes that no launcher numbers have numbers of their hosts.
    nodes = list(dict.fromkeys(card.node for card in cards.values()))
    lines = [f"{len(cards)} rank(s) on {len(nodes)} node(s)", ""]
    places = {rank: f"{card.address or 'none'} {card.interface}" for rank, card in cards.items()}
    width = max(map(len, ["address", *places.values()]))
    lines.append(f"{'rank':>4}  {'node':>4}  {'host':<20}  {'address':<{width}}  {'clock':>9}")
    for rank, card in cards.items():
        link = links.get((0, rank))
        clock = "-" if rank and not isinstance(link, Measured) else "reference"
        if isinstance(link, Measured):
            far = abs(link.ahead) >= 10
            clock = f"{link.ahead:+.0f} s" if far else f"{link.ahead * 1e3:+.1f} ms"
        host = f"{card.host[:20]:<20}"
        node = nodes.index(card.node)
        lines.append(f"{rank:>4}  {node:>4}  {host}  {places[rank]:<{width}}  {clock:>9}")
    return "\n".join(lines) + "\n"


def _versions(cards: Mapping[int, Card]) -> str:
    first = next(iter(cards.values()), None)
    if first is None:
        return ""
    text = (
        f"rank 0 has bagua {first.bagua} (built for torch {first.built_for}), torch {first.torch}, "
        f"Python {first.python}, CPU loops {first.loops}, CUDA kernels {first.kernels}, device "
        f"{first.device}"
    )
    return _wrapped(text, "") + "\n"


def _links(links: Mapping[Pair, Measured | str]) -> str:
    if not links:
        return ""

    def speed(link: Measured | str) -> float:
        return slowest_direction(link) if isinstance(link, Measured) else 0.0

    shown = sorted(links, key=lambda pair: speed(links[pair]))[:_MANY_LINKS]
    lines = [
        f"{'ranks':>11}  {'latency':>10}  {'MB/s there':>10}  {'MB/s back':>10}  "
        f"{'Mbit/s there':>12}  {'Mbit/s back':>12}"
    ]
    for pair in sorted(shown):
        link, name = links[pair], f"{pair[0]:>4} - {pair[1]:>4}"
        if isinstance(link, Measured):
            there, back = link.sent / 1e6, link.received / 1e6
            lines.append(
                f"{name}  {link.latency * 1e3:>7.3f} ms  {there:>10.1f}  {back:>10.1f}  "
                f"{8 * there:>12.0f}  {8 * back:>12.0f}"
            )
        else:
            lines.append(f"{name}  {link}")
    if len(shown) < len(links):
        lines.append(f"the slowest {len(shown)} of {len(links)} links")
    return "\n".join(lines) + "\n"


def _sums(sums: Mapping[int, Any]) -> str:
    results = [result for result in sums.values() if isinstance(result, dict)]
    if not results:
        return ""
    lines = [f"all-reduce of {ELEMENTS * 4 / 1e6:.1f} MB, against the mean that torch computes"]
    for name in results[0]:
        error = max(result[name]["error"] for result in results)
        seconds = max(result[name]["seconds"] for result in results)
        lines.append(f"  {name:<6} relative error {error:.1e}, {seconds * 1e3:.1f} ms")
    return "\n".join(lines) + "\n"


def _verdict(findings: Sequence[Finding]) -> str:
    broken = [finding.text for finding in findings if finding.broken]
    remarks = [finding.text for finding in findings if not finding.broken]
    lines = [_wrapped(text, "BROKEN: ") for text in broken[:_MOST_FINDINGS]]
    if len(broken) > _MOST_FINDINGS:
        lines.append(f"and {len(broken) - _MOST_FINDINGS} more")
    lines += [_wrapped(text, "note: ") for text in remarks[:_MOST_FINDINGS]]
    if not broken:
        lines.append("No fault found.")
    return "\n".join(lines) + "\n"


def _wrapped(text: str, start: str) -> str:
    return textwrap.fill(
        start + printable(text), _COLUMNS, subsequent_indent="  ", break_on_hyphens=False
    )
