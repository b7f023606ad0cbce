"""Program of the ranks of `test_wide_area.py`: `far_ranks.py <seconds> <steps> <way>...`.

Trains in each way, and prints the seconds of its wrap, its name in the second step, and the seconds
of its steps and its bits at the end. A way is an
algorithm of `every_algorithm`, whose group has a timeout of so many seconds, or one of `DOORS`.
Ranks of an algorithm with SAMPLES behind its name say how many they have.
"""

import sys
import time
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import bagua.torch_api as bagua
import torch
import torch.distributed as dist
from bagua.comm_hooks import register
from bagua.torch_api.data_parallel import DistributedDataParallel
from support import every_algorithm, training
from torch import nn
from torch.nn import functional

SAMPLES = "-samples"
FEATURES = 120  # of some 60 kB of gradients, which are not one packet


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, 8))


def train(way, model, optimizer):
    seconds = []
    for step in range(int(sys.argv[2])):
        begun = time.monotonic()
        generator = torch.Generator().manual_seed(100 * step + bagua.get_rank())
        inputs = torch.randn(8, FEATURES, generator=generator)
        optimizer.zero_grad()
        if way.endswith(SAMPLES):
            model.bagua_samples(1 + bagua.get_rank())
        loss = functional.mse_loss(model(inputs), torch.randn(8, 8, generator=generator))
        if step == 1:
            print("steps of", way, flush=True)
        loss.backward()
        optimizer.step()
        seconds.append(time.monotonic() - begun)
    print("seconds of", way, *seconds, flush=True)
    return training.bits(model.parameters())


def algorithm(way):
    group = dist.new_group(timeout=timedelta(seconds=float(sys.argv[1])))
    begun = time.monotonic()
    name = way.removesuffix(SAMPLES)
    wrapped = every_algorithm.wrapped(name, network(), process_group=group)
    print("wrap of", way, time.monotonic() - begun, flush=True)
    return train(way, *wrapped)


def ddp_class(way):
    model = network()
    return train(way, DistributedDataParallel(model), training.sgd(model))


def comm_hook(way):
    model = network()
    module = nn.parallel.DistributedDataParallel(model)
    register(module, "bytegrad")
    return train(way, module, training.sgd(model))


def eager(way):
    rank, size = bagua.get_rank(), bagua.get_world_size()
    values = torch.full((20_000,), rank + 1.0)
    print("steps of", way, flush=True)
    bagua.allreduce_inplace(values)
    everyone = torch.empty(size * len(values))
    bagua.allgather(values * rank, everyone)
    bagua.broadcast(everyone, size - 1)
    bagua.barrier()
    return training.bits([values, everyone])


DOORS = {"ddp_class": ddp_class, "comm_hook": comm_hook, "eager": eager}


def main():
    torch.set_num_threads(1)
    try:
        # A busy machine starts late. The job's store is given up after this time too.
        bagua.init_process_group(timeout=timedelta(seconds=max(60.0, float(sys.argv[1]))))
        for way in sys.argv[3:]:
            print("bits of", way, DOORS.get(way, algorithm)(way), flush=True)
    except bagua.BaguaError as error:
        print("told", type(error).__name__, error, flush=True)
        sys.exit(7)


if __name__ == "__main__":
    main()
