"""Islands of ranks that are killed and started again, and their judge.

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


class IslandJob(elastic_job.Job):
    """Islands, each with a store of its own as its torchrun would serve, and one store of all."""

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
            "MIN_RANKS": str(self._least),
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


def strike(job, chance):
    """A rank is killed, its island ends, the others go on, and it comes back; or it is stopped."""
    victim = chance.randrange(job.islands * RANKS)
    island = victim // RANKS
    rest = [other for other in range(job.islands) if other != island]
    time.sleep(chance.uniform(0.0, 0.5))
    if "GRACE" in os.environ and chance.random() < 0.5:
        return stop(job, chance, victim)
    job.processes[victim].kill()
    others = [job.processes[p] for p in job.ranks_of(island)]
    if chance.random() < 0.5:  # as torchrun does; else they notice it, and end by themselves
        time.sleep(chance.uniform(0.0, 1.0))
        for process in others:
            process.kill()
    if chance.random() < 0.5:  # else it may be back before the others miss it
        job.wait_for_islands(*rest)
    job.wait_until("the island ends", lambda: all(p.poll() is not None for p in others))
    job.start_island(island)
    job.wait_for_islands(*range(job.islands))
    return f"island {island} by its rank {victim % RANKS}"


def stop(job, chance, victim):
    """A rank stops for a while: its island is late, or taken for dead, ends and starts again."""
    island = victim // RANKS
    own = [job.processes[p] for p in job.ranks_of(island)]
    seconds = chance.uniform(0.2, 4.0)
    job.processes[victim].send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    job.processes[victim].send_signal(signal.SIGCONT)
    everyone = list(range(job.islands))
    back = [job.made(p)[0] for p in job.ranks_of(*everyone)]

    def over():
        made = [job.made(p) for p in job.ranks_of(*everyone)]
        together = all(members == everyone for _, members in made)
        newer = all(rounds > before for (rounds, _), before in zip(made, back, strict=True))
        return (together and newer) or all(p.poll() is not None for p in own)

    job.wait_until("the island is back, or ends", over)
    text = f"island {island} stopped for {seconds:.1f} s"
    if own[0].poll() is None:
        return text
    job.start_island(island)
    job.wait_for_islands(*everyone)
    return f"{text}, and was started again"


def main():
    elastic_job.main(IslandJob, strike)


if __name__ == "__main__":
    main()
