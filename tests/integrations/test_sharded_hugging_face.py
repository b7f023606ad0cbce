"""Models that Accelerate and transformers shard by FSDP2: compressed between shards or copies."""

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import ByteGradAlgorithm
from integrations.test_hugging_face import Classifier, accelerator, data, network, train_by
from support import sharded, training
from torch.nn.functional import cross_entropy

FOUR_BITS = ByteGradAlgorithm(codec="int4_block", error_feedback=True)
PARAMETERS = 20 * 64 + 64 + 64 * 5 + 5


def shard(own, copies):
    """Have the accelerator `own` shard by FSDP2 on CPU ranks, which it does on GPUs only."""
    from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig
    from accelerate.state import PartialState

    own.state.distributed_type = type(own.distributed_type).FSDP
    PartialState._shared_state["distributed_type"] = own.state.distributed_type
    own.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        cpu_ram_efficient_loading=False,
        auto_wrap_policy="size_based_wrap",
        min_num_params=100,
    )
    if copies > 1:
        shape = {"dp_replicate_size": copies, "dp_shard_size": dist.get_world_size() // copies}
        own.state.parallelism_config = ParallelismConfig(**shape)
        own.state.device_mesh = own.state.parallelism_config.get_device_mesh("cpu")
    return own


def loss_of(model):
    """The loss over the whole data, equal on all ranks that hold equal weights."""
    inputs, labels = data()
    with torch.no_grad():
        return cross_entropy(model(inputs), labels).item()


def accelerated(algorithm, copies, epochs=4, load=None, save=None, **options):
    """(weights, loss, bytes sent) after training; algorithm None: without bagua."""
    own, net = shard(accelerator(**options), copies), network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    model, sent = train_by(own, algorithm, net, optimizer, epochs, load, save)
    return sharded.full_weights(model), loss_of(model), sent


@sharded.with_torch_group
def accelerated_both_ways(algorithm, copies, options):
    return [accelerated(one, copies, **options) for one in (None, algorithm)]


@pytest.mark.timeout(240)  # two calls of the pool
def test_shards_and_copies_of_accelerate_train_as_its_own_with_fewer_bytes(ranks):
    cases = ((2, "bytegrad", 1, 1, 0.32), (4, FOUR_BITS, 2, 2, 0.24))
    for n, algorithm, copies, accumulated, share in cases:
        options = {"gradient_accumulation_steps": accumulated}
        results = ranks(n, accelerated_both_ways, algorithm, copies, options)
        steps = 4 * 16 // n // accumulated
        for (own, own_loss, _), (weights, loss, sent) in results:
            assert torch.equal(weights, results[0][1][0])
            assert not torch.equal(weights, own)
            assert abs(loss - own_loss) < 0.03  # of 1.6, after few steps
            # In float32 a shard of as many bytes goes out in a step. Frames count: it is small.
            assert 0 < sent < share * steps * 4 * PARAMETERS / 2


@sharded.with_torch_group
def accelerated_in_parts(folder):
    """Weights of a training, and of one that was saved and loaded."""
    whole = accelerated(FOUR_BITS, 2)
    accelerated(FOUR_BITS, 2, epochs=2, save=folder)
    return whole[0], accelerated(FOUR_BITS, 2, epochs=2, load=folder)[0]


def test_residuals_between_copies_are_in_the_state_of_accelerate(ranks, tmp_path):
    results = ranks(4, accelerated_in_parts, str(tmp_path / "state"))
    for whole, resumed in results:
        assert torch.equal(whole, resumed)
    assert len(list((tmp_path / "state").glob("bagua_*.pt"))) == 4


def by_trainer(algorithm, copies, folder, epochs=2, resume=None):
    """(weights, loss, bytes sent) after a training by transformers.Trainer."""
    import transformers
    from bagua.integrations.transformers import use
    from integrations import accelerate_state

    accelerate_state.forget()
    arguments = transformers.TrainingArguments(
        folder,
        num_train_epochs=epochs,
        per_device_train_batch_size=16,
        use_cpu=True,
        save_strategy="epoch",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        lr_scheduler_type="constant",
        learning_rate=0.01,
    )
    examples = [{"inputs": x, "labels": y} for x, y in zip(*data(), strict=True)]
    model = Classifier()
    trainer = transformers.Trainer(model, arguments, train_dataset=examples)
    shard(trainer.accelerator, copies)
    trainer.is_fsdp_enabled = True
    hooks = None if algorithm is None else use(trainer, algorithm)
    trainer.train(resume_from_checkpoint=resume)
    sent = None if hooks is None else hooks.stats()["total"]["bytes_sent"]
    return sharded.full_weights(model), loss_of(model.net), sent


@sharded.with_torch_group
def by_trainer_in_parts(folder):
    """A training by the trainer alone, by 4 bits, and by 4 bits from its first epoch on."""
    own = by_trainer(None, 1, f"{folder}/own")
    whole = by_trainer(FOUR_BITS, 1, f"{folder}/ours")
    first = f"{folder}/ours/checkpoint-8"
    return own, whole, by_trainer(FOUR_BITS, 1, f"{folder}/ours", resume=first)


def test_shards_of_the_trainer_train_as_its_own_and_resume(ranks, tmp_path):
    results = ranks(2, by_trainer_in_parts, str(tmp_path))
    for (own, own_loss, _), (weights, loss, sent), (resumed, _, _) in results:
        assert torch.equal(weights, results[0][1][0])
        assert torch.equal(weights, resumed)
        assert not torch.equal(weights, own)
        assert abs(loss - own_loss) < 0.03  # of 1.6, after few steps
        assert 0 < sent < 0.2 * 16 * 4 * PARAMETERS / 2


@sharded.with_torch_group
def refusals():
    from bagua.integrations.accelerate import use

    refused = ("diloco", "gradient_allreduce", ByteGradAlgorithm(average=False))
    errors = [training.error_of(lambda a=a: use(shard(accelerator(), 1), a)) for a in refused]
    first = shard(accelerator(), 1)
    first.state.fsdp_plugin.fsdp_version = 1
    return [*errors, training.error_of(lambda: use(first, "bytegrad"))]


def test_what_shards_cannot_train_by_is_refused_with_the_remedy(ranks):
    for rounds, exact, summed, first_version in ranks(2, refusals):
        assert "NotImplementedError: use: this Accelerator trains by FSDP2, where DiLoCo" in rounds
        assert "docs/islands.md" in rounds
        assert "leave use() out for exact gradients" in exact
        assert "leave hierarchical= and average= of ByteGradAlgorithm out" in summed
        assert "FullyShardedDataParallelPlugin(fsdp_version=2)" in first_version
