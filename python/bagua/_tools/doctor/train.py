"""``bagua doctor --train``: steps with every algorithm beside torch's DDP, on this job's ranks."""

from __future__ import annotations

import copy
import hashlib
import statistics
import sys
import textwrap
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import bagua.torch_api as bagua
from bagua.torch_api.algorithms import Algorithm, QAdamAlgorithm, QAdamOptimizer

_TURNS = 4
_STEPS = 5  # of a way in a turn, and before the first one; a round of DiLoCo
_FEATURES, _HIDDEN, _BATCH = 256, 1024, 32
_COLUMNS = 80
_DDP = "torch DDP"
#: What is printed; name and arguments of the algorithm; whether ranks hold equal weights.
_WAYS: tuple[tuple[str, str, dict[str, Any], bool], ...] = (
    ("exact", "gradient_allreduce", {}, True),
    ("8 bits", "bytegrad", {}, True),
    ("4 bits", "bytegrad", {"codec": "int4_block", "error_feedback": True}, True),
    ("", "qadam", {}, True),
    ("rank 4", "power_sgd", {"warmup_steps": 0}, True),
    ("1 %", "sparse", {"ratio": 0.01}, True),
    ("one peer", "decentralized", {"peer_selection_mode": "shift_one"}, False),
    ("", "low_precision_decentralized", {}, False),
    ("every 500 ms", "async", {}, False),
    (
        f"4 bits, a round in {_STEPS} steps",
        "diloco",
        {"interval": _STEPS, "codec": "int4_block"},
        True,
    ),
)


class Row(NamedTuple):
    """Measurements of one way to train.

    Attributes:
        seconds: of a step, by turn, of rank 0.
        bytes: that rank 0 sent per step.
        equal: whether the weights of all ranks are equal; ``must``: whether they must be.
        finite: whether this rank's weights and those of all others are finite.
    """

    name: str
    seconds: list[float]
    bytes: float
    equal: bool
    must: bool
    finite: bool


def main(device: torch.device, timeout: float) -> int:
    """Train on every rank; returns the exit code. ``timeout``: seconds of a wait for a rank."""
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        bagua.init_process_group(timeout=timedelta(seconds=timeout))
        try:
            rows = _measured(device)
            text, code = page(rows, dist.get_world_size(), device.type)
            if dist.get_rank() == 0:
                sys.stdout.write(text)
            dist.barrier()
        finally:
            bagua.destroy_process_group()
    except (RuntimeError, ValueError) as error:  # BaguaError is a RuntimeError
        sys.stderr.write(f"BROKEN: {error}\n")
        return 1
    return code


def _model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(_FEATURES, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, _HIDDEN), nn.ReLU())
    return nn.Sequential(*layers, nn.Linear(_HIDDEN, _FEATURES)).to(device)


