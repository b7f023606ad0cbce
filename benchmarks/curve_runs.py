"""One rank of curves.py: trains a task in several ways, or times a step of each."""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import bagua.torch_api as bagua
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import Algorithm, OuterSGD
from bagua.torch_api.algorithms.diloco import DiLoCoAlgorithmImpl
from bagua.torch_api.algorithms.q_adam import QAdamOptimizer
from curve_tasks import Task, evaluate, loss_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WARM_UP = 40  # steps with exact gradients, of the algorithms that begin so


def registered(name: str, **arguments: Any) -> Callable[..., tuple[Any, Any]]:
    def choose(task: Task, parameters: Any) -> tuple[Any, Any]:
        return task.optimizer(parameters), Algorithm.init(name, **arguments)

    return choose


def warm_up_of(arm: str) -> int:
    """Steps with exact gradients."""
    return WARM_UP if arm.startswith(("qadam", "async")) else 0


def momentum(**arguments: Any) -> Callable[..., tuple[Any, Any]]:
    def choose(task: Task, parameters: Any) -> tuple[Any, Any]:
        optimizer = QAdamOptimizer(parameters, warmup_steps=WARM_UP, **task.qadam)
        return optimizer, Algorithm.init("qadam", q_adam_optimizer=optimizer, **arguments)

    return choose


FLAT = {"hierarchical": False}  # compress also between ranks of one machine
IN_4_BITS = {"codec": "int4_block", "error_feedback": True}
IN_2_BITS = {"codec": "bit2_block", "error_feedback": True}
INTERVAL = 20  # steps from one outer round to the next
#: With an outer momentum of 0.8 the digits, of which ranks see different ones, end at 0.28
#: instead of 0.12 with 4 ranks; the text, of which they do not, ends better with it.
ROUNDS = {"outer_optimizer": OuterSGD(0.7, 0.5), "interval": INTERVAL}
#: Name in tables -> (task, parameters) -> (optimizer, algorithm).
ARMS = {
    "exact": registered("gradient_allreduce", **FLAT),
    "bytegrad": registered("bytegrad", **FLAT),
    "bytegrad minmax_uint8": registered("bytegrad", codec="minmax_uint8", **FLAT),
    "bytegrad int4_block, error feedback": registered("bytegrad", **IN_4_BITS, **FLAT),
    "qadam": momentum(**FLAT),
    "qadam bit2_block, error feedback": momentum(**IN_2_BITS, **FLAT),
    "power_sgd rank 4": registered("power_sgd", rank=4, warmup_steps=0),
    "power_sgd rank 1": registered("power_sgd", rank=1, warmup_steps=0),
    "sparse 1 %": registered("sparse", ratio=0.01),
    "decentralized": registered("decentralized", **FLAT),
    "low_precision": registered("low_precision_decentralized", **FLAT),
    "async": registered("async", sync_interval_ms=0, warmup_steps=WARM_UP),
    "local SGD": registered("diloco", outer_optimizer=OuterSGD(1.0, 0.0), interval=INTERVAL),
    "diloco": registered("diloco", **ROUNDS),
    "diloco int4_block, error feedback": registered("diloco", **IN_4_BITS, **ROUNDS),
    "diloco (0.7, 0.8) int4_block, error feedback": registered(
        "diloco", outer_optimizer=OuterSGD(0.7, 0.8), interval=INTERVAL, **IN_4_BITS
    ),
}
#: What curves.py has not: `auto` chooses by the network, which losses over steps do not have.
OF_A_NETWORK = {"auto": registered("auto")}


def makes_rounds(model: nn.Module) -> bool:
    """Whether ranks train by themselves from one exchange to the next, and share an anchor."""
    return isinstance(model.bagua_algorithm, DiLoCoAlgorithmImpl)


