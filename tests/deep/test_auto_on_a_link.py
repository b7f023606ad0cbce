"""AutoAlgorithm on a real link whose rate changes during the training."""

import json
import time

from support.processes.networks import needs_namespaces, network
from support.processes.pool import run_on_network

FAST, SLOW = 200, 10  # Mbit/s
MOST_STEPS = 3000
# An exact step sends 1 MB: 40 ms on the fast link and 800 ms on the slow one. What it takes on the
# fast one beside other work is not known, so the slow link is told by its own time.
ON_THE_SLOW_LINK = 0.5  # seconds

SCRIPT = f"""
import hashlib, json
import bagua.torch_api as bagua
import torch
from bagua.torch_api.algorithms import Algorithm, auto

auto._WINDOW_SECONDS = 0.1
bagua.init_process_group()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model = model.with_bagua([optimizer], Algorithm.init("auto"))
torch.manual_seed(bagua.get_rank())
chosen_at = None
for step in range({MOST_STEPS}):
    optimizer.zero_grad()
    model(torch.randn(4, 256)).square().mean().backward()
    optimizer.step()
    choice = model.bagua_stats()["choice"]
    if choice["turns"] == 1 and chosen_at is None:
        chosen_at, first = step, choice
        print("go on more slowly", flush=True)
    if choice["turns"] >= 2 and choice["table"][0]["seconds"] > {ON_THE_SLOW_LINK}:
        break
digest = hashlib.blake2b(digest_size=8)
for parameter in model.parameters():
    digest.update(parameter.detach().numpy().tobytes())
print(json.dumps([first, choice, step, digest.hexdigest()]))
"""


@needs_namespaces
def test_candidates_are_tried_again_where_a_link_gets_slow():
    def slow_down(output_of):
        deadline = time.monotonic() + 60
        while not all("go on more slowly" in output_of(rank) for rank in range(2)):
            assert time.monotonic() < deadline, output_of(0)
            time.sleep(0.05)
        for rank in range(2):
            link.shape(rank, SLOW)

    with network.Network(2, rate_mbit=FAST) as link:
        ends = run_on_network(link, SCRIPT, timeout=150, meanwhile=slow_down)
    assert [end.returncode for end in ends] == [0, 0], [end.stderr for end in ends]
    lines = [end.stdout.splitlines() for end in ends]
    assert lines[0] == lines[1]
    first, last, step, _ = json.loads(lines[0][-1])
    assert step < MOST_STEPS - 1
    for choice in (first, last):
        assert choice["chosen"].startswith("bytegrad")
