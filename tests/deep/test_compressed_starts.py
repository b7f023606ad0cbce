"""PowerSGD and top-k with many buckets start, train and end on a slow link, every time."""

import os

import pytest
from support.processes.networks import needs_namespaces, network
from support.processes.pool import run_on_network

#: `make soak` asks for 50.
STARTS = int(os.environ.get("BAGUA_TEST_STARTS", "4"))
MBIT = 200
STEPS = 4

# A bucket per layer, and no look-ups of names that a name server would answer.
ENVIRONMENT = {"BAGUA_DEFAULT_BUCKET_SIZE": "70000", "RES_OPTIONS": "timeout:1 attempts:1"}

SCRIPT = f"""
import hashlib, os
import bagua.torch_api as bagua
import torch
from bagua.torch_api.algorithms import Algorithm
from torch import nn

bagua.init_process_group()
torch.manual_seed(0)
layers = [layer for _ in range(12) for layer in (nn.Linear(128, 128), nn.ReLU())]
model = nn.Sequential(*layers, nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model = model.with_bagua([optimizer], Algorithm.init(os.environ["ALGORITHM"]))
torch.manual_seed(int(os.environ["RANK"]))
for step in range({STEPS}):
    optimizer.zero_grad()
    model(torch.randn(8, 128)).square().mean().backward()
    optimizer.step()
digest = hashlib.blake2b(digest_size=8)
for parameter in model.parameters():
    digest.update(parameter.detach().numpy().tobytes())
stats = model.bagua_stats()
print("weights", digest.hexdigest(), "buckets", len(stats["buckets"]), "rounds", stats["rounds"])
"""


@needs_namespaces
@pytest.mark.timeout(20 * STARTS)
def test_every_start_on_a_slow_link_trains_and_ends():
    printed = {"power_sgd": [], "sparse": []}
    with network.Network(2, rate_mbit=MBIT) as link:
        for i in range(STARTS):
            algorithm = list(printed)[i % 2]
            env = ENVIRONMENT | {"ALGORITHM": algorithm}
            ends = run_on_network(link, SCRIPT, env=env, timeout=90)
            assert [end.returncode for end in ends] == [0, 0], [end.stderr for end in ends]
            printed[algorithm] += [end.stdout for end in ends]
    assert sum(map(len, printed.values())) == 2 * STARTS
    for algorithm, lines in printed.items():
        assert len(set(lines)) == 1, (algorithm, lines)
        words = lines[0].split()
        assert words[0::2] == ["weights", "buckets", "rounds"]
        assert int(words[3]) >= 10
        assert int(words[5]) == STEPS
    assert printed["power_sgd"][0] != printed["sparse"][0]
