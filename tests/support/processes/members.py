"""Members of a group of any size: threads of a few processes, without a model or a wire.

    with Members(1024, processes=4) as members:
        members.all("enter")
        members.all("wait", but=[3])
        members.all("lose", only=[3])
        texts = members.all("diagnose", but=[3])

A member has what a rank has that speaks to the job's store: a client, connections, a board with its
seats and threads. The store is a TCPStore in a process that can be killed or stopped. Members may
be behind a link that delays what they send and receive; all of a process share one.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.counting_store import CountingStore
from support.processes import fork_server
from support.threads.thread_ranks import run_threads

TIMEOUT = timedelta(seconds=120)
HOST = "127.0.0.1"
#: torch's store looks up each client's name, and the name server may be mute.
VARIABLES = {"OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1"}
#: Requests by time, not by act.
BEATS = ("group/board/beat/", "group/board/news")


class Members:
    """A context manager: `size` members in so many processes, `rtt_ms` away from their store.

    counted: `requests` has a number; a call of Python for each, which all members' threads share.
    """

    def __init__(self, size, processes=1, rtt_ms=0.0, counted=False):
        self.size, self._rtt_ms, self._counted = size, rtt_ms, int(counted)
        self._firsts = [size * number // processes for number in range(processes + 1)]
        self._opened = contextlib.ExitStack()

    def __enter__(self):
        with contextlib.ExitStack() as opened:
            self.store, port = _begin(opened, "store")
            self._workers, shared = [], (self.size, self._counted)
            for first, end in zip(self._firsts, self._firsts[1:], strict=False):
                near = port if not self._rtt_ms else _begin(opened, "link", port, self._rtt_ms)[1]
                self._workers.append(_begin(opened, "members", near, first, end, *shared)[0])
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *_):
        self._opened.close()

    def all(self, act, *arguments, only=None, but=()):
        """What `act(member, *arguments)` of this file returns, by rank, of all or some members."""
        ranks = [rank for rank in only or range(self.size) if rank not in but]
        for worker in self._workers:
            worker.say([act, arguments, ranks])
        results = {}
        for worker in self._workers:
            results |= {int(rank): result for rank, result in worker.hear().items()}
        return results

    def processor_seconds(self):
        """Those of all processes so far, the store's among them."""
        ticks = 0
        for worker in (self.store, *self._workers):
            words = Path(f"/proc/{worker.process.pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(words[11]) + int(words[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def stop_store(self, how=signal.SIGKILL):
        os.kill(self.store.process.pid, how)


class _Worker:
    def __init__(self, *arguments):
        ours, theirs = os.pipe(), os.pipe()
        nothing = os.open(os.devnull, os.O_WRONLY)  # torch's stacks about a store that is killed
        self.process = fork_server.Interpreter(
            __file__, arguments, env=os.environ | VARIABLES,
            stdin=ours[0], stdout=theirs[1], stderr=nothing,
        )  # fmt: skip
        for file in (ours[0], theirs[1], nothing):
            os.close(file)
        self._to, self._from = os.fdopen(ours[1], "w"), os.fdopen(theirs[0])

    def say(self, words):
        print(json.dumps(words), file=self._to, flush=True)

    def hear(self):
        line = self._from.readline()
        assert line, f"process {self.process.pid} of members has ended: see its output"
        answer = json.loads(line)
        assert "failed" not in answer, answer["failed"]
        return answer

    def close(self):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for file in (self._to, self._from):
            with contextlib.suppress(BrokenPipeError):
                file.close()


def _begin(opened, *arguments):
    """A process of this file, and the port that it has told."""
    worker = _Worker(*arguments)
    opened.callback(worker.close)
    return worker, worker.hear()["port"]


class Member:
    def __init__(self, rank, size, port, counted):
        self.rank = rank
        self.everyone = list(range(size))
        self.store = dist.TCPStore(HOST, port, is_master=False, timeout=TIMEOUT)
        if counted:
            self.store = CountingStore(self.store)
        self.news, self.reports = [], []


def enter(member):
    """Does what each rank does at a start, and returns its seconds."""
    from bagua._core.group.connections import Connections

    start = time.monotonic()
    keys = dist.PrefixStore("group", member.store)
    member.connections = Connections(keys, member.rank, member.everyone, TIMEOUT, node=member.rank)
    member.connections.begin_beating()
    assert member.connections.node_of_ranks() == member.everyone
    return time.monotonic() - start


def wrap(member, meetings, bytes_of_address):
    """Meets as for the communicators of a wrap, takes a seat, and returns its seconds."""
    start = time.monotonic()
    for number in range(meetings):
        text = f"{member.rank} ".ljust(bytes_of_address, "x")
        texts = member.connections._gather(f"wrap1/lane{number}", member.everyone, text)
        assert len(texts) == len(member.everyone)
        assert texts[number].startswith(b"%d " % number)
    member.seat = member.connections.board("wrap1", "module 'Net'")
    member.seat.beat(7, "between two rounds")
    return time.monotonic() - start


def wait(member):
    """Waits for the others in round 7, as far as the board knows."""
    member.seat.beat(
        *(7, "1 of 2 buckets is done", True),
        on_news=lambda text: member.news.append((time.monotonic(), text)),
    )


def compute(member):
    member.seat.beat(7, "computing, 1 of 2 tensors are ready")


def requests(member):
    """The clock's time, and those of this member so far."""
    return time.monotonic(), member.store.total()


def lose(member):
    """Ends as a killed rank does, without a word; its clock's time."""
    member.connections._when_dropped.detach()
    member.seat = member.connections._board = member.connections._phase_seat = None
    return time.monotonic()


def diagnose(member):
    """The clock's time, and what the error of a broken connection says."""
    seen = f"module 'Net', rank {member.rank}, round 7: connection closed by peer"
    text = member.seat.diagnose(seen, 7)
    return time.monotonic(), text


def publish(member):
    now = time.monotonic()
    member.seat.publish("out of paper")
    return now


def told(member):
    """When this member was told of a failure first, and what."""
    deadline = time.monotonic() + 20.0
    while not member.news and time.monotonic() < deadline:
        time.sleep(0.05)
    return member.news[:1]


def leave(member):
    member.seat.publish_exit(7)
    member.connections.publish_exit()


def _serve_store():
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    _tell({"port": store.port})
    sys.stdin.read()


async def _serve_link(port, rtt_ms):
    loop = asyncio.get_running_loop()

    async def pump(reader, writer):
        while data := await reader.read(1 << 18):
            loop.call_later(rtt_ms / 2000, writer.write, data)
        loop.call_later(rtt_ms / 2000, writer.close)

    async def client(reader, writer):
        there = await asyncio.open_connection(HOST, port)
        with contextlib.suppress(ConnectionError):
            await asyncio.gather(pump(reader, there[1]), pump(there[0], writer))

    server = await asyncio.start_server(client, HOST, 0, backlog=4096)
    _tell({"port": server.sockets[0].getsockname()[1]})
    await server.serve_forever()


def _serve_members(port, first, end, size, counted):
    _tell({"port": port})
    members = {}
    for line in sys.stdin:
        act, arguments, ranks = json.loads(line)
        mine = [rank for rank in ranks if first <= rank < end]
        _tell(_results(members, globals()[act], arguments, mine, (size, port, counted)))


def _results(members, act, arguments, ranks, made):
    results = {}

    def one(place):
        rank = ranks[place]
        if rank not in members:
            members[rank] = Member(rank, *made)
        results[rank] = act(members[rank], *arguments)

    try:
        run_threads(len(ranks), one)
    except AssertionError as error:
        return {"failed": str(error)[:2000]}
    return results


def _tell(what):
    print(json.dumps(what), flush=True)


def main():
    # Hundreds of threads that wait for the interpreter would each ask for it every 5 ms.
    sys.setswitchinterval(0.5)
    role, *numbers = sys.argv[1:]
    if role == "store":
        _serve_store()
    elif role == "link":
        asyncio.run(_serve_link(int(numbers[0]), float(numbers[1])))
    else:
        _serve_members(*map(int, numbers))


if __name__ == "__main__":
    main()
