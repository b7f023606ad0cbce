"""LoRA adapters of PEFT through every door: only they travel, and later ones are named or taken."""

import contextlib
import io
import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bagua import BaguaError, comm_hooks, fsdp
from bagua.torch_api import wrap
from bagua.torch_api.algorithms import ByteGradAlgorithm, DiLoCoAlgorithm
from bagua.torch_api.checkpoint import PerRank
from bagua.torch_api.data_parallel import DistributedDataParallel
from support import training
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

EXAMPLE = Path(__file__).resolve().parents[2] / "docs/examples/lora.py"
STEPS = 4
TARGETS = ["q_proj", "v_proj"]

ALGORITHMS = {
    "exact": lambda: "gradient_allreduce",
    "bytegrad": lambda: ByteGradAlgorithm(hierarchical=False),
    "int4": lambda: ByteGradAlgorithm(hierarchical=False, codec="int4_block", error_feedback=True),
    "diloco": lambda: DiLoCoAlgorithm(interval=2, codec="int4_block", warmup_steps=0),
}
#: Bytes sent in STEPS steps beside those of exact gradients, or DTensors' gradients, with scales.
AT_MOST = {"exact": 1.0, "bytegrad": 0.29, "int4": 0.16, "diloco": 0.08, "fsdp": 0.16}


def adapted(kind="LoraConfig", **options):
    """A tiny random transformer, frozen, with adapters."""
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if kind != "PromptTuningConfig":
        options = {"target_modules": TARGETS} | options
    size = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    base = LlamaForCausalLM(LlamaConfig(**size, num_attention_heads=4, num_key_value_heads=4))
    codes = torch.arange(32, dtype=torch.uint8)  # as a base in 8 bits has them
    base.model.layers[0].mlp.codes = torch.nn.Parameter(codes, requires_grad=False)
    return peft.get_peft_model(base, getattr(peft, kind)(task_type="CAUSAL_LM", **options))


def add(model):
    import peft

    model.add_adapter("later", peft.LoraConfig(r=4, target_modules=TARGETS))


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def adamw(model):
    return torch.optim.AdamW(trained(model), lr=0.01)


