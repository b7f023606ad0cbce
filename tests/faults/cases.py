"""Faults, their place and time, drawn from a seed; and the required outcome."""

import random
from dataclasses import asdict, dataclass

from faults import memory_cgroup
from support import every_algorithm, training

#: Seconds after which a rank gives up waiting for another.
TIMEOUT = 6.0
STEPS = 10
#: What comes of a fault for the ranks that it leaves alone.
GOES_ON = "goes on"  # to the end, with the bits of a run without the fault
ERROR = "error"  # a BaguaError that names the victim
MISMATCH = "mismatch"  # BaguaMismatchError on all ranks, the victim too
SPREADS = "spreads"  # to the end; the victim's bad value reaches all
#: fault: (what comes of it, where it can happen)
FAULTS = {
    "none": (GOES_ON, ["between"]),
    "kill": (ERROR, ["wrap", "between", "forward", "backward", "optimizer", "any"]),
    "exit": (ERROR, ["wrap", "between", "forward", "backward", "optimizer"]),
    "kill with a helper": (ERROR, ["between", "forward", "backward", "any"]),
    "raise": (ERROR, ["wrap", "between", "forward", "backward", "optimizer"]),
    "interrupt": (ERROR, ["wrap", "between", "backward", "any"]),
    "interrupt at a line": (ERROR, ["wrap", "between"]),  # of bagua, some lines after the place
    "terminate at a line": (ERROR, ["wrap", "between"]),
    "no memory": (ERROR, ["wrap", "between", "forward", "optimizer"]),
    "memory cgroup": (ERROR, ["wrap", "between", "forward", "optimizer"]),
    "leave": (ERROR, ["between"]),
    "fork": (GOES_ON, ["between", "optimizer"]),
    "stop": (ERROR, ["between", "forward", "backward", "any"]),
    "hold": (ERROR, ["wrap", "between", "forward", "backward"]),
    "slow": (GOES_ON, ["wrap", "between", "forward", "backward", "optimizer"]),
    "pause": (GOES_ON, ["between", "forward", "backward", "any"]),
    "store killed": (GOES_ON, ["between", "backward"]),
    "store stopped": (GOES_ON, ["between", "backward"]),
    "words": (GOES_ON, ["between", "backward"]),  # of a stranger, on the boards of the groups
    "nan": (SPREADS, ["backward"]),
    "inf": (SPREADS, ["backward"]),
    "other shape": (MISMATCH, ["wrap"]),
    "other dtype": (MISMATCH, ["wrap"]),
    "other order": (MISMATCH, ["wrap"]),
    "other algorithm": (MISMATCH, ["wrap"]),
    "other buckets": (MISMATCH, ["wrap"]),
}
if not memory_cgroup.can_be_made():
    del FAULTS["memory cgroup"]
if training.device_type() == "cuda":
    # torch's monitor of NCCL waits for a stopped store, and the end of torch's group for it.
    del FAULTS["store stopped"]


@dataclass(frozen=True)
class Case:
    """One fault in one training. `seconds`: how long, or after which time for place "any"."""

    fault: str
    place: str
    algorithm: str
    ranks: int
    victim: int
    step: int
    seconds: float
    lanes: int
    store: str  # "agent": a separate process has it; "rank 0"
    seed: int = 0

    @property
    def outcome(self):
        return FAULTS[self.fault][0]

    @property
    def undisturbed(self):
        """The same training without the fault."""
        changes = {"fault": "none", "place": "between", "victim": 0, "step": 0, "seconds": 0.0}
        return Case(**{**asdict(self), **changes, "store": "agent", "seed": 0})

    def __str__(self):
        return (
            f"seed {self.seed}: {self.fault} of rank {self.victim} of {self.ranks} at "
            f"{self.place}, step {self.step}, {self.seconds:.2f} s; {self.algorithm}, "
            f"{self.lanes} lane(s), store of {self.store}"
        )


def draw(seed, fault=None, algorithm=None):
    """The case of that seed; `fault` and `algorithm` leave less to chance."""
    chance = random.Random(f"processes {seed}")
    drawn_fault = chance.choice([name for name in FAULTS if name != "none"])
    fault = fault or drawn_fault
    drawn_algorithm = chance.choice(list(every_algorithm.ALGORITHMS))
    algorithm = algorithm or drawn_algorithm
    ranks = chance.choice([2, 3, 3, 4])
    place = chance.choice(FAULTS[fault][1])
    store = chance.choice(["agent", "agent", "rank 0"])
    step = chance.randint(2, STEPS - 3)
    if fault in ("store killed", "store stopped"):
        # What is left of it is not enough to connect again, as some algorithms do after warm-up.
        store, step = "agent", max(step, every_algorithm.WARM_UP + 1)
    return Case(
        fault=fault,
        place=place,
        algorithm=algorithm,
        ranks=ranks,
        victim=chance.randrange(ranks),
        step=step,
        seconds=chance.uniform(0.05, 1.2),
        lanes=chance.choice([1, 1, 2]),
        store=store,
        seed=seed,
    )
