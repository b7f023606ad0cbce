"""Jobs side by side, few files, forks, a network that goes away, a clock: equal bits, or a name."""

import math
import threading
import time

import pytest
from support.processes.networks import needs_namespaces, network
from support.processes.pool import run_on_network
from support.programs.cpp_programs import build_library

TRAINS = """
import datetime, hashlib, resource, sys, time
import torch
import bagua.torch_api as bagua
from bagua.torch_api.algorithms import ByteGradAlgorithm
{before}
bagua.init_process_group(timeout=datetime.timedelta(seconds={timeout}))
torch.manual_seed({seed})
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model = model.with_bagua([optimizer], ByteGradAlgorithm(hierarchical=False))
data = torch.utils.data.TensorDataset(torch.randn(400, 64), torch.randn(400, 8))
loader = torch.utils.data.DataLoader(data, batch_size=8, num_workers={workers})
try:
    for step, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs + bagua.get_rank()), targets).backward()
        optimizer.step()
        if step == 5:
            print("under way", flush=True)
        {in_step}
except bagua.BaguaError as error:
    print("told", type(error).__name__, error, flush=True)
    sys.exit(7)
weights = torch.cat([p.detach().flatten() for p in model.parameters()])
print(hashlib.blake2b(weights.numpy().tobytes()).hexdigest())
"""
PAUSE = "time.sleep(0.05)"


def source(seed=0, workers=0, timeout=30, before="", in_step="pass"):
    return TRAINS.format(
        seed=seed, workers=workers, timeout=timeout, before=before, in_step=in_step
    )


def bits(ends):
    """The digest that all ranks printed."""
    for end in ends:
        assert end.returncode == 0, end.stdout + end.stderr
    (digest,) = {end.stdout.split()[-1] for end in ends}
    return digest


def test_two_jobs_on_one_machine_do_not_see_each_other(run_script):
    alone = [bits(run_script(2, source(seed))) for seed in (1, 2)]
    beside = [None, None]

    def run(job):
        beside[job] = bits(run_script(2, source(job + 1)))

    jobs = [threading.Thread(target=run, args=(job,)) for job in range(2)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert beside == alone
    assert alone[0] != alone[1]


def test_data_loaders_may_fork_while_lanes_run(run_script):
    assert bits(run_script(2, source(workers=2))) == bits(run_script(2, source()))


def test_a_rank_needs_less_than_64_files(run_script):
    few = "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))"
    assert bits(run_script(3, source(before=few))) == bits(run_script(3, source()))


@pytest.mark.timeout(300)
def test_a_wall_clock_that_jumps_by_hours_hides_no_lost_rank(run_script):
    clock = build_library("clock.so", "tests/cpp/jumping_clock/jumping_clock.cpp", libraries=[])
    seen = "seen = [(time.sleep(0.05), time.time())[1] for _ in range(20)]"
    before = f"import os; {seen}; assert max(seen) - min(seen) > 3600.0"
    dies = "step == 20 and bagua.get_rank() == 1 and os._exit(3)"
    script = source(timeout=100, before=before, in_step=f"{dies}; {PAUSE}")
    first, _ = run_script(2, script, env={"LD_PRELOAD": clock}, timeout=250.0, anew=True)
    assert first.returncode == 7, first.stdout + first.stderr
    told = first.stdout.split("told BaguaError ", 1)[1]
    assert "rank 1" in told.splitlines()[0]


def train_over_a_link(timeout, seconds_without=None):
    """The ranks' ends; the link goes away once training is under way, for so long or for good."""

    def cut(output_of):
        deadline = time.monotonic() + 60.0
        while "under way\n" not in output_of(0):
            assert time.monotonic() < deadline, "training does not get under way"
            time.sleep(0.01)
        link.set_link(1, "down")
        if seconds_without != math.inf:
            time.sleep(seconds_without)
            link.set_link(1, "up")

    with network.Network(2) as link:
        script = source(timeout=timeout, in_step=PAUSE)
        return run_on_network(link, script, meanwhile=cut if seconds_without else None)


@needs_namespaces
def test_a_network_that_comes_back_within_the_timeout_costs_no_bit():
    assert bits(train_over_a_link(timeout=30, seconds_without=2.0)) == bits(train_over_a_link(30))


@needs_namespaces
def test_a_network_that_does_not_come_back_ends_both_sides_at_the_timeout():
    begun = time.monotonic()
    host, cut_off = train_over_a_link(timeout=4, seconds_without=math.inf)
    assert time.monotonic() - begun < 60.0
    assert (host.returncode, cut_off.returncode) == (7, 7), host.stderr + cut_off.stderr
    assert "rank 1 was killed, stopped or cut off" in host.stdout
    assert "The job's store does not answer" in cut_off.stdout
