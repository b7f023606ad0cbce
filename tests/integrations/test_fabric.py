"""BaguaFabricStrategy: exact training is that of Fabric's DDP to the bit, in both packages."""

import importlib

import pytest
import torch
from support import training
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

FABRICS = {"lightning": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}


def trained(strategy, package="lightning", together=True, **options):
    """Parameters after training that steps once in two batches."""
    fabric = importlib.import_module(FABRICS[package]).Fabric(
        accelerator="cpu", devices=2, strategy=strategy, **options
    )
    fabric.launch()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    if together:
        model, optimizer = fabric.setup(net, optimizer)
    else:
        model, optimizer = fabric.setup_module(net), fabric.setup_optimizers(optimizer)
    inputs = torch.randn(256, 20, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs[:, :5].argmax(1))
    for index, (batch, labels) in enumerate(fabric.setup_dataloaders(DataLoader(data, 16))):
        last = index % 2 == 1
        with fabric.no_backward_sync(model, enabled=not last):
            fabric.backward(cross_entropy(model(batch), labels))
        if last:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    return values(net)


def as_ddp(package, options):
    from bagua.lightning import strategies

    assert strategies[package] is not None  # registers "bagua" for Fabric, too
    return [trained(strategy, package, **options) for strategy in ("ddp", "bagua")]


@pytest.mark.parametrize(
    ("package", "options"),
    [
        ("lightning", {}),
        ("lightning", {"together": False}),
        ("lightning", {"precision": "bf16-mixed"}),
        ("pytorch_lightning", {}),
    ],
    ids=["plain", "apart", "bf16", "other_package"],
)
def test_exact_training_is_that_of_ddp_to_the_bit(ranks, package, options):
    for ddp, ours in ranks(2, as_ddp, package, options):
        assert ours == ddp


def started(fabric):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 5))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return net, *fabric.setup(net, optimizer)


def stepped(fabric, model, optimizer, steps):
    inputs = torch.randn(256, 20, generator=torch.Generator().manual_seed(1))
    for step in steps:
        part = slice(16 * (2 * step + fabric.global_rank), None)
        outputs = model(inputs[part][:16])
        fabric.backward(cross_entropy(outputs, inputs[part][:16, :5].argmax(1)))
        optimizer.step()
        optimizer.zero_grad()


def values(net):
    return [parameter.tolist() for parameter in net.parameters()]


def saved_between(name, folder, arguments):
    """Weights at the end of a training, of a resumed one, and those of the file and the anchor."""
    from bagua.lightning import BaguaFabricStrategy
    from lightning.fabric import Fabric

    strategy = BaguaFabricStrategy(name, **arguments)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    net, model, optimizer = started(fabric)
    stepped(fabric, model, optimizer, range(4))
    fabric.save(f"{folder}/state", {"model": model, "optimizer": optimizer, "step": 4})
    with strategy.anchor():
        anchor = values(net)
    stepped(fabric, model, optimizer, range(4, 8))
    model._forward_module.bagua_ddp.pause()
    whole, other = values(net), started(fabric)
    net, model, optimizer = other
    rest = fabric.load(f"{folder}/state", {"model": model, "optimizer": optimizer})
    assert rest == {"step": 4}
    stepped(fabric, model, optimizer, range(4, 8))
    file = torch.load(f"{folder}/state", weights_only=True)["model"]
    return whole, values(net), anchor, [file[name].tolist() for name, _ in net.named_parameters()]


STATES = {
    "diloco": {"interval": 3, "codec": "int4_block"},
    "low_precision_decentralized": {"hierarchical": False},
    "sparse": {"ratio": 0.2},
}


@pytest.mark.parametrize("name", STATES)
def test_what_is_saved_resumes_to_the_bit(ranks, tmp_path, name):
    results = ranks(2, saved_between, name, str(tmp_path), STATES[name])
    for whole, resumed, anchor, file in results:
        assert resumed == whole
        if name != "low_precision_decentralized":  # there the file has rank 0's weights
            assert file == anchor == results[0][2]
    assert (results[0][0] == results[1][0]) == (name == "sparse")


def apart(name):
    from bagua.lightning import BaguaFabricStrategy

    return training.error_of(lambda: trained(BaguaFabricStrategy(name), together=False))


REFUSED = {
    "async": "AsyncModelAverageAlgorithmImpl averages weights",
    "decentralized": "DecentralizedAlgorithmImpl averages weights",
    "low_precision_decentralized": "are in none of the optimizers",
    "qadam": "needs exactly one optimizer",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_module_without_its_optimizers_is_refused_where_they_matter(ranks, name):
    for error in ranks(2, apart, name):
        assert REFUSED[name] in error
