"""Faults, their place and time, drawn from a seed; and the required outcome."""

import random
from dataclasses import asdict, dataclass

from bagua import _C
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
PROCESS_FAULTS = {
    "none": (GOES_ON, ["between"]),
    "kill": (ERROR, ["wrap", "between", "forward", "backward", "optimizer", "any"]),
    "exit": (ERROR, ["wrap", "between", "forward", "backward", "optimizer"]),
    "kill with a helper": (ERROR, ["between", "forward", "backward", "any"]),
    "raise": (ERROR, ["wrap", "between", "forward", "backward", "optimizer"]),
    "interrupt": (ERROR, ["wrap", "between", "backward", "any"]),
    "no memory": (ERROR, ["wrap", "between", "forward", "optimizer"]),
    "leave": (ERROR, ["between"]),
    "fork": (GOES_ON, ["between", "optimizer"]),
    "stop": (ERROR, ["between", "forward", "backward", "any"]),
    "hold": (ERROR, ["wrap", "between", "forward", "backward"]),
    "slow": (GOES_ON, ["wrap", "between", "forward", "backward", "optimizer"]),
    "pause": (GOES_ON, ["between", "forward", "backward", "any"]),
    "store killed": (GOES_ON, ["between", "backward"]),
    "store stopped": (GOES_ON, ["between", "backward"]),
    "nan": (SPREADS, ["backward"]),
    "inf": (SPREADS, ["backward"]),
    "other shape": (MISMATCH, ["wrap"]),
    "other dtype": (MISMATCH, ["wrap"]),
    "other order": (MISMATCH, ["wrap"]),
    "other algorithm": (MISMATCH, ["wrap"]),
    "other buckets": (MISMATCH, ["wrap"]),
}
if training.device_type() == "cuda":
    # torch's monitor of NCCL waits for a stopped store, and the end of torch's group for it.
    del PROCESS_FAULTS["store stopped"]
THREAD_FAULTS = {
    "none": (GOES_ON, ["between"]),
    "raise": (ERROR, ["before", "after"]),
    "abort": (ERROR, ["any"]),
    "leave": (ERROR, ["between", "begun"]),
    "hold": (ERROR, ["between", "begun", "marking"]),
    "slow": (GOES_ON, ["between", "begun", "before", "after"]),
    "other plan": (ERROR, ["wrap"]),
    "other incarnation": (ERROR, ["wrap"]),
    "store fails": (GOES_ON, ["between"]),
}
#: What the buckets of thread ranks do.
THREAD_OPERATIONS = [
    "all_reduce",
    *_C.codec_names(),
    "average_weights",
    "gossip",
    "compressed_gossip",
    "low_rank",
    "sparse",
]


@dataclass(frozen=True)
class Case:
    """One fault in one training. `seconds`: how long, or after which time for place "any"."""

    form: str  # "processes" or "threads"
    fault: str
    place: str
    algorithm: str  # of every_algorithm, or of THREAD_OPERATIONS
    ranks: int
    victim: int
    step: int
    seconds: float
    lanes: int
    store: str  # "agent": a process of its own has it; "rank 0"
    seed: int = 0

    @property
    def outcome(self):
        faults = PROCESS_FAULTS if self.form == "processes" else THREAD_FAULTS
        return faults[self.fault][0]

    @property
    def undisturbed(self):
        """The same training without the fault."""
        changes = {"fault": "none", "place": "between", "victim": 0, "step": 0, "seconds": 0.0}
        return Case(**{**asdict(self), **changes, "store": "agent", "seed": 0})

    def __str__(self):
        return (
            f"{self.form}, seed {self.seed}: {self.fault} of rank {self.victim} of {self.ranks} at "
            f"{self.place}, step {self.step}, {self.seconds:.2f} s; {self.algorithm}, "
            f"{self.lanes} lane(s), store of {self.store}"
        )


def draw(form, seed, fault=None, algorithm=None):
    """The case of that seed; `fault` and `algorithm` leave less to chance."""
    chance = random.Random(f"{form} {seed}")
    faults = PROCESS_FAULTS if form == "processes" else THREAD_FAULTS
    algorithms = (
        list(every_algorithm.ALGORITHMS) if form == "processes" else list(THREAD_OPERATIONS)
    )
    drawn_fault = chance.choice([name for name in faults if name != "none"])
    fault = fault or drawn_fault
    drawn_algorithm = chance.choice(algorithms)
    algorithm = algorithm or drawn_algorithm
    ranks = chance.choice([2, 3, 3, 4])
    place = chance.choice(faults[fault][1])
    store = chance.choice(["agent", "agent", "rank 0"])
    step = chance.randint(2, STEPS - 3)
    if fault in ("store killed", "store stopped"):
        # What is left of it is not enough to connect again, as some algorithms do after warm-up.
        store, step = "agent", max(step, every_algorithm.WARM_UP + 1)
    return Case(
        form=form,
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
