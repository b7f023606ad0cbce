"""Trains on handwritten digits, of which each rank sees only some.

    torchrun --nproc_per_node=2 docs/examples/digits.py --algorithm bytegrad

The images are scikit-learn's own (8x8 grey values, no download). Rank r trains on the digits d with
d % world_size == r and is tested on all ten: alone it cannot learn the others.
"""

import argparse
import json
import statistics
import sys
import time

import bagua.torch_api as bagua
import torch
from bagua.torch_api.algorithms import Algorithm, ByteGradAlgorithm
from bagua.torch_api.algorithms.q_adam import QAdamOptimizer
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LinearLR

BATCH = 32
EVALUATE_EVERY = 12  # steps
WARM_UP = {"qadam": 40, "power_sgd": 100, "async": 120}  # steps with exact gradients


def split_digits(rank, world_size):
    """(images, labels) that this rank trains on, and (images, labels) held out from all ranks."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # [1797, 1, 8, 8]
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out, train = order[:400], order[400:]
    # Equal shares, so that every rank takes the same number of steps.
    shares = [train[labels[train] % world_size == r] for r in range(world_size)]
    own = shares[rank][: min(len(share) for share in shares)]
    return images[own], labels[own], images[held_out], labels[held_out]


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def choose(name, parameters):
    """The optimizer and the algorithm of that name, with what suits this little task."""
    if name == "qadam":
        optimizer = QAdamOptimizer(parameters, lr=0.002, warmup_steps=WARM_UP[name])
        return optimizer, Algorithm.init(name, q_adam_optimizer=optimizer)
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    if name == "async":  # a step takes milliseconds here, so averages follow each other
        return optimizer, Algorithm.init(name, sync_interval_ms=0, warmup_steps=WARM_UP[name])
    if name == "bytegrad-int4":
        return optimizer, ByteGradAlgorithm(codec="int4_block", error_feedback=True)
    if name == "diloco":  # ranks that see different digits must meet often
        return optimizer, Algorithm.init(name, interval=5)
    return optimizer, Algorithm.init(name)


def evaluate(model, images, labels):
    """(loss, accuracy)."""
    with torch.no_grad():
        scores = model(images)
        return cross_entropy(scores, labels).item(), (scores.argmax(1) == labels).float().mean()


def train(algorithm, epochs, seed, show_progress=False):
    """Trains with the algorithm of that name, or with "none"; returns what the run achieved."""
    rank, world_size = bagua.get_rank(), bagua.get_world_size()
    images, labels, test_images, test_labels = split_digits(rank, world_size)
    torch.manual_seed(seed)
    model = make_model()
    if algorithm == "none":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    else:
        optimizer, chosen = choose(algorithm, model.parameters())
        model = bagua.wrap(model, [optimizer], chosen)

    shuffle = torch.Generator().manual_seed(1000 * seed + rank)
    steps_per_epoch = len(labels) // BATCH
    total_steps = epochs * steps_per_epoch
    # Ranks that see different digits pull different ways: small steps in the end settle it.
    schedule = LinearLR(optimizer, 1.0, 0.05, total_iters=total_steps)
    seconds, test_losses, bytes_sent = [], [], 0
    for step in range(total_steps):
        if step % steps_per_epoch == 0:
            order = torch.randperm(len(labels), generator=shuffle)
        batch = order[step % steps_per_epoch * BATCH :][:BATCH]

        start = time.perf_counter()
        optimizer.zero_grad()
        loss = cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        schedule.step()
        seconds.append(time.perf_counter() - start)

        if step % EVALUATE_EVERY == EVALUATE_EVERY - 1:  # this rank's own weights
            test_losses.append(evaluate(model, test_images, test_labels)[0])
            if show_progress and rank == 0:
                draw_progress(f"{algorithm}, seed {seed}", step + 1, total_steps, test_losses[-1])

    accuracy = {"own": evaluate(model, test_images, test_labels)[1]}
    counted_steps, choice = total_steps - WARM_UP.get(algorithm, 0), None
    if algorithm != "none":
        if algorithm == "async":
            model.bagua_algorithm.abort(model)
        if algorithm == "diloco":
            model.bagua_algorithm.sync()  # the steps since the last round count, too
        averaged = bagua.average_weights(model)  # where ranks differ, the model to export
        accuracy["own"] = evaluate(model, test_images, test_labels)[1]
        accuracy["mean"] = evaluate(averaged, test_images, test_labels)[1]
        stats = model.bagua_stats()
        bytes_sent = stats["total"]["bytes_sent"]
        if algorithm == "auto":  # what is counted begins with the choice
            choice, counted_steps = stats["choice"], stats["rounds"]
    worst = accuracy["own"].clone()
    bagua.allreduce_inplace(worst, op=bagua.ReduceOp.MIN)
    return {
        "algorithm": algorithm,
        "seed": seed,
        "accuracy": accuracy.get("mean", accuracy["own"]).item(),  # of the mean of all weights
        "worst_rank": worst.item(),  # with its own weights
        "seconds_per_step": statistics.median(seconds),
        # By this rank, after the warm-up; what is counted begins anew with it.
        "bytes_sent_per_step": bytes_sent / counted_steps,
        "choice": choice,  # of auto
        "compressed_steps": getattr(optimizer, "compressed_steps", 0) / total_steps,
        "test_losses": test_losses,  # one per EVALUATE_EVERY steps, of rank 0's weights
    }


def draw_progress(title, done, total, loss):
    if done * 30 // total != (done - EVALUATE_EVERY) * 30 // total:
        bar = ("#" * (done * 30 // total)).ljust(30, ".")
        line = f"\r{title:28} {bar} {done}/{total} loss {loss:.3f}  "
        print(line, end="\n" if done == total else "", file=sys.stderr, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithm", default="bytegrad", help="a name of choose(), or none")
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    bagua.init_process_group()
    result = train(arguments.algorithm, arguments.epochs, arguments.seed, show_progress=True)
    if bagua.get_rank() == 0:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
