"""Islands of a mailbox that are killed, stopped, told to leave and started again, and their judge.

By hand: `python tests/faults/mailbox_job.py --faults 50 --seed 1`, or `--kills 1000 --notices 200`
for those kinds alone. With `--s3` the mailbox lies in a server that speaks S3, which is stopped for
a while and loses answers as well (`make mailbox`).
"""

import argparse
import collections
import contextlib
import functools
import json
import random
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from faults import elastic_job, mailbox_island
from faults.elastic_rank import EXIT_OF_AN_ERROR
from support.processes import s3_server

ISLANDS = 4
#: After which an island that has not come to the place of its death is killed anywhere.
SECONDS_TO_A_PLACE = 5.0
MISHAPS = 29  # one of so many requests to the S3 server fails
#: Of the job without a fault, whose loss hardly falls any more.
MOST_ROUNDS_WITHOUT = 2000
KINDS = "kill", "stop", "leave", "replace", "double"
REFUSED = "another process is island"
REPLACED = "another process has taken the name of island"
PLANS = [
    {},
    {"codec": "int4_block"},
    {"codec": "int4_block", "fragments": 2, "overlap_steps": 1},
    {"codec": "minmax_uint8", "overlap_steps": 2},
]


class MailboxJob(elastic_job.Job):
    """Islands of one process each. `plan`: arguments of the algorithm; `bucket`: of the mailbox.

    Attributes:
        struck: how many faults of each kind there were.
    """

    program = Path(__file__).with_name("mailbox_island.py")
    patience = 240.0  # in which islands are back from the faults of one strike

    def __init__(self, rounds=elastic_job.UNENDING, plan=PLANS[1], grace=None, bucket=None):
        super().__init__(rounds, ISLANDS)
        self._server, url, variables = bucket or (None, str(self.folder / "mailbox"), {})
        self.struck = collections.Counter()
        self._variables = variables | {
            "MAILBOX": url,
            "PLAN": json.dumps(plan),
            "GRACE": json.dumps(grace),
            "OMP_NUM_THREADS": "1",
            "SECONDS": "0.01",  # of a step: most of the time they sleep
        }
        self._others = []  # processes beside the newest of each island
        self._made_before = {}  # rounds that any island had made when a process was started

    def __exit__(self, *error):
        for process in self._others:
            process.kill()
            process.wait()
        super().__exit__(*error)

    def start(self, island, death=None):
        before = max((self.made(each)[0] for each in self.processes), default=0)
        super().start(island, death)
        self._made_before[island, self.processes[island].pid] = before

    def environment(self, island):
        return self._variables | {"ISLAND": str(island)}

    # Faults, step by step: each yields while it waits.

    def strike(self, chance, weights):
        """Faults of some islands at once, and their consequences: all are back and train.

        weights: of the kinds that are drawn.
        """
        acts = {kind: getattr(self, f"_{kind}") for kind in KINDS}
        everyone = list(range(ISLANDS))

        def draw(kinds):
            return chance.choices(kinds, [weights[kind] for kind in kinds])[0]

        if chance.random() < 0.15:
            of_all = [kind for kind in ("kill", "stop", "leave") if weights[kind]]
            kinds = dict.fromkeys(everyone, draw(of_all))
        else:
            victims = chance.sample(everyone, chance.choice([1, 1, 2, 2, 3]))
            kinds = {victim: draw(KINDS) for victim in victims}
        under_way = {victim: acts[kind](victim, chance) for victim, kind in kinds.items()}
        if self._server is not None and chance.random() < 0.3:
            kinds["server"] = "stop of server"
            under_way["server"] = self._stopped(self._server, chance)
        self.struck.update(kinds.values())
        self._perform(under_way)
        before = max(self.made(island)[0] for island in everyone)
        self.wait_until(f"all islands train after {kinds}", lambda: self.all_train(before))
        return ", ".join(f"{kind} {victim}" for victim, kind in kinds.items())

    def _perform(self, acts):
        deadline = time.monotonic() + self.patience
        words = str(list(acts))
        while acts:
            for victim, act in list(acts.items()):
                if next(act, self) is self:  # it is over
                    del acts[victim]
            self._all_live_but(acts)
            if time.monotonic() > deadline:
                self.fail(f"faults of islands {words} are not over: {list(acts)}")
            time.sleep(0.02)

    def _all_live_but(self, those):
        for island, process in self.processes.items():
            if island not in those and process.poll() is not None:
                self.fail(f"island {island} ended with {process.returncode}")

    def all_train(self, before):
        """Whether all islands have made more rounds than `before`."""
        self._all_live_but([])
        return all(self.made(island)[0] > before for island in self.processes)

    def _pass(self, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            yield

    def _ends(self, process, status, kind):
        while process.poll() is None:
            yield
        if process.returncode != status:
            self.fail(f"{kind}: a process ended with {process.returncode}, not {status}")

    def _kill(self, island, chance):
        yield from self._pass(chance.uniform(0.0, 0.5))
        process = self.processes[island]
        if chance.random() < 0.7:
            place = chance.choice(list(mailbox_island.PLACES))
            when = chance.choice(["before", "after"])
            (self.folder / f"{island}.death").write_text(f"{when} {place}")
            process.send_signal(signal.SIGUSR1)
            end = time.monotonic() + SECONDS_TO_A_PLACE
            while process.poll() is None and time.monotonic() < end:
                yield
        process.kill()
        yield from self._ends(process, -signal.SIGKILL, "kill")
        yield from self._comes_back(island, chance)

    def _comes_back(self, island, chance):
        """At once, or when the others have missed it."""
        yield from self._pass(chance.choice([0.0, chance.uniform(0.0, 2 * mailbox_island.SILENCE)]))
        self.start(island)

    def _leave(self, island, chance):
        yield from self._pass(chance.uniform(0.0, 0.5))
        process = self.processes[island]
        process.send_signal(signal.SIGTERM)
        yield from self._ends(process, 0, "leave")
        yield from self._comes_back(island, chance)

    def _stop(self, island, chance):
        yield from self._stopped(self.processes[island], chance)

    def _stopped(self, process, chance):
        yield from self._pass(chance.uniform(0.0, 0.5))
        process.send_signal(signal.SIGSTOP)
        yield from self._pass(chance.uniform(0.1, 2 * mailbox_island.SILENCE))
        process.send_signal(signal.SIGCONT)

    def _replace(self, island, chance):
        """It is stopped, and goes on when another process has its name."""
        yield from self._pass(chance.uniform(0.0, 0.5))
        process = self.processes[island]
        process.send_signal(signal.SIGSTOP)
        self._others.append(process)
        self.start(island)
        while not self.made(island)[0]:
            yield
        process.send_signal(signal.SIGCONT)
        yield from self._ends(process, EXIT_OF_AN_ERROR, "replace")
        self._others.remove(process)
        self._says(island, REPLACED)

    def _double(self, island, chance):
        """A second process is started under its name; one of the two is refused."""
        yield from self._pass(chance.uniform(0.0, 0.5))
        first = self.processes[island]
        self.start(island)
        second = self.processes[island]
        while first.poll() is None and second.poll() is None:
            yield
        # The first one may have been silent, on a busy machine.
        ended, stays = (second, first) if first.poll() is None else (first, second)
        self.processes[island] = stays
        yield from self._ends(ended, EXIT_OF_AN_ERROR, "double")
        self._says(island, REFUSED if ended is second else REPLACED)

    def _says(self, island, words):
        if words not in self.output(island).read_text():
            self.fail(f"island {island} did not say: {words}")

    # The end.

    def judge(self):
        """As of every job. Also: an island goes on after the last round, and has refused no file.

        A folder has few old rounds at the end, whoever was killed before it could remove them.
        """
        for island in self.processes:
            text = self.output(island).read_text()
            if " is refused: " in text or "Traceback" in text:
                self.fail(f"island {island} has refused a file or crashed")
            begins = {
                note["pid"]: note["begins"] for note in self.notes(island) if "begins" in note
            }
            for pid, made in begins.items():
                assert made >= self._made_before[island, pid], (island, made, self._made_before)
        if (folder := self.folder / "mailbox").exists():
            assert len(list(folder.glob("round-*"))) <= 4 * mailbox_island.KEEP
            assert len(list(folder.glob("anchor-*"))) <= 3
        return super().judge()


def missing(faults, struck):
    """Weights of kinds, of which those that are missing are to be drawn; empty: none is."""
    if isinstance(faults, int):
        return dict.fromkeys(KINDS, 1) if struck.total() < faults else {}
    left = {kind: max(0, faults.get(kind, 0) - struck[kind]) for kind in KINDS}
    return left if any(left.values()) else {}


def soak(faults, seed, report=lambda text: None, bucket=None):
    """(final loss, rounds, plan, faults by kind) of islands with random faults.

    faults: as many of any kind, or those of each kind.
    """
    chance = random.Random(f"mailbox {seed}")
    plan, grace = chance.choice(PLANS), chance.choice([None, 0.5])
    report(f"plan {plan}, grace {grace}")
    with MailboxJob(plan=plan, grace=grace, bucket=bucket) as job:
        job.start_all()
        job.wait_until("all begin", lambda: job.all_train(0))
        while weights := missing(faults, job.struck):
            begin = time.monotonic()
            what = job.strike(chance, weights)
            report(f"{job.struck.total()}: {what}, {time.monotonic() - begin:.1f} s")
        return job.finish(), job.judge(), plan, dict(job.struck)


def reference(rounds, plan):
    """The loss of islands without a fault."""
    with MailboxJob(rounds, plan) as job:
        job.start_all()
        loss = job.finish()
        job.judge()
        return loss


def check(faults, seed, report=lambda text: None, s3=False):
    """AssertionError where faults, as `soak` takes them, leave more than late rounds."""
    with s3_server.bucket(MISHAPS) if s3 else contextlib.nullcontext() as bucket:
        loss, rounds, plan, kinds = soak(faults, seed, report, bucket)
    without = reference(min(rounds, MOST_ROUNDS_WITHOUT), plan)
    report(f"{kinds}, {rounds} rounds: loss {loss:.4f}, {without:.4f} without")
    assert loss <= elastic_job.MOST_RATIO * without


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--notices", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--s3", action="store_true")
    arguments = parser.parse_args()
    report = functools.partial(print, flush=True)
    kinds = {"kill": arguments.kills, "leave": arguments.notices}
    faults = kinds if any(kinds.values()) else arguments.faults
    check(faults, arguments.seed, report, arguments.s3)


if __name__ == "__main__":
    main()