class _Way:
    """A copy of the model that is trained in one way."""

    def __init__(
        self, name: str, algorithm: str, arguments: dict[str, Any], must: bool, model: nn.Module
    ) -> None:
        self.name = name
        self.must = must
        self.seconds: list[float] = []
        self._model = copy.deepcopy(model)
        self._inputs = torch.randn(_BATCH, _FEATURES).to(next(model.parameters()).device)
        parameters = self._model.parameters()
        self._optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=0.001)
        self._algorithm: Algorithm | None = None
        if not algorithm:
            self._wrapped: Any = nn.parallel.DistributedDataParallel(self._model)
            return
        if algorithm == "qadam":
            self._optimizer = QAdamOptimizer(self._model.parameters(), warmup_steps=2, eps=1e-3)
            self._algorithm = QAdamAlgorithm(self._optimizer, **arguments)
        else:
            self._algorithm = Algorithm.init(algorithm, **arguments)
        self._wrapped = bagua.wrap(self._model, [self._optimizer], self._algorithm)

    def turn(self) -> None:
        """Some steps; the thread of ``async`` runs in these alone."""
        resume = getattr(self._algorithm, "resume", None)
        if resume is not None:
            resume(self._wrapped)
        dist.barrier()
        begun = _now(self._inputs.device)
        for _ in range(_STEPS):
            self._optimizer.zero_grad()
            self._wrapped(self._inputs).square().mean().backward()
            self._optimizer.step()
        self.seconds.append((_now(self._inputs.device) - begun) / _STEPS)
        abort = getattr(self._algorithm, "abort", None)
        if abort is not None:
            abort(self._wrapped)

    def sent(self) -> float:
        """Bytes that this rank has sent so far; of DDP what a ring sends."""
        if self._algorithm is None:
            ranks, numel = dist.get_world_size(), sum(p.numel() for p in self._model.parameters())
            return 8 * numel * (ranks - 1) / ranks * _STEPS * len(self.seconds)
        return float(self._wrapped.bagua_stats()["total"]["bytes_sent"])

    def weights(self) -> tuple[bool, bool]:
        """Whether they are equal on all ranks, and finite on all; every rank calls it."""
        flat = torch.cat([p.detach().flatten().cpu() for p in self._model.parameters()])
        digest = hashlib.blake2b(flat.numpy().tobytes(), digest_size=7).digest()
        finite = bool(flat.isfinite().all())
        own = torch.tensor([int.from_bytes(digest, "big"), int(finite)]).to(self._inputs.device)
        all_of = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(all_of, own)
        found = {int(one[0]) for one in all_of}
        return len(found) == 1, all(int(one[1]) for one in all_of)


def _now(device: torch.device) -> float:
    """Seconds, when the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _measured(device: torch.device) -> list[Row]:
    model = _model(device)
    torch.manual_seed(1 + dist.get_rank())
    ways = [_Way(_DDP, "", {}, True, model)]
    for words, name, arguments, must in _WAYS:
        ways.append(_Way(", ".join(filter(None, (name, words))), name, arguments, must, model))
    for way in ways:
        way.turn()  # connects, and lays out buckets
    before = [way.sent() for way in ways]
    for turn in range(_TURNS):
        for way in ways if turn % 2 == 0 else reversed(ways):
            way.turn()
    rows = []
    for way, first in zip(ways, before, strict=True):
        sent = (way.sent() - first) / (_TURNS * _STEPS)
        equal, finite = way.weights()
        rows.append(Row(way.name, way.seconds[1:], sent, equal, way.must, finite))
    return rows


def page(rows: Sequence[Row], ranks: int, device: str) -> tuple[str, int]:
    """The table, of at most 80 columns, and the exit code."""
    parameters = sum(p.numel() for p in _model(torch.device("meta")).parameters())
    parts = [
        f"{ranks} rank(s), {device}, a model of {parameters / 1e6:.1f} million parameters, "
        f"{_TURNS * _STEPS} steps each, in turn",
        "",
        f"{'':<38}  {'s/step':>8}  {'speed':>6}  {'MB/step':>8}  weights",
    ]
    broken = []
    for row in rows:
        ratios = (a / b for a, b in zip(rows[0].seconds, row.seconds, strict=True))
        weights = "equal" if row.equal else "own"
        parts.append(
            f"{row.name:<38}  {statistics.median(row.seconds):>8.4f}  "
            f"{statistics.median(ratios):>5.2f}x  {row.bytes / 1e6:>8.3f}  {weights}"
        )
        if row.must and not row.equal:
            broken.append(f"BROKEN: {row.name}: ranks hold different weights after equal steps")
        if not row.finite:
            broken.append(f"BROKEN: {row.name}: weights are not finite on some rank")
    parts += ["", *(broken or ["No fault found."])]
    note = (
        "Medians of rank 0, speed beside torch DDP. The model is small and computes little: "
        "`bagua plan` predicts yours. qadam has an optimizer like Adam, the others SGD; DDP's "
        "bytes are those of a ring."
    )
    return "\n".join([*parts, textwrap.fill(note, _COLUMNS)]) + "\n", int(bool(broken))
