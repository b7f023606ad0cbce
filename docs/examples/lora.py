"""LoRA adapters of a transformer between ranks: only the adapters travel, in few bits.

    torchrun --nproc_per_node=2 docs/examples/lora.py --algorithm diloco --folder checkpoints

The model is tiny and random, its text is this file (no download). Needs transformers and peft.
With --folder, on a file system that all ranks see, a run goes on where the last one ended: the
checkpoints have adapters, optimizer and what the algorithm remembers, not the base model.
"""

import argparse
import json
from pathlib import Path

import bagua.torch_api as bagua
import torch
from bagua.torch_api.algorithms import ByteGradAlgorithm, DiLoCoAlgorithm
from bagua.torch_api.checkpoint import load_latest, save_checkpoint

try:
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError as missing:
    raise SystemExit(f"{missing}. This example needs: pip install transformers peft") from None

ALGORITHMS = {
    "exact": "gradient_allreduce",
    "bytegrad": ByteGradAlgorithm(),
    "int4": ByteGradAlgorithm(codec="int4_block", error_feedback=True),
    "diloco": DiLoCoAlgorithm(interval=10, codec="int4_block"),
}
SIZE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
LENGTH = 32  # bytes of a sequence


class Adapters:
    """The adapters of a model, as an element of a checkpoint."""

    def __init__(self, model):
        self.model = model

    def state_dict(self):
        return peft.get_peft_model_state_dict(self.model)

    def load_state_dict(self, state):
        peft.set_peft_model_state_dict(self.model, state)


def adapted():
    """The base model, frozen, with adapters. All ranks have the same one."""
    torch.manual_seed(0)
    # Random layers that are frozen must pass on more than the default of 0.02 lets them.
    base = LlamaForCausalLM(LlamaConfig(vocab_size=256, initializer_range=0.1, **SIZE, **HEADS))
    settings = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(base, settings)


def batch(text, step):
    """This rank's sequences in that step."""
    generator = torch.Generator().manual_seed(1000 * step + bagua.get_rank())
    starts = torch.randint(len(text) - LENGTH, (8,), generator=generator)
    rows = torch.stack([text[start : start + LENGTH] for start in starts])
    return {"input_ids": rows, "labels": rows}


def train(algorithm, steps, folder):
    """Returns what the run achieved."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    model = adapted()
    # Frozen parameters have no state to keep.
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    model = bagua.wrap(model, [optimizer], ALGORITHMS[algorithm])

    state = {"adapters": Adapters(model), "optimizer": optimizer, "own": model.bagua_algorithm}
    first = (folder and load_latest(folder, state)) or 0
    losses = []
    for step in range(first, steps):
        optimizer.zero_grad()
        loss = model(**batch(text, step)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if folder is not None:
        save_checkpoint(folder, state, steps)
    sent = model.bagua_ddp.stats()["total"]["bytes_sent"]
    if algorithm == "diloco":
        model.bagua_algorithm.sync()  # every rank has the same adapters
    if folder is not None and bagua.get_rank() == 0:
        model.save_pretrained(Path(folder) / "adapter")  # for peft.PeftModel.from_pretrained
    return {
        "rank": bagua.get_rank(),
        "first_loss": losses[0],
        "loss": losses[-1],
        "adapters": sum(parameter.numel() for parameter in trained),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "bytes_sent_per_step": sent / (steps - first),
        "weights": float(torch.cat([p.detach().flatten() for p in trained]).double().norm()),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithm", default="bytegrad", choices=ALGORITHMS)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", help="of the checkpoints; seen by all ranks")
    options = parser.parse_args()
    bagua.init_process_group()
    print(json.dumps(train(options.algorithm, options.steps, options.folder)), flush=True)
    bagua.destroy_process_group()
