"""A rank of an elastic job: `elastic_rank.py FOLDER ROUNDS [DEATH]`.

Trains until ROUNDS outer rounds are made, or as many as FOLDER/last says. After each round it
appends to FOLDER/<rank>.jsonl: the round, a digest of anchor and momentum, and the members. DEATH
is where the process kills itself: "between:5", "launch:5" or "mean:5", in its sixth round. With
ISLAND, ISLANDS and ISLANDS_STORE it is a rank of that island, whose ranks shard the model.
GRACE is that of its rounds, and SECONDS what a step takes at least.
"""

import datetime
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import bagua.torch_api as bagua
from bagua._core.group import membership
from bagua._core.state.shards import local
from bagua._outer.elastic import Elastic, ElasticRanks
from bagua._outer.loop import Fragment
from bagua.torch_api.algorithms import DiLoCoAlgorithm
from support import training
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

TIMEOUT = 15.0
INTERVAL = 4
RATE = 0.03
EXIT_OF_AN_ERROR = 7
membership.SECONDS_OF_SILENCE = 2.0


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))


def data(number, rows):
    """Inputs, and a noisy function of them: the loss has a floor of 0.25."""
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(rows, 8, generator=generator)
    noise = torch.randn(rows, 1, generator=generator)
    return inputs, 0.3 * inputs[:, :3].sum(1, keepdim=True) + 0.5 * noise


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in(owner, method, model):
    """The next call of that method, in the round that the death is planned for, is the last."""
    original = getattr(owner, method)

    def last(*args, **options):
        if due(model):
            die()
        return original(*args, **options)

    setattr(owner, method, last)


def due(model):
    place = sys.argv[3] if len(sys.argv) > 3 else "never:-1"
    return model.bagua_algorithm.outer_rounds == int(place.split(":")[1])


def sharded(model):
    mesh = init_device_mesh("cpu", (bagua.get_world_size(),))
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(folder, rounds, place):
    rank, group = bagua.get_rank(), None
    model = network()
    if "ISLAND" in os.environ:
        island, islands = int(os.environ["ISLAND"]), int(os.environ["ISLANDS"])
        store = os.environ["ISLANDS_STORE"]
        group = bagua.communication.connect_islands(store, island, islands)
        rank += island * bagua.get_world_size()
        model = sharded(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    grace = float(os.environ.get("GRACE") or 0) or None
    elastic = Elastic(quorum=int(os.environ.get("QUORUM", "2")), grace=grace)
    algorithm = DiLoCoAlgorithm(interval=INTERVAL, elastic=elastic)
    model.with_bagua([optimizer], algorithm, process_group=group)
    if place == "launch":
        kill_in(Fragment, "launch", model)
    if place == "mean":
        kill_in(ElasticRanks, "confirmed", model)
    train_until_ended(folder, rounds, rank, model, optimizer, place)


def train_until_ended(folder, rounds, rank, model, optimizer, place=""):
    """Train a model that is wrapped, and note its rounds and its loss at the end."""
    outer = model.bagua_algorithm
    with open(folder / f"{rank}.jsonl", "a", buffering=1) as notes:

        def note(**what):
            notes.write(json.dumps({"rank": rank, "pid": os.getpid(), **what}) + "\n")

        note(begins=outer.outer_rounds, members=model.process_group.ranks)
        step, noted = 1000 * os.getpid(), outer.outer_rounds
        while not ended(folder, outer.outer_rounds, rounds):
            step += 1
            optimizer.zero_grad()
            inputs, targets = data(step, 1024)
            (model(inputs) - targets).square().mean().backward()
            optimizer.param_groups[0]["lr"] = RATE / (1 + outer.outer_rounds / 15)
            time.sleep(float(os.environ.get("SECONDS", "0")))
            if place == "between" and due(model):
                die()
            optimizer.step()
            if outer.outer_rounds > noted:
                noted, bits = rounds_and_bits(outer)
                members = model.process_group.ranks
                note(round=noted, bits=bits, members=members, at=time.monotonic())
        with outer.anchor(), torch.no_grad():
            model.eval()
            inputs, targets = data(0, 4096)
            note(loss=(model(inputs) - targets).square().mean().item())


def rounds_and_bits(outer):
    """Rounds, and a digest of anchors and momenta after them: a newer anchor may be found here."""
    state = outer.state_dict()
    shared = [k for k in state if k.startswith(("anchor/", "momentum/", "rate/"))]
    return state["outer_rounds"], training.bits([local(state[key]) for key in shared])


def ended(folder, made, rounds):
    last = folder / "last"
    return made >= (int(last.read_text()) if last.exists() else rounds)


def main():
    torch.set_num_threads(1)
    folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
    place = sys.argv[3].split(":")[0] if len(sys.argv) > 3 else ""
    elastic = "ISLAND" not in os.environ
    bagua.init_process_group(timeout=datetime.timedelta(seconds=TIMEOUT), elastic=elastic)
    try:
        train(folder, rounds, place)
    except bagua.BaguaError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit(EXIT_OF_AN_ERROR)


if __name__ == "__main__":
    main()
