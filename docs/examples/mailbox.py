"""Islands that meet in a mailbox: start it on each machine, with one URL and another name.

    python docs/examples/mailbox.py --url /mnt/shared/run --island oslo

Kill any of them and start it again: it goes on with the others.
"""

import argparse

import bagua.torch_api as bagua
import torch
from bagua.torch_api.algorithms import DiLoCoAlgorithm, Mailbox
from torch import nn
from torch.nn import functional


def batch(generator):
    """Inputs, and targets that a network can learn."""
    inputs = torch.randn(32, 8, generator=generator)
    return inputs, inputs.sin().sum(1, keepdim=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--island", required=True)
    parser.add_argument("--quorum", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--secret", help="of all islands, 16 letters or more")
    arguments = parser.parse_args()

    bagua.init_process_group()
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    mailbox = Mailbox(
        arguments.url,
        island=arguments.island,
        quorum=arguments.quorum,
        grace=60.0,
        secret=arguments.secret,
    )
    algorithm = DiLoCoAlgorithm(interval=20, codec="int4_block", elastic=mailbox)
    model = bagua.wrap(model, [optimizer], algorithm)
    generator = torch.Generator().manual_seed(sum(arguments.island.encode()))
    while model.bagua_algorithm.outer_rounds < arguments.rounds:
        inputs, targets = batch(generator)
        optimizer.zero_grad()
        loss = functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
    with model.bagua_algorithm.anchor():
        total = sum(p.detach().double().sum().item() for p in model.parameters())
    outer = model.bagua_stats()["outer"]
    print(f"rounds={outer['rounds']} loss={loss.item():.4f} anchor={total.hex()}", flush=True)
    bagua.destroy_process_group()


if __name__ == "__main__":
    main()
