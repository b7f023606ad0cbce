"""Ranks that no launcher has numbered: torch's group tells which is which."""

import json

#: Forks ranks as notebooks do. `torch.multiprocessing.spawn` is in tests/deep/test_launchers.py.
START = """
import json, os, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import bagua.torch_api as bagua
from bagua.torch_api.algorithms import GradientAllReduceAlgorithm

def say(*words):
    os.write(1, (json.dumps(words) + "\\n").encode())  # in one piece: ranks write to one pipe

def step(model):
    model(torch.ones(2, 8)).sum().backward()

{work}

for name in [name for name in os.environ if "RANK" in name or "WORLD" in name or "MASTER" in name]:
    del os.environ[name]
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

def start(rank):
    here = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    dist.init_process_group("gloo", store=here, rank=rank, world_size=2)
    work(rank)

ranks = mp.start_processes(start, nprocs=2, start_method="fork", join=False)
for process in ranks.processes:
    process.join()
say("codes", [process.exitcode for process in ranks.processes])
say("published", sorted(json.loads(store.get(key))["rank"] for key in
                        ("bagua/top/0", "bagua/top/1") if store.check([key])))
"""

NUMBERS = """
def numbers():
    return [bagua.get_rank(), bagua.get_world_size(), bagua.get_local_rank(),
            bagua.get_local_size(), bagua.env.get_node_rank()]

def work(rank):
    from bagua._watch.prometheus import _Collector
    from bagua._watch.per_round import source_of

    before = numbers()
    bagua.init_process_group()
    os.environ.update(RANK="7", LOCAL_RANK="7")  # of a parent process: they are not this job's
    model = bagua.wrap(torch.nn.Linear(8, 8), [], GradientAllReduceAlgorithm())
    step(model)
    labels = _Collector(source_of(model), "Linear")._labels
    say(rank, before, numbers(), labels["rank"])
    dist.barrier()
    bagua.destroy_process_group()
"""

ENDS = """
def work(rank):
    model = bagua.wrap(torch.nn.Linear(8, 8), [], GradientAllReduceAlgorithm())
    step(model)
    step(model)
    if rank == 1:
        {end}
    try:
        step(model)
    except bagua.BaguaError as error:
        say("error", str(error).splitlines()[0])
"""


def lines_of(run_script, work, **env):
    (end,) = run_script(1, START.format(work=work), env=env)
    assert end.returncode == 0, end.stderr
    return [json.loads(line) for line in end.stdout.splitlines()], end.stderr


def test_ranks_statistics_and_publications_have_the_numbers_of_torchs_group(run_script):
    lines, _ = lines_of(run_script, NUMBERS, BAGUA_TOP="0.05")
    assert sorted(lines[:2]) == [
        [rank, [rank, 2, rank, 2, 0], [rank, 2, rank, 2, 0], str(rank)] for rank in range(2)
    ]
    assert lines[2:] == [["codes", [0, 0]], ["published", [0, 1]]]


def test_forked_ranks_that_end_are_told_of_as_exited(run_script):
    for end, code in (("return", 0), ("sys.exit()", 0), ("raise ValueError('spoilt')", 1)):
        lines, said = lines_of(run_script, ENDS.format(end=end))
        assert ["error", "rank 1 exited after 2 rounds"] in lines, (end, lines, said)
        assert ["codes", [0, code]] in lines, (end, lines, said)
