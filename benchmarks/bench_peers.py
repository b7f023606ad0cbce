"""DiLoCo here beside torchft's DiLoCo and hivemind's averaging: bytes, seconds and loss.

    python benchmarks/bench_peers.py [--rates 20 200] [--steps 400] [--arms ...]
    python benchmarks/bench_peers.py --rates 20 --rtt 150 --loss 1 --congestion cubic --steps 100

Two ranks in network namespaces of so many Mbit/s, which need root, with a round-trip time and
losses where given (tests/support/processes/wide_area.py), train the text of curve_tasks.py
for equally many steps, with a round every 20. The peers are their own packages, where these are
installed: `pip install torchft hivemind`. On CPUs torchft sends f32; hivemind averages weights
(local SGD), in f32 or 8 bits. Bytes are those that left the network device of rank 0, without
packet headers, from the first step to the last. Results are written to
build/benchmarks/bench_peers.json.
"""

import argparse
import contextlib
import importlib.util
import json
import logging
import os
import socket
import sys
import time
from pathlib import Path

import bagua.torch_api as bagua
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import DiLoCoAlgorithm
from common import keep_cases
from curve_runs import Training, TrainingWithDdp
from curve_tasks import TASKS, evaluate
from network import Network, bytes_on_the_device
from rank_processes import figures_over

RANKS = 2
INTERVAL = 20  # steps from one round to the next
LIGHTHOUSE = 29600  # a port inside the namespace of rank 0
OUTER = {"lr": 0.7, "momentum": 0.5, "nesterov": True}  # as ROUNDS of curve_runs.py


def own_address():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 1))
        return probe.getsockname()[0]


class Diloco(Training):
    overlap_steps = 0

    def wrap(self):
        optimizer = self.task.optimizer(self.model.parameters())
        self.model.with_bagua(
            [optimizer],
            DiLoCoAlgorithm(
                interval=INTERVAL, codec="int4_block", overlap_steps=self.overlap_steps
            ),
        )
        return optimizer


class DilocoOverlapped(Diloco):
    overlap_steps = INTERVAL // 2


class Plain(Training):
    """A model that is not wrapped; its weights are evaluated after a round."""

    def measure(self):
        return evaluate(self.model, self.test_inputs, self.test_targets)


class Torchft(Plain):
    def wrap(self):
        from torchft import Manager, ProcessGroupGloo
        from torchft.coordination import LighthouseServer
        from torchft.local_sgd import DiLoCo

        optimizer = self.task.optimizer(self.model.parameters())
        address = own_address()
        if dist.get_rank() == 0:
            self._lighthouse = LighthouseServer(bind=f"0.0.0.0:{LIGHTHOUSE}", min_replicas=RANKS)
        dist.barrier()
        self._store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
        self._manager = Manager(
            pg=ProcessGroupGloo(),
            min_replica_size=RANKS,
            use_async_quorum=False,
            init_sync=False,  # equal by their seed
            load_state_dict=self.model.load_state_dict,
            state_dict=self.model.state_dict,
            replica_id=f"rank{dist.get_rank()}",
            store_addr=address,
            store_port=self._store.port,
            rank=0,
            world_size=1,
            lighthouse_addr=f"http://{os.environ['MASTER_ADDR']}:{LIGHTHOUSE}",
            hostname=address,
        )
        outer = torch.optim.SGD(self.model.parameters(), **OUTER)
        self._rounds = DiLoCo(self._manager, [self.model], optimizer, outer, sync_every=INTERVAL)
        self._rounds.__enter__()
        return optimizer

    def close(self):
        self._rounds.__exit__(None, None, None)
        self._manager.shutdown(wait=False)


class Hivemind(Plain):
    compression = "NoCompression"

    def wrap(self):
        import hivemind

        address = own_address()
        peers = [None]
        if dist.get_rank() == 0:
            self._dht = hivemind.DHT(host_maddrs=[f"/ip4/{address}/tcp/0"], start=True)
            peers = [list(map(str, self._dht.get_visible_maddrs()))]
        dist.broadcast_object_list(peers)
        if dist.get_rank() != 0:
            self._dht = hivemind.DHT(
                initial_peers=peers[0], host_maddrs=[f"/ip4/{address}/tcp/0"], start=True
            )
        self._averager = hivemind.DecentralizedAverager(
            [p.detach().clone() for p in self.model.parameters()],
            self._dht,
            start=True,
            prefix="bench_peers",
            target_group_size=RANKS,
            compression=getattr(hivemind.compression, self.compression)(),
        )
        self._steps = 0
        return self.task.optimizer(self.model.parameters())

    def step(self):
        super().step()
        self._steps += 1
        if self._steps % INTERVAL == 0:
            self.average()

    @torch.no_grad()
    def average(self):
        weights = list(self.model.parameters())
        with self._averager.get_tensors() as tensors:
            for tensor, weight in zip(tensors, weights, strict=True):
                tensor.copy_(weight)
        if self._averager.step(timeout=120) is None:
            raise RuntimeError("hivemind has found no group for a round")
        with self._averager.get_tensors() as tensors:
            for tensor, weight in zip(tensors, weights, strict=True):
                weight.copy_(tensor)

    def close(self):
        self._averager.shutdown()
        self._dht.shutdown()


