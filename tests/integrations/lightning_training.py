"""Small trainings by Lightning, for the ranks of the pool; imports Lightning."""

import contextlib
import hashlib
import importlib
import os
import warnings

import bagua.lightning
import torch
from bagua.torch_api.algorithms import QAdamOptimizer
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

TRAINERS = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}


def data():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(256, 20, generator=generator)
    return TensorDataset(inputs, inputs[:, :5].argmax(1))


def digest(module):
    state = b"".join(v.detach().float().numpy().tobytes() for v in module.state_dict().values())
    return hashlib.sha256(state).hexdigest()


def parameters(module):
    return [parameter.detach().tolist() for parameter in module.parameters()]


def strategy(name, package="lightning", **arguments):
    """Lightning's own of that name, or bagua's with the algorithm of that name."""
    if name.startswith("ddp"):
        return name
    if name in ("bytegrad", "sparse", "qadam") or name.endswith("decentralized"):
        arguments = {"hierarchical": False} | arguments
    if name == "diloco":
        arguments = {"interval": 5} | arguments
    if name == "power_sgd":
        arguments = {"rank": 1, "warmup_steps": 0} | arguments
    return bagua.lightning.strategies[package](name, **arguments)


def error_of_fit(module, strategy, **options):
    try:
        fit(module, strategy, **options)
    except Exception as error:  # noqa: BLE001 - handed to the test
        return f"{type(error).__name__}: {error}"
    return None


def fit(module, strategy, package="lightning", ckpt_path=None, **options):
    """The trainer, after training `module` on the data; deterministic."""
    trainers = importlib.import_module(TRAINERS[package])
    trainers.seed_everything(0, verbose=False)
    defaults = {"enable_checkpointing": False, "max_epochs": 2}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*(num_workers|litlogger|LeafSpec).*")
        trainer = trainers.Trainer(
            accelerator="cpu",
            devices=int(os.environ["WORLD_SIZE"]),
            strategy=strategy,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **(defaults | options),
        )
        trainer.fit(
            module,
            DataLoader(data(), batch_size=16, shuffle=True),
            DataLoader(data(), batch_size=64),
            ckpt_path=ckpt_path,
        )
    return trainer


def classifier(package="lightning", q_adam=False, fails_at=None):
    """A LightningModule with automatic optimization, of either package."""
    trainers = importlib.import_module(TRAINERS[package])

    class Classifier(trainers.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(
                nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 5)
            )
            self.losses, self.stats, self.scales = [], None, None

        def training_step(self, batch, index):
            if index == fails_at:
                raise ArithmeticError("of the test")
            inputs, labels = batch
            loss = cross_entropy(self.net(inputs), labels)
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch, index):
            self.log("validated", cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self):
            if q_adam:
                return QAdamOptimizer(self.parameters(), lr=0.01, warmup_steps=4)
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

        def on_train_end(self):
            remember_stats(self)

    return Classifier()


def remember_stats(module):
    wrapper = module.trainer.strategy.model
    if hasattr(wrapper, "bagua_ddp"):
        module.stats = wrapper.bagua_ddp.stats()
        module.scales = wrapper.bagua_ddp.scales_gradients


def gan(step):
    """A LightningModule with two optimizers, trained by `step(module, inputs, index)`."""
    trainers = importlib.import_module("lightning.pytorch")

    class Gan(trainers.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.automatic_optimization = False
            self.g = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 20))
            self.d = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 1))
            self.stats = self.scales = None

        def configure_optimizers(self):
            return [torch.optim.SGD(part.parameters(), lr=0.05) for part in (self.g, self.d)]

        def training_step(self, batch, index):
            step(self, batch[0], index)

        def on_train_end(self):
            remember_stats(self)

    return Gan()


def one_backward(module, inputs, index):
    _one(module, inputs, module.manual_backward)


def past_lightning(module, inputs, index):
    """backward() of the loss, where Lightning asks for manual_backward()."""
    _one(module, inputs, lambda loss: loss.backward())


def _one(module, inputs, backward):
    module.zero_grad()
    backward(module.d(module.g(inputs)).square().mean())
    for optimizer in module.optimizers():
        optimizer.step()


def two_backwards(module, inputs, index):
    _two(module, inputs, lambda optimizer: contextlib.nullcontext())


def toggled(module, inputs, index):
    _two(module, inputs, lambda optimizer: optimizer.toggle_model())


def accumulated(module, inputs, index):
    """Steps after every second batch, communicated only then."""
    last = index % 2 == 1
    _two(module, inputs, lambda optimizer: optimizer.toggle_model(sync_grad=last), last)


def _two(module, inputs, context, steps=True):
    for optimizer, loss in zip(module.optimizers(), _losses(module, inputs), strict=True):
        with context(optimizer):
            module.manual_backward(loss())
            if steps:
                optimizer.step()
                optimizer.zero_grad()


def _losses(module, inputs):
    yield lambda: module.d(module.g(inputs)).mean()
    yield lambda: module.d(module.g(inputs).detach()).mean() - module.d(inputs).mean()