def rows(step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    found = torch.randint(64, (2, 16), generator=generator)
    return {"input_ids": found, "labels": found}


def steps(model, optimizer, first=0, number=STEPS, backward=torch.Tensor.backward):
    for step in range(first, first + number):
        optimizer.zero_grad()
        backward(model(**rows(step, dist.get_rank())).loss)
        optimizer.step()


def by_wrap(model, algorithm):
    optimizer = adamw(model)
    model = wrap(model, [optimizer], algorithm)
    return model, optimizer, model.bagua_ddp


def by_class(model, algorithm):
    optimizer = adamw(model)
    ddp = DistributedDataParallel(model, optimizers=optimizer, algorithm=algorithm)
    return ddp, optimizer, ddp.bagua_ddp


def by_hook(model, algorithm):
    with comm_hooks.everywhere(algorithm) as handles:
        ddp = torch.nn.parallel.DistributedDataParallel(model)
    return ddp, adamw(model), handles[0]


def by_accelerate(model, algorithm):
    from accelerate import Accelerator
    from bagua.integrations.accelerate import use
    from integrations import accelerate_state

    accelerate_state.forget()
    accelerator = Accelerator(cpu=True)
    hooks = use(accelerator, algorithm)
    prepared, optimizer = accelerator.prepare(model, adamw(model))
    return prepared, optimizer, hooks


def sharded(model, mesh):
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def by_fsdp(model, _):
    model.base_model.model.model.layers[0].mlp.codes = None  # fully_shard takes floats only
    model = sharded(model, init_device_mesh("cpu", (2,)))
    return model, adamw(model), fsdp.compress(model)


def by_islands(model, algorithm):
    model.base_model.model.model.layers[0].mlp.codes = None
    shape = (2, dist.get_world_size() // 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("island", "shard"))
    model = sharded(model, mesh["shard"])
    optimizer = adamw(model)
    model = wrap(model, [optimizer], algorithm, process_group=mesh["island"])
    return model, optimizer, model.bagua_ddp


#: Doors, and the algorithms that are tried by them.
DOORS = {
    by_wrap: ("exact", "bytegrad", "int4", "diloco"),
    by_class: ("exact", "int4"),
    by_hook: ("exact", "int4"),
    by_accelerate: ("bytegrad", "diloco"),
    by_fsdp: ("fsdp",),
    by_islands: ("diloco",),
}


@training.with_group
def trained_by(door, name, options):
    """Bytes sent beside those of exact gradients, whether the base is as it was, and digests."""
    model = adapted(**options)
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    wrapped, optimizer, counted = door(model, ALGORITHMS.get(name, lambda: None)())
    steps(wrapped, optimizer)
    stats = counted.stats()
    if name == "diloco":
        wrapped.bagua_algorithm.sync()
    exact = sum(4 * p.numel() for p in trained(model))
    assert sum(bucket["bytes"] for bucket in stats["buckets"]) == exact
    remembers = getattr(wrapped, "bagua_algorithm", counted)
    if hasattr(remembers, "state_dict"):
        values = [v for v in remembers.state_dict().values() if isinstance(v, torch.Tensor)]
        assert sum(v.numel() for v in values) <= exact  # up to four per trained parameter
    if door in (by_fsdp, by_islands):
        return stats["total"]["bytes_sent"] / exact / STEPS, True, ""
    same = all(torch.equal(p, frozen[n]) for n, p in model.named_parameters() if n in frozen)
    return stats["total"]["bytes_sent"] / exact / STEPS, same, training.bits(trained(model))


@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["lm_head"]}], ids=["lora", "saved"])
@pytest.mark.parametrize("door", DOORS)
def test_only_what_is_trained_travels(ranks, door, options):
    for name in DOORS[door]:
        first, second = ranks(2, trained_by, door, name, options)
        assert first == second
        assert 0.1 * AT_MOST[name] < first[0] <= AT_MOST[name]
        assert first[1]


def shards(model):
    return training.bits(p.to_local() for p in trained(model))


@training.with_group
def islands_of_two(folder):
    """Digests of a rank's shard: whole, resumed, after sync(); share of bytes; a late adapter."""
    model, optimizer, counted = by_islands(adapted(r=32), ALGORITHMS["diloco"]())
    steps(model, optimizer, 0, 3)  # a step after a round
    states = {"training": PerRank(model), "algorithm": model.bagua_algorithm}
    dcp.save(states, checkpoint_id=folder)
    steps(model, optimizer, 3, 2)
    exact, stats = sum(4 * p.to_local().numel() for p in trained(model)), counted.stats()
    found = {"whole": shards(model), "share": stats["total"]["bytes_sent"] / exact / 2}
    found["registered"] = sum(bucket["bytes"] for bucket in stats["buckets"]) == exact
    model, optimizer, _ = by_islands(adapted(r=32), ALGORITHMS["diloco"]())
    dcp.load({"training": PerRank(model), "algorithm": model.bagua_algorithm}, checkpoint_id=folder)
    steps(model, optimizer, 3, 2)
    found["halves"] = shards(model)
    model.bagua_algorithm.sync()
    found["synchronised"] = shards(model)
    add(model)
    model.set_adapter("later")
    found["late"] = training.error_of(lambda: steps(model, adamw(model), 7, 1))
    return found


def test_adapters_sharded_inside_islands_meet_alone_resume_and_name_late_ones(ranks, tmp_path):
    results = ranks(4, islands_of_two, str(tmp_path))
    for found in results:
        assert found["whole"] == found["halves"]
        assert found["registered"]
        assert 0.125 < found["share"] < 0.15
        assert "q_proj.lora_dropout.later' is new since bagua.wrap" in found["late"]
    for shard in range(2):
        assert results[shard]["whole"] != results[shard + 2]["whole"]
        assert results[shard]["synchronised"] == results[shard + 2]["synchronised"]


