"""Models that Accelerate and transformers shard by FSDP2: compressed between shards or copies."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bagua.torch_api import wrap
from bagua.torch_api.algorithms import ByteGradAlgorithm, DiLoCoAlgorithm
from bagua.torch_api.checkpoint import PerRank
from integrations.test_hugging_face import Classifier, accelerator, data, network, train_by
from support import sharded, training
from torch.nn.functional import cross_entropy

FOUR_BITS = ByteGradAlgorithm(codec="int4_block", error_feedback=True)
#: Of 8 steps the last two come after the last round.
ROUNDS = DiLoCoAlgorithm(interval=3, codec="int4_block")
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


def islands_by_hand(steps):
    """This rank's shards, and the anchor, after a loop like that of docs/examples/islands.py."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("island", "shard"))
    net = network()
    for layer in (net[0], net[2], net):
        torch.distributed.fsdp.fully_shard(layer, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    wrap(net, [optimizer], ROUNDS, mesh["island"], do_flatten=None)
    inputs, labels = data()
    for step in range(steps):
        part = slice(16 * (4 * (step % 4) + dist.get_rank()), None)
        cross_entropy(net(inputs[part][:16]), labels[part][:16]).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return shards_of(net)


def shards_of(model):
    return [parameter.to_local().clone() for parameter in model.parameters()]


def islands_by_accelerate(epochs, folder=None, load=False):
    """(accelerator, model, shards of this rank) after rounds under Accelerate."""
    own, net = shard(accelerator(), 2), network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    model, _ = train_by(own, ROUNDS, net, optimizer, 0)
    state = {"training": PerRank(model), "algorithm": model.bagua_algorithm}
    if load:
        dcp.load(state, checkpoint_id=folder)
    inputs = torch.utils.data.TensorDataset(*data())
    for _ in range(epochs):
        for batch, labels in own.prepare_data_loader(torch.utils.data.DataLoader(inputs, 16)):
            own.backward(cross_entropy(model(batch), labels))
            own.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    if folder and not load:
        dcp.save(state, checkpoint_id=folder)
    return own, model, shards_of(model)


@sharded.with_torch_group
def islands_in_parts(folder):
    by_hand = islands_by_hand(8)
    _, model, whole = islands_by_accelerate(2)
    sent = model.bagua_stats()["total"]["bytes_sent"]
    islands_by_accelerate(1, folder)
    own, model, resumed = islands_by_accelerate(1, folder, load=True)
    errors = [training.error_of(lambda f=f: f(folder)) for f in (own.save_state, own.load_state)]
    shown = own.get_state_dict(model)
    with model.bagua_algorithm.anchor():
        anchor = sharded.full_weights(model)
    return by_hand, whole, resumed, sent, errors, shown, anchor


def test_rounds_under_accelerate_are_those_of_a_loop_and_resume(ranks, tmp_path):
    results = ranks(4, islands_in_parts, str(tmp_path))
    for by_hand, whole, resumed, sent, errors, _, anchor in results:
        assert all(map(torch.equal, whole, by_hand))
        assert all(map(torch.equal, whole, resumed))
        # Two rounds of an eighth of this rank's half of the weights, and frames.
        assert 0 < sent < 2 * 0.2 * 4 * PARAMETERS / 2
        for error in errors:
            assert "NotImplementedError: use: Accelerate's checkpoints have the shards" in error
        assert torch.equal(anchor, results[0][-1])
    shown = results[0][-2]  # Accelerate gives it to rank 0 alone
    assert torch.equal(anchor, torch.cat([value.flatten() for value in shown.values()]))
    (first, *_), (_, *_), (other, *_), _ = results
    assert not all(map(torch.equal, first, other))  # each island's own, between two rounds


def by_trainer(algorithm, copies, folder, epochs=2, resume=None, save="epoch"):
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
        save_strategy=save,
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
def copies_by_trainer(folder):
    """HSDP by the trainer alone, with 4 bits between copies, and with rounds between them."""
    ways = {"own": None, "four_bits": FOUR_BITS, "rounds": ROUNDS}
    return [by_trainer(way, 2, f"{folder}/{name}", save="no") for name, way in ways.items()]


@pytest.mark.timeout(240)
def test_copies_of_the_trainer_train_as_its_own_with_fewer_bytes(ranks, tmp_path):
    results = ranks(4, copies_by_trainer, str(tmp_path))
    exact = 8 * 4 * PARAMETERS / 2  # of 8 steps, to the other copy in float32
    for own, (weights, loss, sent), (of_rounds, loss_of_rounds, sent_in_rounds) in results:
        assert torch.equal(weights, results[0][1][0])
        assert torch.equal(of_rounds, results[0][2][0])  # they end with a round
        assert not torch.equal(weights, own[0])
        assert abs(loss - own[1]) < 0.03  # of 1.6, after few steps
        assert abs(loss_of_rounds - own[1]) < 0.1
        assert 0 < sent < 0.24 * exact
        assert 0 < sent_in_rounds < 0.6 * sent


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
        assert "NotImplementedError: use: this Accelerator shards one copy of the model" in rounds
        assert "ParallelismConfig(dp_replicate_size=islands" in rounds
        assert "leave use() out for exact gradients" in exact
        assert "leave hierarchical= and average= of ByteGradAlgorithm out" in summed
        assert "FullyShardedDataParallelPlugin(fsdp_version=2)" in first_version
