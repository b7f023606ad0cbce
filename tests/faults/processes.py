"""Random faults of ranks that are processes, and of their store."""

import json
import os
import shutil
import signal
import socket
import time

import torch.distributed as dist
from faults import memory_cgroup, training_rank
from faults.cases import TIMEOUT
from faults.verdict import RankOutcome
from support.processes import forked_jobs

#: Seconds until a rank that has not ended counts as hanging: after the fault, and in all.
PATIENCE = 4 * TIMEOUT + 20.0  # gloo tries to connect three times
LIMIT = 120.0


def _serve_store(pipe):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(pipe, str(store.port).encode())
    while True:
        time.sleep(60)


def _free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Job(forked_jobs.ForkedJob):
    """One case at work; `outcomes` when it has ended."""

    def __init__(self, case):
        self.case = case
        self.hanging = set()
        self._store = None
        self._struck = None
        self._stopped = None

    def start(self):
        self.make_folder("bagua-fault-")
        port = self._start_store() if self.case.store == "agent" else _free_port()
        self.start_ranks(
            self.case.ranks, lambda rank: training_rank.main(self.case, rank, port, self.folder)
        )

    def _start_store(self):
        ours, theirs = os.pipe()
        self._store = forked_jobs.fork(_serve_store, theirs)
        os.close(theirs)
        port = int(os.read(ours, 16))
        os.close(ours)
        return port

    def poll(self):
        """Whether all ranks have ended."""
        over = self.look()
        self._assist()
        now = time.monotonic()
        late = self._struck is not None and now > self._struck + PATIENCE
        if not over and (late or now > self.begun + LIMIT):
            self.hanging = set(self.kill())
        return not self.left()

    def _assist(self):
        """What a rank cannot do itself: go on when it is stopped, hear that the others have ended,
        kill the store.
        """
        now = time.monotonic()
        if self._struck is None and self._events(self.case.victim, "fault"):
            self._struck = now
        others = [rank for rank in self.pids if rank != self.case.victim]
        over = all(rank in self.statuses for rank in others)
        if over and not (self.folder / "over").exists():
            (self.folder / "over").touch()
        if self._stopped is None and (self.folder / "stopped").exists():
            self._stopped = now
        if self._stopped and self.case.victim not in self.statuses:
            pause = self.case.fault == "pause" and now > self._stopped + self.case.seconds
            if pause or over:
                os.kill(self.pids[self.case.victim], signal.SIGCONT)
        if (self.folder / "kill store").exists():
            self._end_store()
            (self.folder / "kill store").unlink()
        if (self.folder / "stop store").exists():
            os.kill(self._store, signal.SIGSTOP)
            (self.folder / "stop store").unlink()

    def _end_store(self):
        if self._store is not None:
            os.kill(self._store, signal.SIGKILL)
            os.waitpid(self._store, 0)
            self._store = None

    def abandon(self):
        super().abandon()
        self._end_store()

    def _events(self, rank, kind):
        path = self.folder / f"rank-{rank}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if kind in event]

    def outcomes(self):
        """What each rank did; the folder is gone afterwards."""
        results = [self._outcome(rank) for rank in range(self.case.ranks)]
        self._end_store()
        memory_cgroup.remove_empty()
        shutil.rmtree(self.folder)
        return results

    def _outcome(self, rank):
        output = self.folder / f"output-{rank}"
        outcome = RankOutcome(
            steps={e["step"]: (e["bits"], e["finite"]) for e in self._events(rank, "bits")},
            done=bool(self._events(rank, "done")),
            hangs=rank in self.hanging,
            struck=bool(self._events(rank, "fault")),
            output=output.read_text(errors="replace") if output.exists() else "",
        )
        for event in self._events(rank, "error"):
            outcome.error, outcome.text = event["error"], event["text"]
        if rank not in self.hanging:
            status, allowed = self.statuses[rank], self._allowed(rank, outcome)
            if status not in allowed:
                outcome.crash = f"ended with {status}, not {sorted(allowed)}"
        return outcome

    def _allowed(self, rank, outcome):
        if rank == self.case.victim and outcome.struck:
            own = {"exit": 3, "raise": 1, "no memory": 1, "leave": 0}
            own |= dict.fromkeys(("kill", "kill with a helper", "memory cgroup"), -signal.SIGKILL)
            own |= {"interrupt at a line": 1, "terminate at a line": -signal.SIGTERM}
            if self.case.fault in own:
                return {own[self.case.fault]}
            if self.case.fault == "interrupt":  # it may come when the training is over
                return {0, 1} if outcome.done else {1}
        return {training_rank.EXIT_OF_AN_ERROR} if outcome.error else {0}

    def seconds_until_over(self):
        """From the fault to the end of the last rank, or None where none came."""
        return None if self._struck is None else time.monotonic() - self._struck


def run(cases, at_once=4):
    """Yields (case, outcomes, seconds from the fault to the end) of each, as they end."""
    for job in forked_jobs.run([Job(case) for case in cases], at_once):
        seconds = job.seconds_until_over()
        yield job.case, job.outcomes(), seconds
