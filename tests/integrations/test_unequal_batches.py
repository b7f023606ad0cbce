"""Ranks weigh by their samples or tokens under transformers, Accelerate and Lightning."""

import copy
import os

import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import ByteGradAlgorithm
from integrations import accelerate_state
from support import training
from torch import nn
from torch.nn.functional import cross_entropy

STEPS = 3
ROWS = (1, 2, 5)


def own_batch(step):
    return training.batch(step, dist.get_rank(), rows=ROWS[dist.get_rank()])


def alone(model):
    """`model`, trained in one process on the batches of all ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        parts = [training.batch(step, rank, rows=n) for rank, n in enumerate(ROWS)]
        optimizer.zero_grad()
        data = tuple(torch.cat(side) for side in zip(*parts, strict=True))
        training.squared_error(model, data).backward()
        optimizer.step()
    return model


def counts(stats):
    """What this rank has sent, by agreements and by buckets."""
    tables = (stats["control"], stats["total"])
    return [table[what] for table in tables for what in ("bytes_sent", "messages_sent")]


def by_accelerate(algorithm, says=True):
    import accelerate
    from bagua.integrations.accelerate import use

    accelerate_state.forget()
    own = accelerate.Accelerator(cpu=True)
    hooks = use(own, algorithm)
    net = training.wide_network()
    expected = alone(copy.deepcopy(net))
    model, optimizer = own.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for step in range(STEPS):
        inputs, targets = own_batch(step)
        if says:
            hooks.bagua_samples(len(targets))
        optimizer.zero_grad()
        own.backward((model(inputs) - targets).square().mean())
        optimizer.step()
    return _distance(net, expected), training.bits(net.parameters()), counts(hooks.stats())


def _distance(model, expected):
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    return max(float((p - q).abs().max()) for p, q in pairs)


def assert_as_one_process(said, none):
    """`said`, `none`: (distance from one process, bits, counts) of ranks that say numbers or do
    not."""
    assert max(distance for distance, *_ in said) < 1e-6 < 1e-4 < min(one[0] for one in none)
    assert len({bits for _, bits, _ in said}) == 1
    assert [sent for *_, sent in said] == [sent for *_, sent in none]


def test_1_2_and_5_samples_under_accelerate_train_as_one_process_and_send_nothing(ranks):
    said, none = (ranks(3, by_accelerate, "gradient_allreduce", says) for says in (True, False))
    assert_as_one_process(said, none)
    rounded = ranks(3, by_accelerate, ByteGradAlgorithm(hierarchical=False))
    assert all(1e-6 < distance < 0.05 for distance, *_ in rounded)


def by_lightning(samples):
    import bagua.lightning
    from lightning import pytorch as lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = training.network()

        def training_step(self, batch, _):
            return (self.net(batch[0]) - batch[1]).square().mean()

        def validation_step(self, batch, _):
            self.net(batch[0])

        def on_train_end(self):
            self.sent = counts(self.trainer.strategy.model.bagua_ddp.stats())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    rank, module = int(os.environ["RANK"]), Module()
    expected = alone(copy.deepcopy(module.net)) if dist.is_initialized() else None
    batches = [training.batch(step, rank, rows=ROWS[rank]) for step in range(STEPS)]
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=3,
        max_epochs=1,
        strategy=bagua.lightning.BaguaStrategy("gradient_allreduce", samples=samples),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, loader, loader)
    expected = expected or alone(training.network())
    return _distance(module.net, expected), training.bits(module.parameters()), module.sent


def rows_of(batch):
    return len(batch[0])


def test_1_2_and_5_samples_under_lightning_train_as_one_process_and_send_nothing(ranks):
    assert_as_one_process(ranks(3, by_lightning, rows_of), ranks(3, by_lightning, None))


class Tagger(nn.Module):
    """A loss over tokens, divided by the trainer's number."""

    accepts_loss_kwargs = True

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(6, 4)

    def forward(self, inputs, labels, num_items_in_batch=None):
        logits = self.net(inputs).flatten(0, 1)
        total = cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")
        tokens = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
        return {"loss": total / tokens}


