"""Program of ranks of `test_engines.py`: fastai and ultralytics, which `make engines` installs.

`other_trainers.py <trainer> <folder>` trains by the package's own DistributedDataParallel, and
under each algorithm of `test_trainers.ALGORITHMS`, and prints what `test_trainers.trained` returns.
Both packages train on several GPUs only: what keeps them from CPU ranks is replaced here.
"""

import contextlib
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy
import torch
import torch.distributed as dist
from bagua import comm_hooks
from integrations.test_trainers import inside, trained
from torch import nn

# PyPI's torchvision is built for CUDA: beside a CPU torch it misses two of its operators.
OPERATORS = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    OPERATORS.define(f"{name}(Tensor x) -> Tensor")


def by_fastai(algorithm, _):
    """A Learner in distrib_ctx(); its loader sends the order of samples by the GPU."""
    from fastai import distributed as of_fastai
    from fastai.basics import DataLoader, DataLoaders, Learner

    def broadcast(loader, values, rank):
        tensor = torch.tensor(values)
        dist.broadcast(tensor, rank)
        return tensor.tolist()

    of_fastai.DistributedDL._broadcast = broadcast
    network = nn.Sequential(nn.Linear(8, 2000), nn.ReLU(), nn.Linear(2000, 3))
    samples = list(zip(torch.randn(64, 8), torch.randn(64, 3), strict=True))
    loaders = [DataLoader(samples, bs=8, shuffle=False) for _ in range(2)]
    data = DataLoaders(*loaders, device=torch.device("cpu"))
    learner = Learner(data, network, loss_func=nn.MSELoss(), lr=0.01)
    learner.remove_cbs([one for one in learner.cbs if type(one).__name__ == "ProgressCallback"])
    with inside(algorithm) as handles, learner.distrib_ctx(cpu=True), learner.no_logging():
        learner.fit(1)
    return learner.model, handles


class OnCPU(nn.parallel.DistributedDataParallel):
    """Takes the GPU that ultralytics gives it, and has none."""

    def __init__(self, module, device_ids, **arguments):
        super().__init__(module, **arguments)


def images(folder):
    """Eight random pictures with a box each, in the folders that ultralytics reads."""
    import cv2

    for part in ("images", "labels"):
        Path(folder, part).mkdir(parents=True, exist_ok=True)
    random = numpy.random.default_rng(0)
    for number in range(8):
        picture = random.integers(0, 255, (64, 64, 3), dtype=numpy.uint8)
        cv2.imwrite(f"{folder}/images/{number}.png", picture)
        Path(folder, "labels", f"{number}.txt").write_text("0 0.5 0.5 0.4 0.4\n")
    text = f"path: {folder}\ntrain: images\nval: images\nnames: [thing]\n"
    Path(folder, "data.yaml").write_text(text)


def trainer_of_ultralytics(folder):
    from ultralytics.models.yolo.detect import DetectionTrainer

    class Trainer(DetectionTrainer):
        def _setup_ddp(self):
            """The ranks have a group."""

        def validate(self):
            return {}, 0.0

        def save_model(self):
            """Reads a table by polars."""

        def final_eval(self):
            """Nothing was saved."""

    nn.parallel.DistributedDataParallel = OnCPU
    settings = {"imgsz": 64, "batch": 4, "epochs": 1, "nbs": 4, "workers": 0, "device": "cpu"}
    quiet = {"amp": False, "plots": False, "val": False, "save": False, "verbose": False}
    place = {"data": f"{folder}/data.yaml", "project": folder, "name": f"of_{dist.get_rank()}"}
    trainer = Trainer(overrides={"model": "yolo11n.yaml", **settings, **quiet, **place})
    trainer.world_size = dist.get_world_size()
    return trainer


def by_ultralytics(algorithm, folder):
    """The callback of the page; `everywhere` in its place is another trainer of the test."""
    trainer, handles = _of_images(folder), []

    def compress(trainer):
        hook = comm_hooks.register(trainer.model, algorithm, grad_scaler=trainer.scaler)
        handles.append(hook)

    if algorithm is not None:
        trainer.add_callback("on_pretrain_routine_end", compress)
    trainer.train()
    return trainer.model, handles


def by_ultralytics_inside(algorithm, folder):
    trainer = _of_images(folder)
    with inside(algorithm) as handles:
        trainer.train()
    return trainer.model, handles


def _of_images(folder):
    """The first training writes a cache of labels, and has other random numbers than later ones."""
    first = not Path(folder, "labels.cache").exists()
    dist.barrier()
    if first:
        if dist.get_rank() == 0:
            images(folder)
        dist.barrier()
        trainer_of_ultralytics(folder).train()
    return trainer_of_ultralytics(folder)


def main():
    trainer, folder = sys.argv[1:]
    with contextlib.redirect_stdout(sys.stderr):
        found = trained(globals()[trainer], folder)
    os.write(1, (json.dumps(found) + "\n").encode())  # in one piece


if __name__ == "__main__":
    main()
