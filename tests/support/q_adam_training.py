"""Helpers for tests of QAdam: a model, its optimizer, and every step beside the oracle."""

import copy
import io

import torch
import torch.distributed as dist
from bagua.torch_api.algorithms.q_adam import QAdamAlgorithm, QAdamOptimizer
from oracle import q_adam as oracle
from support import training
from support.error_feedback import Means

WARM_UP = 3
STEPS = 8
EIGHT_BITS = Means("block_uint8", error_feedback=False)
# Of weights. Moves are up to 0.064 long, and in bfloat16 each rounding of one takes up to 1.3e-4.
TOLERANCE = {
    torch.float16: {"rtol": 1e-3, "atol": 2e-4},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 2e-4},
}


def groups(model):
    """Two groups that differ in everything but the warm-up."""
    first, *rest = model.parameters()
    return [
        {"params": [first], "betas": (0.8, 0.99), "weight_decay": 0.1, "lr": 0.02},
        {"params": rest, "eps": 1e-6},
    ]


def optimizer_of(model, warmup_steps=WARM_UP):
    return QAdamOptimizer(groups(model), lr=0.01, warmup_steps=warmup_steps)


def wrapped(seed=0, warmup_steps=WARM_UP, hierarchical=False, dtype=torch.float32, **arguments):
    """A model and its optimizer; `arguments` are with_bagua's and those of the compression."""
    model = training.network(seed).to(dtype)
    optimizer = optimizer_of(model, warmup_steps)
    names = arguments.keys() & {"codec", "error_feedback"}
    chosen = QAdamAlgorithm(
        optimizer, hierarchical, **{name: arguments.pop(name) for name in names}
    )
    model.with_bagua([optimizer], chosen, **arguments)
    return model, optimizer


def saved(model, optimizer):
    """The states of model, optimizer and algorithm, as a file would have them."""
    file = io.BytesIO()
    torch.save([part.state_dict() for part in (model, optimizer, model.bagua_algorithm)], file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def load(model, optimizer, states):
    for part, state in zip((model, optimizer, model.bagua_algorithm), states, strict=True):
        part.load_state_dict(copy.deepcopy(state))


def data_of(model, step, rank):
    return tuple(side.to(next(model.parameters()).dtype) for side in training.batch(step, rank))


def local_gradients(model, step):
    """By rank, what each computes in this step."""
    return [
        training.local_gradients(model, training.squared_error, data_of(model, step, rank))
        for rank in range(dist.get_world_size())
    ]


def train_step(model, optimizer, step, set_to_none=True):
    data = data_of(model, step, dist.get_rank())
    training.train(model, optimizer, [data], set_to_none=set_to_none)


def moment_bits(model, optimizer):
    """A digest of weights and optimizer state."""
    moments = [optimizer.state[p][key] for p in model.parameters() for key in optimizer.state[p]]
    return training.bits([*model.parameters(), *moments])


def all_bits(model, optimizer):
    """A digest of weights, gradients and optimizer state."""
    return training.model_bits(model) + moment_bits(model, optimizer)


def assert_ranks_agree(model, optimizer):
    digests = training.gather(all_bits(model, optimizer))
    assert len(set(digests)) == 1, f"ranks differ: {digests}"


def compressing(model):
    """Whether the buckets at work make momenta: every op that ran says so."""
    ops = [bucket["ops"] for bucket in model.bagua_stats()["buckets"]]
    found = {names[0].startswith("UpdateMomentum") for names in ops}
    assert len(found) == 1
    return found.pop()


class Before:
    """Weights and moments before a step, and what the oracle makes of them."""

    def __init__(self, model, optimizer, gradients, scale=1.0):
        self.optimizer = optimizer
        self.group = {p: group for group in optimizer.param_groups for p in group["params"]}
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.memory, self.second = (
            {name: optimizer.state_of(p)[key].clone() for name, p in model.named_parameters()}
            for key in ("exp_avg", "exp_avg_sq")
        )
        self.beta1 = {name: self.group[p]["betas"][0] for name, p in model.named_parameters()}
        self.local = [
            {
                name: oracle.local_momentum(
                    self.memory[name] * scale, gradient * scale, self.beta1[name]
                )
                for name, gradient in of_rank.items()
            }
            for of_rank in gradients
        ]

    def averaged(self, model, means=EIGHT_BITS):
        """The bits that every rank's gradients must have after backward."""
        found = {}
        for bucket in model.bagua_buckets:
            found |= means.of(bucket, self.local)
        return found

    def assert_compressed_step(self, model, means=EIGHT_BITS):
        """The momentum to the bit, the weight up to rounding, the second moment as it was."""
        self.assert_step(model, self.averaged(model, means), rtol=0, atol=0)

    def assert_step(self, model, averaged, **tolerance):
        for name, p in model.named_parameters():
            group, state = self.group[p], self.optimizer.state[p]
            torch.testing.assert_close(p.grad, averaged[name], **tolerance)
            decay = group["weight_decay"]
            expected = oracle.decayed(p.grad, self.weights[name], self.beta1[name], decay)
            torch.testing.assert_close(state["exp_avg"], expected)
            assert torch.equal(state["exp_avg_sq"], self.second[name])
            weight = oracle.moved(
                self.weights[name],
                state["exp_avg"],
                self.second[name],
                state["step"].item(),
                *(group[key] for key in ("warmup_steps", "lr", "betas", "eps")),
            )
            torch.testing.assert_close(p.detach(), weight.to(p.dtype), **TOLERANCE.get(p.dtype, {}))


def backward_of(model, step, scaler=None):
    """Forward and backward on this rank's data; nothing is zeroed."""
    loss = training.squared_error(model, data_of(model, step, dist.get_rank()))
    (loss if scaler is None else scaler.scale(loss)).backward()