#: Other adapters: the class of their settings, and arguments.
KINDS = [
    ("LoraConfig", {"use_dora": True, "lora_dropout": 0.1}),
    ("LoraConfig", {"init_lora_weights": "pissa"}),
    ("LoraConfig", {"trainable_token_indices": [1, 2]}),
    ("IA3Config", {"feedforward_modules": []}),
    ("AdaLoraConfig", {"init_r": 4, "target_r": 2, "tinit": 1, "tfinal": 2, "total_step": 8}),
    ("VeraConfig", {"r": 4}),
    ("PromptTuningConfig", {"num_virtual_tokens": 4}),
]


@training.with_group
def other_adapters():
    """For each kind and two doors: bytes of a round that are not of adapters, and a digest."""
    found = []
    for kind, options in KINDS:
        for door, name in ((by_wrap, "diloco"), (by_hook, "bytegrad")):
            model = adapted(kind, **options)
            wrapped, optimizer, counted = door(model, ALGORITHMS[name]())
            steps(wrapped, optimizer)
            counts = [bucket["bytes"] for bucket in counted.stats()["buckets"]]
            if name == "diloco":
                wrapped.bagua_algorithm.sync()
            padding = sum(counts) - sum(4 * p.numel() for p in trained(model))
            found.append((kind, padding, training.bits(model.parameters())))
    return found


def test_other_kinds_of_adapters_travel_alone_too(ranks):
    first, second = ranks(2, other_adapters)
    assert first == second
    assert [(kind, padding) for kind, padding, _ in first if not 0 <= padding < 128] == []


@training.with_group
def changed_after(door, name, change):
    """The message of the error of the steps after a change, or the digest of all weights."""
    model = adapted()
    if change == "switch":
        add(model)
    wrapped, optimizer, _ = door(model, ALGORITHMS[name]())
    steps(wrapped, optimizer, 0, 1)
    if change == "add":
        add(model)
    model.set_adapter("later")
    optimizer = adamw(model)
    try:
        steps(wrapped, optimizer, 1)
    except BaguaError as error:
        return str(error)
    return training.bits(model.parameters())


#: Door, algorithm, change, and the words of the error; None where training goes on right.
CHANGES = [
    (by_wrap, "bytegrad", "add", "lora_dropout.later' is new since bagua.wrap"),
    (by_wrap, "diloco", "add", "lora_dropout.later' is new since bagua.wrap"),
    (by_wrap, "bytegrad", "switch", None),
    (by_wrap, "diloco", "switch", "q_proj.lora_A.later.weight' was unfrozen"),
    (by_class, "int4", "switch", None),
    (by_hook, "bytegrad", "add", "q_proj.lora_A.later.weight' was added, unfrozen or cast since"),
    (by_hook, "int4", "switch", "q_proj.lora_A.later.weight' was added, unfrozen or cast since"),
    (by_accelerate, "bytegrad", "switch", "q_proj.lora_A.later.weight' was added, unfrozen"),
]


def test_an_adapter_that_comes_later_is_named_or_taken(ranks):
    for door, name, change, words in CHANGES:
        first, second = ranks(2, changed_after, door, name, change)
        if words is None:
            assert first == second
        else:
            assert words in first, (door, name, change)
            assert words in second


@training.with_group
def switched_with_another_wrap():
    model = adapted()
    add(model)
    weights = []
    for adapter in ("default", "later"):
        model.set_adapter(adapter)
        wrapped, optimizer, _ = by_wrap(model, ALGORITHMS["diloco"]())
        steps(wrapped, optimizer)
        wrapped.bagua_algorithm.sync()
        weights.append(training.bits(model.parameters()))
    return weights


def test_rounds_of_another_adapter_take_another_wrap(ranks):
    first, second = ranks(2, switched_with_another_wrap)
    assert first == second
    assert first[0] != first[1]


QUIET = {"report_to": [], "disable_tqdm": True, "logging_strategy": "no"}


def trainer_of_transformers(model, folder, **arguments):
    from transformers import Trainer, TrainingArguments

    data = [{key: value[0] for key, value in rows(i, 2).items()} for i in range(64)]
    return Trainer(model, TrainingArguments(folder, **QUIET, **arguments), train_dataset=data)


