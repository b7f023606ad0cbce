"""Actors, critics, targets, and preferences."""

import copy

import torch
from ranks.situations.networks import _loop
from ranks.situations.rows import row
from ranks.situations.values import (
    batch,
    classes,
    everything,
    perceptron,
    sgd,
    weights,
)
from torch import nn
from torch.nn import functional


class ActorCritic(nn.Module):
    """A trunk with two heads."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.policy, self.value = nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(6, 1)

    def forward(self, states):
        hidden = torch.tanh(self.trunk(states))
        return self.policy(hidden), self.value(hidden).squeeze(-1)


def ppo(wrap, rank, size):
    """Rollouts without gradients, then epochs over them with the clipped objective."""
    module = ActorCritic()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    model = wrap(module, optimizer)
    for rollout in range(2):
        states = batch(rollout, rank, 8, 5)
        actions = classes(rollout, rank, 3, 8)
        rewards = batch(rollout + 30, rank, 8)
        with torch.no_grad():
            logits, values = model(states)
            old = functional.log_softmax(logits, 1).gather(1, actions[:, None]).squeeze(1)
        for part in (slice(0, 4), slice(4, 8), slice(0, 4)):
            logits, value = model(states[part])
            log = functional.log_softmax(logits, 1).gather(1, actions[part, None]).squeeze(1)
            ratio, advantage = (log - old[part]).exp(), rewards[part] - values[part]
            clipped = ratio.clamp(0.8, 1.2) * advantage
            policy = -torch.min(ratio * advantage, clipped).mean()
            optimizer.zero_grad()
            (policy + 0.5 * (value - rewards[part]).square().mean()).backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
    return everything(module)


def policy_gradient_in_eval_mode(wrap, rank, size):
    """RL code often stays in eval for dropout's sake."""
    module = ActorCritic()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    model.eval()
    for step in range(3):
        optimizer.zero_grad()
        logits, value = model(batch(step, rank))
        log = functional.log_softmax(logits, 1)[:, 0]
        (-(log * batch(step + 9, rank, 4)).mean() + value.square().mean()).backward()
        optimizer.step()
    return everything(module)


def actor_and_critic_with_targets(wrap, rank, size):
    """DDPG: the actor's loss goes through the critic, whose gradients are thrown away."""
    torch.manual_seed(0)
    actor, critic = nn.Linear(5, 2), nn.Linear(7, 1)
    slow = copy.deepcopy(critic).requires_grad_(False)
    ao, co = torch.optim.Adam(actor.parameters(), 0.01), torch.optim.Adam(critic.parameters(), 0.01)
    a, c = wrap(actor, ao), wrap(critic, co)
    for step in range(3):
        states = batch(step, rank)
        with torch.no_grad():
            target = slow(torch.cat([states, torch.tanh(a(states))], 1))
        co.zero_grad()
        actions = batch(step + 5, rank, 4, 2)
        (c(torch.cat([states, actions], 1)) - target - 1).square().mean().backward()
        co.step()
        ao.zero_grad()
        (-c(torch.cat([states, torch.tanh(a(states))], 1)).mean()).backward()
        ao.step()
        with torch.no_grad():
            for old, new in zip(slow.parameters(), critic.parameters(), strict=True):
                old.lerp_(new, 0.05)
    return weights(actor, "actor") | weights(critic, "critic") | weights(slow, "slow")


def dqn_with_a_target_copy(wrap, rank, size):
    """The target is loaded from the trained model every second step."""
    module = perceptron()
    target = copy.deepcopy(module)
    optimizer = torch.optim.RMSprop(module.parameters(), lr=0.01)
    model = wrap(module, optimizer)
    for step in range(4):
        with torch.no_grad():
            goal = target(batch(step + 10, rank)).max(1).values
        optimizer.zero_grad()
        functional.smooth_l1_loss(model(batch(step, rank))[:, 0], goal).backward()
        optimizer.step()
        if step % 2:
            target.load_state_dict(wrap.inner(model).state_dict())
    return weights(module) | weights(target, "target")


def reinforcement_from_preferences(wrap, rank, size):
    """DPO: two forwards of the model and two of a frozen reference, one loss."""
    module = perceptron()
    reference = copy.deepcopy(module).requires_grad_(False)

    def loss(model, step):
        better, worse = batch(step, rank), batch(step + 10, rank)
        with torch.no_grad():
            base = (reference(better) - reference(worse)).sum(1)
        return -functional.logsigmoid((model(better) - model(worse)).sum(1) - base).mean()

    return _loop(wrap, rank, module, sgd(module), loss)


SITUATIONS = [
    row(ppo),
    row(policy_gradient_in_eval_mode),
    row(actor_and_critic_with_targets),
    row(dqn_with_a_target_copy),
    row(reinforcement_from_preferences),
]
