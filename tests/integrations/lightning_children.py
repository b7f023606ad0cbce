"""Trainings whose ranks are forked or spawned: `lightning_children.py FOLDER`, as a notebook does.

Writes FOLDER/fork.ckpt and FOLDER/spawn.ckpt from this process, after `fit`.
"""

import sys
import warnings
from pathlib import Path

import lightning
from bagua.lightning import BaguaStrategy
from lightning.pytorch.demos.boring_classes import BoringModel


def trained(path, start_method="popen", **options):
    """The trainer, after two steps and a checkpoint."""
    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=BaguaStrategy("sparse", ratio=0.1, start_method=start_method),
        limit_train_batches=2,
        limit_val_batches=0,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(BoringModel(), **options)
    trainer.save_checkpoint(path)
    return trainer


if __name__ == "__main__":
    warnings.filterwarnings("error", ".*checkpoint has no state of.*")
    folder = Path(sys.argv[1])
    trained(folder / "spawn.ckpt", "spawn")
    trained(folder / "fork.ckpt", "fork")
    trained(folder / "again.ckpt", "fork", ckpt_path=folder / "fork.ckpt")
