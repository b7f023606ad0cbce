"""Islands of ranks that are killed, told to leave and started again, and their judge.

By hand: `python tests/faults/island_job.py --faults 30 --seed 1`. With GRACE=0.5 in the environment
rounds do not wait longer for islands that are late, and some are only stopped for a while.
"""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from faults import elastic_job
from support.processes import pool

RANKS = 2  # of an island
MOST_STARTS = 3  # of an island after one fault


class IslandJob(elastic_job.Job):
    """Islands, each with a separate store as its torchrun would serve, and one store of all."""

    def __init__(self, rounds=elastic_job.UNENDING, islands=2, least=1, later=0):
        super().__init__(rounds, (islands + later) * RANKS)
        self.islands = islands
        self._least = least
        self._stores = [pool.new_store() for _ in range(islands + later)]
        self._starts = [0] * (islands + later)

    def environment(self, process):
        island, rank = divmod(process, RANKS)
        return pool.torchrun_environment(rank, RANKS, self._stores[island].port) | {
            "TORCHELASTIC_RESTART_COUNT": str(self._starts[island] - 1),
            "ISLAND": str(island),
            "ISLANDS": str(self.islands),
            "ISLANDS_STORE": f"127.0.0.1:{self._store.port}",
            "QUORUM": str(self._least),
        }

    def start_island(self, island, deaths=None):
        self._starts[island] += 1
        for process in self.ranks_of(island):
            self.start(process, (deaths or {}).get(process))
        if deaths and any(process in deaths for process in self.ranks_of(island)):
            self._doomed.update(self.ranks_of(island))

    def start_all(self, deaths=None):
        for island in range(self.islands):
            self.start_island(island, deaths)

    def ranks_of(self, *islands):
        return [i * RANKS + rank for i in islands for rank in range(RANKS)]

    def wait_for_islands(self, *islands):
        """Until those train, together, and nobody else."""
        self.wait_until(
            f"islands {islands} train",
            lambda: all(self.made(p)[1] == list(islands) for p in self.ranks_of(*islands)),
        )

    def part_of(self, process):
        return process % RANKS

    def strike(self, chance):
        """A rank is killed, its island ends and comes back; or is told to leave, or stopped."""
        victim = chance.randrange(self.islands * RANKS)
        island = victim // RANKS
        rest = [other for other in range(self.islands) if other != island]
        time.sleep(chance.uniform(0.0, 0.5))
        if os.environ.get("GRACE") and chance.random() < 0.5:
            seconds = chance.uniform(0.2, 4.0)
            self.processes[victim].send_signal(signal.SIGSTOP)
            time.sleep(seconds)
            self.processes[victim].send_signal(signal.SIGCONT)
            starts = self._train_together(island)
            return f"island {island} stopped for {seconds:.1f} s, started {starts} times"
        if chance.random() < 0.3:
            return self._leave(victim)
        self.processes[victim].kill()
        others = [self.processes[p] for p in self.ranks_of(island)]
        if chance.random() < 0.5:  # as torchrun does; else they notice it, and end by themselves
            time.sleep(chance.uniform(0.0, 1.0))
            for process in others:
                process.kill()
        if chance.random() < 0.5:  # else it may be back before the others miss it
            self.wait_for_islands(*rest)
        self.wait_until("the island ends", lambda: all(p.poll() is not None for p in others))
        starts = self._train_together(island)
        return f"island {island} by its rank {victim % RANKS}, started {starts} times"

    def _leave(self, victim):
        """One rank is told to leave, its island does, and comes back."""
        island = victim // RANKS
        self.processes[victim].send_signal(signal.SIGTERM)
        own = {p: self.processes[p] for p in self.ranks_of(island)}
        self.wait_until(
            "the island leaves", lambda: all(p.poll() is not None for p in own.values())
        )
        ends = {rank: process.returncode for rank, process in own.items()}
        if any(ends.values()):
            self.fail(f"ranks of an island that leaves ended with {ends}")
        return f"island {island} leaves, started {self._train_together(island)} times"

    def _train_together(self, island):
        """Wait until all islands train, and start one again that has ended, as torchrun does.

        Returns how often. A stopped one is late or taken for dead, as one on a busy machine.
        """
        everyone = list(range(self.islands))
        for starts in range(MOST_STARTS + 1):
            own = [self.processes[p] for p in self.ranks_of(island)]
            before = {p: self.made(p)[0] for p in self.ranks_of(*everyone)}

            def over(own=own, before=before):
                made = {p: self.made(p) for p in before}
                together = all(made[p][1] == everyone and made[p][0] > before[p] for p in before)
                return together or all(p.poll() is not None for p in own)

            self.wait_until(f"island {island} is back, or ends", over)
            if own[0].poll() is None:
                return starts
            if starts < MOST_STARTS:
                self.start_island(island)
        self.fail(f"island {island} was started {MOST_STARTS} times, and has ended again")


if __name__ == "__main__":
    elastic_job.main(IslandJob)
