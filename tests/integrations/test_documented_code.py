"""The code blocks of the guide that need Lightning, Accelerate, transformers or PEFT train."""

import os

import pytest
from support import documented, training


def setting(folder):
    """What the fragments of these pages expect, and numbers to train on."""
    import torch

    os.chdir(folder)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 5))
    inputs = torch.randn(64, 20)
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :5].argmax(1))
    return {
        "model": model,
        "inputs": inputs,
        "torch": torch,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": torch.utils.data.DataLoader(data, batch_size=16),
    }


def run_blocks(page, names, word):
    blocks = [b for b in documented.fragments()[page] if word in b.text]
    assert blocks, f"{page} has no block with {word}"
    for block in blocks:
        exec(compile(block.text, str(block), "exec"), names)
    return names


def steps(names, backward):
    import torch

    for inputs, labels in names["loader"]:
        names["optimizer"].zero_grad()
        backward(torch.nn.functional.cross_entropy(names["model"](inputs), labels))
        names["optimizer"].step()


def with_lightning(folder):
    from integrations import lightning_training

    names = run_blocks("docs/integrations/lightning.md", setting(folder), "L.Trainer")
    trainer = names["trainer"]
    trainer.fit_loop.max_epochs = 1
    loader = names["loader"].__class__(lightning_training.data(), batch_size=16)
    trainer.fit(lightning_training.classifier(), loader)
    return trainer.global_step


def with_fabric(folder):
    names = run_blocks("docs/integrations/lightning.md", setting(folder), "L.Fabric")
    run_blocks("docs/integrations/lightning.md", names, "fabric.strategy")
    names["loader"] = names["fabric"].setup_dataloaders(names["loader"])
    steps(names, names["fabric"].backward)
    return names["model"]._forward_module.bagua_ddp.stats()["rounds"]


def with_accelerate(folder):
    from integrations import accelerate_state

    accelerate_state.forget()
    names = run_blocks("docs/integrations/accelerate.md", setting(folder), "import Accelerator")
    steps(names, names["accelerator"].backward)
    return names["hooks"].stats()["rounds"]


def with_rounds_by_accelerate(folder):
    from accelerate import Accelerator
    from bagua.integrations.accelerate import use
    from bagua.torch_api.algorithms import DiLoCoAlgorithm
    from integrations import accelerate_state

    accelerate_state.forget()
    names = setting(folder)
    names |= {"accelerator": Accelerator(cpu=True), "use": use, "DiLoCoAlgorithm": DiLoCoAlgorithm}
    run_blocks("docs/integrations/accelerate.md", names, "anchor")
    algorithm = names["model"].bagua_algorithm
    for _ in range(2):
        steps(names, names["accelerator"].backward)
        algorithm.sync()
    return algorithm.outer_rounds


def with_transformers(folder):
    import torch
    from integrations import accelerate_state
    from transformers import TrainingArguments

    class Classifier(torch.nn.Module):
        def __init__(self, layers):
            super().__init__()
            self.layers = layers

        def forward(self, inputs, labels):
            return {"loss": torch.nn.functional.cross_entropy(self.layers(inputs), labels)}

    accelerate_state.forget()
    names = setting(folder)
    names["model"] = Classifier(names["model"])
    data = names["loader"].dataset
    names["data"] = [{"inputs": x, "labels": y} for x, y in data]
    names["arguments"] = TrainingArguments(
        output_dir=folder, use_cpu=True, max_steps=3, report_to="none", save_strategy="no"
    )
    run_blocks("docs/integrations/transformers.md", names, "Trainer")
    return names["hooks"].stats()["rounds"]


@training.with_group
def with_peft(folder):
    import bagua.torch_api as bagua

    names = run_blocks("docs/adapters.md", setting(folder) | {"bagua": bagua}, "import peft")
    steps(names, lambda loss: loss.backward())
    algorithm = names["model"].bagua_algorithm
    algorithm.sync()
    return 1 + algorithm.outer_rounds


def with_cells(folder):
    """Cells of tables; each makes its object below README's imports."""
    import accelerate
    from lightning import Fabric, Trainer
    from transformers import Trainer as HuggingFaceTrainer, TrainingArguments

    cells = {cell for own in documented.cells(elsewhere=True).values() for cell in own}
    for cell in sorted(cells):
        names = documented.imports_of_readme() | setting(folder)
        names |= {"Trainer": Trainer, "Fabric": Fabric}
        if "(accelerator" in cell:
            names["accelerator"] = accelerate.Accelerator(cpu=True)
        if "(trainer" in cell:
            arguments = TrainingArguments(output_dir=folder, use_cpu=True, report_to="none")
            names["trainer"] = HuggingFaceTrainer(names["model"], arguments)
        if "average_weights" not in cell:
            exec(cell, names)
    return len(cells)


def run(name, folder):
    here = os.getcwd()
    try:
        return globals()[name](folder)
    finally:
        os.chdir(here)


@pytest.mark.parametrize(
    "name",
    [
        "with_lightning",
        "with_fabric",
        "with_accelerate",
        "with_rounds_by_accelerate",
        "with_transformers",
        "with_peft",
        "with_cells",
    ],
)
def test_the_blocks_of_a_page_train_on_two_ranks(ranks, tmp_path, name):
    first, second = ranks(2, run, name, str(tmp_path))
    assert first == second > 1
