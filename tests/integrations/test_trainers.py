"""``comm_hooks.everywhere`` around trainers that construct DistributedDataParallel inside."""

import contextlib
import hashlib

import torch
import torch.distributed as dist
from bagua import comm_hooks
from bagua.torch_api.algorithms import ByteGradAlgorithm
from support import hooked, training

ALGORITHMS = {
    "own": None,
    "exact": "gradient_allreduce",
    "bytegrad": ByteGradAlgorithm(hierarchical=False),
}
WORDS = ["[PAD]", "[UNK]", *(f"w{i}" for i in range(60))]


def inside(algorithm):
    return comm_hooks.everywhere(algorithm) if algorithm else contextlib.nullcontext([])


def by_ignite(algorithm, _):
    """A model after some steps of ignite's Engine, and handles."""
    from ignite import distributed as idist
    from ignite.engine import Engine

    network = torch.nn.Sequential(torch.nn.Linear(5, 5000), torch.nn.Linear(5000, 3))
    with inside(algorithm) as handles:
        model = idist.auto_model(network)
    optimizer = idist.auto_optim(training.sgd(model))

    def step(engine, number):
        optimizer.zero_grad()
        hooked.plain_step(model, number)
        optimizer.step()

    Engine(step).run(range(hooked.STEPS), max_epochs=1)
    return model, handles


def by_torch_geometric(algorithm, _):
    """A graph network, trained on batches of random graphs."""
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader
    from torch_geometric.nn import GCN

    graphs = [
        Data(x=torch.randn(10, 8), edge_index=torch.randint(10, (2, 30)), y=torch.randn(10, 3))
        for _ in range(16)
    ]
    with inside(algorithm) as handles:
        model = torch.nn.parallel.DistributedDataParallel(GCN(8, 128, 3, 3))
    optimizer = training.sgd(model)
    for batch in DataLoader(graphs[dist.get_rank() :: 2], batch_size=2):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(batch.x, batch.edge_index), batch.y).backward()
        optimizer.step()
    return model, handles


def save_tiny_bert(folder):
    """A random BERT of 0.02 million parameters with a tokenizer of sixty words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=16, **special)
    fast.save_pretrained(folder)
    size = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64}
    config = BertConfig(vocab_size=len(WORDS), num_attention_heads=4, **size)
    BertModel(config).save_pretrained(folder)


def by_sentence_transformers(algorithm, folder):
    """Pairs of random sentences; the trainer's Accelerator constructs the class."""
    import sentence_transformers as st
    from datasets import Dataset
    from integrations import accelerate_state
    from sentence_transformers import losses, models

    accelerate_state.forget()
    if dist.get_rank() == 0:
        save_tiny_bert(folder)
    dist.barrier()
    model = st.SentenceTransformer(
        modules=[models.Transformer(folder), models.Pooling(32)], device="cpu"
    )
    picks = torch.randint(60, (2, 32, 6)).tolist()
    sides = [[" ".join(f"w{i}" for i in row) for row in side] for side in picks]
    arguments = st.SentenceTransformerTrainingArguments(
        folder,
        max_steps=2,
        per_device_train_batch_size=4,
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = st.SentenceTransformerTrainer(
        model,
        arguments,
        train_dataset=Dataset.from_dict(dict(zip(("anchor", "positive"), sides, strict=True))),
        loss=losses.MultipleNegativesRankingLoss(model),
    )
    with inside(algorithm) as handles:
        trainer.train()
    return model, handles


def by_trl(algorithm, folder):
    """Adapters of a tiny Llama; SFTTrainer's Accelerator constructs the class."""
    from integrations import accelerate_state
    from integrations.test_adapters import adapted, trainer_of_trl

    accelerate_state.forget()
    model = adapted(r=64)
    trainer = trainer_of_trl(model, folder, use_cpu=True, max_steps=2, save_strategy="no")
    with inside(algorithm) as handles:
        trainer.train()
    return model, handles


TRAINERS = (by_ignite, by_torch_geometric, by_sentence_transformers, by_trl)


@training.with_group
def trained(trainer, folder):
    """Of each algorithm a digest of the weights after training, and bytes sent per wrapped model.

    The digest leaves out the prefix of a wrapper.
    """
    found = {}
    for name, algorithm in ALGORITHMS.items():
        torch.manual_seed(0)
        model, handles = trainer(algorithm, folder)
        weights = [parameter.detach().numpy().tobytes() for parameter in model.parameters()]
        sent = [handle.stats()["total"]["bytes_sent"] for handle in handles]
        found[name] = hashlib.sha256(b"".join(weights)).hexdigest(), sent
    return found


def assert_as_own_with_fewer_bytes(first, second, name):
    """Of two ranks what `trained` returns."""
    assert first == second, name
    (own, none), (exact, (whole,)), (compressed, (less,)) = first.values()
    assert exact == own != compressed, name
    assert none == []
    assert 0 < less <= 0.26 * whole, name


def test_everywhere_reaches_the_wrapper_that_a_trainer_makes(ranks, tmp_path):
    for trainer in TRAINERS:
        results = ranks(2, trained, trainer, str(tmp_path / trainer.__name__))
        assert_as_own_with_fewer_bytes(*results, trainer.__name__)