def trainer_of_trl(model, folder, **arguments):
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "w1", "eos_token": "w2", "unk_token": "w0"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **special)
    texts = [" ".join(f"w{n}" for n in rows(i, 2)["input_ids"][0]) for i in range(64)]
    settings = SFTConfig(folder, max_length=32, bf16=False, **QUIET, **arguments)
    data = Dataset.from_dict({"text": texts})
    return SFTTrainer(model, settings, train_dataset=data, processing_class=tokenizer)


def by_trainer(make, folder, name, resumed):
    """Digest of the adapters after 8 steps of the trainer, which saves after 4."""
    from bagua.integrations.transformers import use
    from integrations import accelerate_state

    accelerate_state.forget()
    model = adapted()
    arguments = {"use_cpu": True, "max_steps": 8, "save_steps": 4, "learning_rate": 0.01}
    trainer = make(model, folder, **arguments)
    hooks = use(trainer, ALGORITHMS[name]())
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-4" if resumed else None)
    exact = sum(4 * p.numel() for p in trained(model))
    return training.bits(trained(model)), hooks.stats()["total"]["bytes_sent"] / exact


def resumed_by_trainer(make, folder, name):
    whole, sent = by_trainer(make, folder, name, False)
    return whole, by_trainer(make, folder, name, True)[0], sent


@pytest.mark.parametrize("name", ["int4", "bytegrad", "diloco"])
@pytest.mark.parametrize("make", [trainer_of_transformers, trainer_of_trl])
def test_the_trainer_resumes_adapters_to_the_bit(ranks, tmp_path, make, name):
    first, second = ranks(2, resumed_by_trainer, make, str(tmp_path), name)
    assert first == second
    assert first[0] == first[1]
    assert 0 < first[2] <= 8 * AT_MOST[name]
    saved = {path.name for path in (tmp_path / "checkpoint-4").iterdir()}
    of_state = {"bagua_0.pt", "bagua_1.pt"} if name != "bytegrad" else set()
    assert {"adapter_model.safetensors"} | of_state <= saved


def example(*arguments):
    """The line that a rank of the example prints, as a dict."""
    before, sys.argv = sys.argv, [str(EXAMPLE), *arguments]
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            runpy.run_path(str(EXAMPLE), run_name="__main__")
    finally:
        sys.argv = before
    return json.loads(output.getvalue().splitlines()[-1])


def example_resumed(name, folder):
    """The example to its end, in two halves, and with the adapter that it has saved."""
    import peft
    from transformers import LlamaForCausalLM

    whole = example("--algorithm", name, "--steps", "60")
    example("--algorithm", name, "--steps", "30", "--folder", folder)
    halves = example("--algorithm", name, "--steps", "60", "--folder", folder)
    module = runpy.run_path(str(EXAMPLE))
    base = module["adapted"]().unload()
    assert isinstance(base, LlamaForCausalLM)
    loaded = peft.PeftModel.from_pretrained(base, f"{folder}/adapter", is_trainable=True)
    norm = float(torch.cat([p.detach().flatten() for p in trained(loaded)]).double().norm())
    return whole, halves, norm


@pytest.mark.parametrize("name", ["bytegrad", "diloco"])
def test_the_example_learns_and_goes_on_to_the_bit(ranks, tmp_path, name):
    results = ranks(2, example_resumed, name, str(tmp_path))
    for whole, halves, norm in results:
        # The text is the example itself: how low the loss gets depends on its words.
        assert whole["loss"] == halves["loss"] < whole["first_loss"] - 1
        assert whole["weights"] == halves["weights"] == norm == results[0][2]
        share = whole["bytes_sent_per_step"] / (4 * whole["adapters"])
        assert share <= {"bytegrad": 0.27, "diloco": 0.015}[name]
    saved = sum(path.stat().st_size for path in tmp_path.rglob("*.distcp"))
    shutil.rmtree(tmp_path)
    assert saved > 0


def test_the_example_says_what_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(SystemExit, match="This example needs: pip install transformers peft"):
        runpy.run_path(str(EXAMPLE))
