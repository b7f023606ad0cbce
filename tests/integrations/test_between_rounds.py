"""Ranks that train by themselves exchange nothing between rounds, whoever runs the loop."""

import signal

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import AsyncModelAverageAlgorithm, DiLoCoAlgorithm
from integrations.test_hugging_face import accelerator, data, network
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

ARGUMENTS = {
    "diloco": {"interval": 100},
    "async": {"sync_interval_ms": 10**7},
}
ALGORITHMS = {
    "diloco": lambda: DiLoCoAlgorithm(**ARGUMENTS["diloco"]),
    "async": lambda: AsyncModelAverageAlgorithm(**ARGUMENTS["async"]),
}
PACKAGES = ("lightning", "pytorch_lightning")


def number():
    """How many collectives of torch's group this rank has begun."""
    return dist.group.WORLD._get_sequence_number_for_group()


def loader():
    return DataLoader(TensorDataset(*data()), batch_size=16)


def by_lightning(package):
    """Numbers at each batch, by algorithm."""
    from integrations import lightning_training as lt

    found = {}
    for name in (*ARGUMENTS, "bytegrad"):
        module, seen = lt.classifier(package), []
        step = module.training_step
        module.training_step = lambda *batch, s=seen, step=step: s.append(number()) or step(*batch)
        strategy = lt.strategy(name, package, **ARGUMENTS.get(name, {}))
        lt.fit(module, strategy, package, max_epochs=1)
        found[name] = seen
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_lightning_sends_nothing_in_a_batch(ranks, package):
    for found in ranks(2, by_lightning, package):
        assert {len(seen) for seen in found.values()} == {8}
        # The broadcast that is turned off is seen with gradients that are averaged.
        assert {name: len(set(seen)) for name, seen in found.items()} == {
            "diloco": 1,
            "async": 1,
            "bytegrad": 8,
        }


def ended_by_signals(package):
    """The error, and the last batch of this rank: another one than that of the other rank."""
    from integrations import lightning_training as lt

    module, seen = lt.classifier(package), []
    step = module.training_step

    def signalled(*batch):
        seen.append(batch[1])
        if batch[1] == 2 * dist.get_rank() + 1:
            module.trainer._signal_connector._sigterm_notifier_fn(signal.SIGTERM, None)
        return step(*batch)

    module.training_step = signalled
    strategy = lt.strategy("diloco", package, interval=100)
    try:
        lt.fit(module, strategy, package, max_epochs=1)
    except SystemExit as ended:
        return type(ended).__name__, seen[-1]


@pytest.mark.parametrize("package", PACKAGES)
def test_each_rank_of_lightning_ends_by_its_own_signal(ranks, package):
    (first, at), (second, later) = ranks(2, ended_by_signals, package)
    assert first == second == "SIGTERMException"
    assert (at, later) == (1, 3)


def by_fabric(name):
    from bagua.lightning import BaguaFabricStrategy
    from lightning.fabric import Fabric

    strategy = BaguaFabricStrategy(name, **ARGUMENTS[name])
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    net = network()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    return trained(model, optimizer, fabric.setup_dataloaders(loader()), fabric.backward)


def by_accelerate(name):
    from bagua.integrations.accelerate import use

    own = accelerator()
    use(own, ALGORITHMS[name]())
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model, optimizer, batches = own.prepare(net, optimizer, loader())
    return trained(model, optimizer, batches, own.backward)


def trained(model, optimizer, batches, backward):
    seen = []
    for inputs, labels in batches:
        seen.append(number())
        optimizer.zero_grad()
        backward(cross_entropy(model(inputs), labels))
        optimizer.step()
    return seen


class CountsTokens(torch.nn.Module):
    """A model whose Trainer divides the loss by the number of labels."""

    def __init__(self):
        super().__init__()
        self.net, self.seen, self.counts = network(), [], []

    def forward(self, x, labels, num_items_in_batch=None, **_):
        self.seen.append(number())
        self.counts.append(int(num_items_in_batch))
        return {"loss": cross_entropy(self.net(x), labels, reduction="sum") / num_items_in_batch}


def by_trainer(name, folder):
    import transformers
    from bagua.integrations.transformers import use
    from integrations import accelerate_state

    accelerate_state.forget()
    arguments = transformers.TrainingArguments(
        folder, use_cpu=True, max_steps=8, save_strategy="no", report_to=[], disable_tqdm=True
    )
    model = CountsTokens()
    inputs, labels = data()
    rows = [{"x": x, "labels": y[None]} for x, y in zip(inputs, labels, strict=True)]
    trainer = transformers.Trainer(
        model,
        arguments,
        train_dataset=rows,
        data_collator=lambda found: {
            "x": torch.stack([row["x"] for row in found]),
            "labels": torch.cat([row["labels"] for row in found]),
        },
    )
    use(trainer, ALGORITHMS[name]())
    trainer.train()
    assert arguments.average_tokens_across_devices
    assert set(model.counts) == {8}  # of this rank's batch alone
    return model.seen


@pytest.mark.parametrize("function", [by_fabric, by_accelerate, by_trainer])
def test_fabric_accelerate_and_transformers_send_nothing_in_a_step(ranks, tmp_path, function):
    arguments = (str(tmp_path),) if function is by_trainer else ()
    for name in ARGUMENTS:
        for seen in ranks(2, function, name, *arguments):
            assert len(seen) == 8
            assert len(set(seen[1:])) == 1, (name, seen)
