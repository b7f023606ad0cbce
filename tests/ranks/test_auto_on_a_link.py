"""AutoAlgorithm on a real link whose rate changes during the training."""

import json
import time

import pytest
from support.processes.pool import run_on_network
from support.programs.benchmark_programs import load

network = load("network")

FAST, SLOW = 200, 20  # Mbit/s
MOST_STEPS = 3000

# Windows of a twentieth of their length, or the test would take a minute.
SCRIPT = f"""
import hashlib, json, time
import bagua.torch_api as bagua
import torch
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.algorithms.auto import watching

watching._SECONDS = 0.1
bagua.init_process_group()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model = model.with_bagua([optimizer], Algorithm.init("auto"))
torch.manual_seed(bagua.get_rank())
chosen_at, begun = None, time.monotonic()
for step in range({MOST_STEPS}):
    optimizer.zero_grad()
    model(torch.randn(4, 256)).square().mean().backward()
    optimizer.step()
    choice = model.bagua_stats()["choice"]
    if choice["state"] != "chosen":
        continue
    if chosen_at is None:
        chosen_at, first, seconds = step, choice, time.monotonic() - begun
    if step == chosen_at + 150:  # windows for the reference have passed
        print("go on more slowly", flush=True)
    if choice["profile"]["between"]["bandwidth"] < 0.4 * first["profile"]["between"]["bandwidth"]:
        break
digest = hashlib.blake2b(digest_size=8)
for parameter in model.parameters():
    digest.update(parameter.detach().numpy().tobytes())
print(json.dumps([first, choice, step, digest.hexdigest()]))
print(json.dumps([chosen_at, seconds]))
"""


@pytest.mark.skipif(
    network.why_unavailable() is not None,
    reason=f"no network namespaces: {network.why_unavailable()}",
)
def test_a_link_that_gets_slow_is_measured_and_planned_for_again():
    def slow_down(output_of):
        deadline = time.monotonic() + 60
        while not all("go on more slowly" in output_of(rank) for rank in range(2)):
            assert time.monotonic() < deadline, output_of(0)
            time.sleep(0.05)
        for rank in range(2):
            link.shape(rank, SLOW)

    with network.Network(2, rate_mbit=FAST) as link:
        ends = run_on_network(link, SCRIPT, timeout=100, meanwhile=slow_down)
    assert [end.returncode for end in ends] == [0, 0], [end.stderr for end in ends]
    lines = [end.stdout.splitlines() for end in ends]
    assert lines[0][:-1] == lines[1][:-1]
    first, last, step, _ = json.loads(lines[0][-2])
    for chosen_at, seconds in (json.loads(line[-1]) for line in lines):
        assert chosen_at < 20 or seconds < 5  # the first step is 0
    assert step < MOST_STEPS - 1
    for choice, rate in (first, FAST), (last, SLOW):
        assert choice["profile"]["between"]["messages"] == pytest.approx(rate * 1e6 / 8, rel=0.35)
    assert last["replans"] >= 1
    assert last["chosen"].startswith("bytegrad")
