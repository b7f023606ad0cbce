"""An elastic job whose ranks are killed, stopped, told to leave and started again, and its judge.

By hand: `python tests/faults/elastic_job.py --faults 50 --seed 1`.
"""

import argparse
import functools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.processes import fork_server, pool
from support.processes.fork_server import Interpreter

RANKS = 3
#: Seconds in which training must go on after a fault or a start.
PATIENCE = 60.0
#: In which an undisturbed job makes one, on a busy machine.
SECONDS_OF_A_ROUND = 0.3
#: Final loss over that of a job without faults.
MOST_RATIO = 1.02
UNENDING = 10**9
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "leave": signal.SIGTERM}
LAST_NOTES = 4096  # bytes, which have the newest round


class Job:
    """Ranks over a store that outlives them."""

    program = Path(__file__).with_name("elastic_rank.py")
    patience = PATIENCE

    def __init__(self, rounds=UNENDING, size=RANKS):
        self.folder = Path(tempfile.mkdtemp(prefix="bagua-elastic-"))
        self._rounds = rounds
        self._size = size
        self._store = pool.new_store()
        self._doomed = set()
        fork_server.variables()  # starts the servers, before a rank could wait for another's
        self._numbers = 0
        self.processes = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes.values():
            process.kill()
            process.wait()
        shutil.rmtree(self.folder)

    def start(self, rank, death=None):
        """Start a rank, perhaps again. death: for elastic_rank.py."""
        self._numbers += 1
        (self._doomed.add if death else self._doomed.discard)(rank)
        arguments = [self.folder, self._rounds, *([death] if death else [])]
        with open(os.devnull) as nothing, open(self.output(rank), "a") as output:
            self.processes[rank] = Interpreter(
                self.program,
                arguments,
                env=os.environ | self.environment(rank) | {"PYTHONFAULTHANDLER": "1"},
                number=self._numbers,
                stdin=nothing,
                stdout=output,
                stderr=output,
            )

    def environment(self, rank):
        return pool.torchrun_environment(rank, self._size, self._store.port)

    def start_all(self, deaths=None):
        for rank in range(self._size):
            self.start(rank, (deaths or {}).get(rank))

    def output(self, rank):
        return self.folder / f"{rank}.out"

    def notes(self, rank, last=None):
        """Notes of a rank's processes; `last`: only so many bytes are read, from the end."""
        path = self.folder / f"{rank}.jsonl"
        if not path.exists():
            return []
        with open(path, "rb") as file:
            file.seek(0 if last is None else max(0, path.stat().st_size - last))
            lines = file.read().splitlines()
        return [json.loads(line) for line in lines if line.startswith(b"{") and line.endswith(b"}")]

    def made(self, rank):
        """(rounds of the newest process of a rank, its members)."""
        pid = self.processes[rank].pid
        notes = self.notes(rank, LAST_NOTES)
        rounds = [n for n in notes if "round" in n and n["pid"] == pid]
        return (rounds[-1]["round"], rounds[-1]["members"]) if rounds else (0, [])

    def wait_until(self, what, condition, seconds=None):
        """Fails, with all output, if the condition does not come true in time."""
        seconds = self.patience if seconds is None else seconds
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                self.fail(f"not in {seconds:g} s: {what}")
            time.sleep(0.02)

    def fail(self, why):
        for process in self.processes.values():
            process.send_signal(signal.SIGABRT)
        time.sleep(1.0)
        outputs = [  # with the stacks of all threads
            f"--- rank {rank} made {self.made(rank)}\n{self.output(rank).read_text()[-12_000:]}"
            for rank in self.processes
        ]
        raise AssertionError("\n".join([why, *outputs]))

    def wait_for_members(self, ranks):
        """Until those ranks train, together, and nobody else."""
        self.wait_until(
            f"ranks {ranks} train",
            lambda: all(self.made(rank)[1] == ranks for rank in ranks),
        )

    def finish(self):
        """A few rounds more, then all end by themselves; their loss, equal on the living.

        Of a sharded model: on those that have the same part.
        """
        if self._rounds == UNENDING:
            last = max(self.made(rank)[0] for rank in self.processes) + 30
            (self.folder / "last.new").write_text(str(last))
            (self.folder / "last.new").rename(self.folder / "last")
        living = [rank for rank in self.processes if rank not in self._doomed]
        rounds = 0 if self._rounds == UNENDING else self._rounds
        self.wait_until(
            "all end",
            lambda: all(self.processes[r].poll() is not None for r in living),
            self.patience + SECONDS_OF_A_ROUND * rounds,
        )
        ends = {rank: self.processes[rank].returncode for rank in living}
        if any(ends.values()):
            self.fail(f"ranks ended with {ends}")
        losses = {(self.part_of(rank), self.notes(rank)[-1]["loss"]) for rank in living}
        assert len(losses) == len({part for part, _ in losses}), losses
        return min(loss for _, loss in losses)

    def judge(self):
        """The bits of every round are equal on all ranks that made it; the number of rounds.

        Of a sharded model: on those that have the same part.
        """
        rounds = {}
        for rank in range(self._size):
            for note in self.notes(rank):
                if "round" in note:
                    part = (note["round"], self.part_of(rank))
                    rounds.setdefault(part, set()).add(note["bits"])
        different = {number: bits for number, bits in rounds.items() if len(bits) > 1}
        assert not different, f"ranks differ after rounds {different}"
        return max(rounds)[0]

    def part_of(self, rank):
        """Which part of the model a rank has: all have the whole."""
        return 0

    def strike(self, chance):
        """One fault and its consequences: the rest goes on, and the rank comes back."""
        everyone = list(range(RANKS))
        victim, kind = chance.choice(everyone), chance.choice(["kill", "kill", "stop", "leave"])
        rest = [rank for rank in everyone if rank != victim]
        time.sleep(chance.uniform(0.0, 0.5))
        process = self.processes[victim]
        process.send_signal(SIGNALS[kind])
        if kind == "leave":
            self.wait_until("it leaves", lambda: process.poll() is not None)
            assert process.returncode == 0, self.output(victim).read_text()[-2000:]
        waits = chance.random() < 0.5
        if kind == "stop" or waits:
            self.wait_for_members(rest)
        if kind == "stop":
            process.send_signal(signal.SIGCONT)
            self.wait_until("the stopped rank ends", lambda: process.poll() is not None)
            text = self.output(victim).read_text()
            assert f"rank {victim} was taken for dead" in text, text[-2000:]
        process.wait()
        self.start(victim)
        self.wait_for_members(everyone)
        return kind


def reference(rounds, kind=Job):
    """The loss of an undisturbed job of so many rounds."""
    with kind(rounds) as job:
        job.start_all()
        loss = job.finish()
        job.judge()
        return loss


def soak(faults, seed, report=lambda text: None, kind=Job):
    """(final loss, rounds) of a job with that many random faults."""
    chance = random.Random(seed)
    with kind() as job:
        job.start_all()
        job.wait_until("all begin", lambda: all(job.made(r)[0] > 0 for r in job.processes))
        for number in range(faults):
            begin = time.monotonic()
            what = job.strike(chance)
            report(f"{number + 1}: {what}, {time.monotonic() - begin:.1f} s")
        return job.finish(), job.judge()


def main(kind=Job):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    report = functools.partial(print, flush=True)
    loss, rounds = soak(arguments.faults, arguments.seed, report, kind)
    print(f"{rounds} rounds, loss {loss:.4f}", flush=True)
    without = reference(rounds, kind)
    print(f"{arguments.faults} faults, {rounds} rounds: loss {loss:.4f}, {without:.4f} without")
    assert loss <= MOST_RATIO * without


if __name__ == "__main__":
    main()