class Training:
    """A task on this rank, trained by an arm."""

    def __init__(self, task: Task, arm: str, seed: int, data: tuple[torch.Tensor, ...]) -> None:
        self.task, self.arm = task, arm
        self.inputs, self.targets, self.test_inputs, self.test_targets = data
        torch.manual_seed(seed)
        self.model = task.make_model()
        self.optimizer = self.wrap()
        self._order = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
        self._bytes_before, self._bytes_now = 0, 0

    def wrap(self) -> torch.optim.Optimizer:
        """Has the model communicate; returns its optimizer."""
        optimizer, algorithm = (ARMS | OF_A_NETWORK)[self.arm](self.task, self.model.parameters())
        self.model.with_bagua([optimizer], algorithm)
        return optimizer

    def step(self) -> None:
        batch = torch.randint(len(self.targets), (self.task.batch,), generator=self._order)
        self.optimizer.zero_grad()
        loss_of(self.model, self.inputs[batch], self.targets[batch]).backward()
        if self.task.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.task.clip)
        self.optimizer.step()

    def bytes_sent(self) -> int:
        """By this rank until now; asked for after every step."""
        now = self.model.bagua_stats()["total"]["bytes_sent"]
        if now < self._bytes_now:  # counted anew after a warm-up
            self._bytes_before += self._bytes_now
        self._bytes_now = now
        return self._bytes_before + now

    def measure(self) -> tuple[float, float]:
        """(loss, accuracy) of the anchor where there is one, else of the mean of the weights."""
        held_out = (self.test_inputs, self.test_targets)
        if not makes_rounds(self.model):
            return evaluate(bagua.average_weights(self.model), *held_out)
        with self.model.bagua_algorithm.anchor():
            return evaluate(self.model, *held_out)

    def close(self) -> None:
        if self.arm == "async":
            self.model.bagua_algorithm.abort(self.model)


class TrainingWithDdp(Training):
    """The same by torch's class, over gloo."""

    def wrap(self) -> torch.optim.Optimizer:
        optimizer = self.task.optimizer(self.model.parameters())
        self.model = DistributedDataParallel(self.model)
        return optimizer

    def measure(self) -> tuple[float, float]:
        return evaluate(self.model.module, self.test_inputs, self.test_targets)


def curve(
    task: Task,
    arm: str,
    seed: int,
    data: tuple[torch.Tensor, ...],
    steps: int,
    points: int,
    kind: type[Training] = Training,
) -> dict[str, list[float]]:
    """Loss, accuracy and bytes sent by rank 0 at `points` equal distances of `steps`."""
    training = kind(task, arm, seed, data)
    schedule = torch.optim.lr_scheduler.LinearLR(training.optimizer, 1.0, 0.05, steps)
    figures: dict[str, list[float]] = {"step": [], "loss": [], "accuracy": [], "bytes": []}
    due = {round(steps * (i + 1) / points) for i in range(points)}
    for step in range(1, steps + 1):
        training.step()
        schedule.step()
        sent = training.bytes_sent()
        if step in due:
            loss, accuracy = training.measure()
            for name, value in zip(figures, (step, loss, accuracy, sent), strict=True):
                figures[name].append(value)
    training.close()
    return figures


def seconds_per_step(task: Task, arm: str, data: tuple[torch.Tensor, ...]) -> float:
    """Median after the warm-up.

    It is taken over the means of 6 outer rounds where the algorithm has such, else over as many
    steps as take 5 s, at least 6 and at most 100.
    """
    training = Training(task, arm, 0, data)

    def timed_step() -> float:
        dist.barrier()
        start = time.perf_counter()
        training.step()
        return time.perf_counter() - start

    first = [timed_step() for _ in range(warm_up_of(arm) + 4)]
    if makes_rounds(training.model):
        rounds = [[timed_step() for _ in range(INTERVAL)] for _ in range(6)]
        seconds = [statistics.mean(of_round) for of_round in rounds]
    else:
        slowest = torch.tensor(statistics.median(first[-3:]))
        dist.all_reduce(slowest, dist.ReduceOp.MAX)  # all ranks make equally many
        seconds = [timed_step() for _ in range(min(100, max(6, int(5 / slowest))))]
    training.close()
    return statistics.median(seconds)


def show(done: int, of: int, title: str, began: float) -> None:
    """Draw the progress over all runs, with the time that is left."""
    left = (time.monotonic() - began) / max(done, 1) * (of - done)
    bar = ("#" * (done * 30 // of)).ljust(30, ".")
    print(
        f"\r{bar} {done}/{of} about {left / 60:.0f} min left; {title:60}", end="", file=sys.stderr
    )