def sentences():
    """Of 1 to 7 tokens that count."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(48, 7, 6, generator=generator)
    labels = inputs[..., :4].argmax(-1)
    lengths = torch.randint(1, 8, (48,), generator=generator)
    labels[torch.arange(7) >= lengths[:, None]] = -100
    return [{"inputs": x, "labels": y} for x, y in zip(inputs, labels, strict=True)]


def by_trainer(folder, accumulated, algorithm, rows=4, every=1, batches=None, **use_options):
    """The model after an epoch, the losses that the trainer has reported, and what was sent.

    `batches`: of this rank, in place of its share of all sentences in batches of `rows`.
    """
    import transformers
    from bagua.integrations.transformers import use

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self):
            if batches is None:
                return super().get_train_dataloader()
            return torch.utils.data.DataLoader(batches, batch_size=None)

    accelerate_state.forget()
    arguments = transformers.TrainingArguments(
        folder,
        num_train_epochs=1,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=accumulated,
        use_cpu=True,
        save_strategy="no",
        logging_steps=every,
        report_to=[],
        disable_tqdm=True,
        lr_scheduler_type="constant",
        learning_rate=0.1,
        optim="sgd",
        average_tokens_across_devices=algorithm is None,
    )
    model = Tagger()
    trainer = Trainer(model, arguments, train_dataset=sentences())
    hooks = None if algorithm is None else use(trainer, algorithm, **use_options)
    last = trainer.train().training_loss
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    sent = counts(hooks.stats()) if hooks is not None and hooks.handles else None
    return model, torch.tensor([*losses, last]), sent


def trainers(folder, accumulated, every, alone):
    """Distances from weights and losses of one process: of a trainer by numbers, one without, and
    the plain one; bits of the first, and its losses."""
    found = []
    ways = ("gradient_allreduce", {"samples": True}), ("gradient_allreduce", {}), (None, {})
    for algorithm, options in ways:
        model, losses, _ = by_trainer(folder, accumulated, algorithm, every=every, **options)
        found.append((_distance(model, alone[0]), float((losses - alone[1]).abs().max())))
        if options:
            bits = training.bits([*model.parameters(), losses])
    return *found, bits


def test_unequal_tokens_under_the_trainer_have_the_weights_and_losses_of_one_process(
    ranks, tmp_path
):
    for accumulated, every in ((1, 1), (1, 2), (2, 1), (3, 1)):
        folder = str(tmp_path)
        (alone,) = ranks(1, by_trainer, folder, accumulated, None, 8, every)
        results = ranks(2, trainers, folder, accumulated, every, alone)
        for said, alike, plain, _ in results:
            assert max(*said, *plain) < 1e-6 < 1e-4 < min(alike)
        assert len({bits for *_, bits in results}) == 1


def batches_of(ranks, accumulated):
    """Micro-batches with the sentences of all these ranks."""
    everything, found = sentences(), []
    for number in range(STEPS * accumulated):
        firsts = [number * sum(ROWS) + sum(ROWS[:rank]) for rank in ranks]
        own = [
            everything[(first + i) % len(everything)]
            for rank, first in zip(ranks, firsts, strict=True)
            for i in range(ROWS[rank])
        ]
        found.append({key: torch.stack([one[key] for one in own]) for key in ("inputs", "labels")})
    return found


def trainers_with_1_2_and_5(folder, accumulated, samples, alone):
    own = batches_of([int(os.environ["RANK"])], accumulated)
    options = {"batches": own, "samples": samples}
    model, losses, sent = by_trainer(folder, accumulated, "gradient_allreduce", **options)
    distances = _distance(model, alone[0]), float((losses - alone[1]).abs().max())
    bits = training.bits([*model.parameters(), losses])
    return (max if samples else min)(distances), bits, sent


def test_1_2_and_5_sentences_under_the_trainer_train_as_one_process_and_send_nothing(
    ranks, tmp_path
):
    for accumulated in (1, 2):
        folder, everyone = str(tmp_path), batches_of(range(len(ROWS)), accumulated)
        (alone,) = ranks(1, by_trainer, folder, accumulated, None, 4, 1, everyone)
        said, none = (
            ranks(3, trainers_with_1_2_and_5, folder, accumulated, samples, alone)
            for samples in (True, False)
        )
        assert_as_one_process(said, none)