class HivemindIn8Bits(Hivemind):
    compression = "Uniform8BitQuantization"


#: Name in the table -> (training, package that it needs).
ARMS = {
    "torch DDP": (TrainingWithDdp, "torch"),
    "bagua diloco, 4 bits": (Diloco, "bagua"),
    "bagua diloco, 4 bits, overlap": (DilocoOverlapped, "bagua"),
    "torchft DiLoCo": (Torchft, "torchft"),
    "hivemind": (Hivemind, "hivemind"),
    "hivemind, 8 bits": (HivemindIn8Bits, "hivemind"),
}


def measure(arm, seed, steps):
    """Figures of rank 0."""
    logging.disable(logging.WARNING)  # the ranks' output is a pipe that nobody reads
    bagua.init_process_group()
    task = TASKS["text"]
    kind, _ = ARMS[arm]
    training = kind(task, arm, seed, task.data(dist.get_rank(), RANKS))
    schedule = torch.optim.lr_scheduler.LinearLR(training.optimizer, 1.0, 0.05, steps)
    dist.barrier()
    sent, began = bytes_on_the_device(), time.perf_counter()
    for _ in range(steps):
        training.step()
        schedule.step()
    dist.barrier()
    seconds, sent = time.perf_counter() - began, bytes_on_the_device() - sent
    figures = {"step": seconds / steps, "bytes": sent / steps, "loss": training.measure()[0]}
    training.close()
    return figures


@contextlib.contextmanager
def link_of(rate, arguments):
    """Two ranks that are near each other, or far."""
    if not arguments.rtt:
        with Network(RANKS, float(rate)) as link:
            yield link
        return
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from support.processes.wide_area import WideArea

    with WideArea(RANKS, arguments.rtt, float(rate), congestion=arguments.congestion) as link:
        link.path("*", "*", loss_percent=arguments.loss)
        yield link


def show(case):
    print(
        f"{case['rate']:>5} Mbit/s, {case['rtt']:g} ms, {case['lost']:g} %, seed {case['seed']}, "
        f"{case['arm']:30}: "
        f"{1e3 * case['step']:8.1f} ms and {case['bytes'] / 1e3:8.1f} kB a step, "
        f"loss {case['loss']:.3f}",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", nargs="+", default=["20", "200"], help="Mbit/s")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--rtt", type=float, default=0, help="milliseconds, there and back")
    parser.add_argument("--loss", type=float, default=0, help="percent of the packets, with --rtt")
    parser.add_argument("--congestion", help="TCP's control of it, with --rtt: cubic, bbr, ...")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=400, help="a multiple of 20")
    parser.add_argument("--quick", action="store_true", help="40 steps, not kept")
    parser.add_argument("--rank-output", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_output:
        figures = measure(arguments.arms[0], arguments.seeds[0], arguments.steps)
        if dist.get_rank() == 0:
            Path(arguments.rank_output).write_text(json.dumps(figures))
        os._exit(0)  # threads and processes of the peers may not end by themselves

    steps = 2 * INTERVAL if arguments.quick else arguments.steps
    far = {"rtt": arguments.rtt, "lost": arguments.loss, "congestion": arguments.congestion}
    cases = []
    for rate in arguments.rates:
        for seed in arguments.seeds:
            for arm in arguments.arms:
                if importlib.util.find_spec(ARMS[arm][1]) is None:
                    print(f"{arm} left out: pip install {ARMS[arm][1]}")
                    continue
                options = ["--arms", arm, "--seeds", seed, "--steps", steps]
                with link_of(rate, arguments) as link:
                    figures = figures_over(link, __file__, options)
                cases.append({"rate": rate, **far, "seed": seed, "arm": arm, **figures})
                show(cases[-1])
                if not arguments.quick:
                    keys = ["rate", *far, "seed", "arm"]
                    keep_cases("bench_peers", cases, keys, steps=steps)


if __name__ == "__main__":
    main()
