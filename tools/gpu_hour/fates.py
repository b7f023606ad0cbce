"""Ends of a rank over NCCL when the other one is lost: fates.py [CASE...]

A case passes if the rank that is left says in time what has happened, and its process ends.
"""

import concurrent.futures
import datetime
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
import two_hosts

TIMEOUT = 8
STEPS, FAULT_IN = 20, 8
#: Seconds until both ranks have started, and those of a whole case: the start, the fault's own end,
#: and that of the process.
START = 40
LIMIT = START + 3 * TIMEOUT
FAULT = "the fault comes now"
#: Cases side by side: they share the GPU, and mostly wait.
AT_ONCE = 3
LANES = {"BAGUA_LANES": "2", "CUDA_MODULE_LOADING": "EAGER"}
#: Name -> what rank 1 does in a step, and variables of both ranks.
CASES = {
    "healthy": (lambda train: None, {}),
    "killed": (lambda train: os.kill(os.getpid(), signal.SIGKILL), {}),
    "stopped": (lambda train: os.kill(os.getpid(), signal.SIGSTOP), {}),
    "late": (lambda train: time.sleep(2.5 * TIMEOUT), {}),
    "an exception": (lambda train: int("a mistake of the user's"), {}),
    "an assertion on the device": (lambda train: fail_on_device(), {}),
    "a captured step": (lambda train: capture(train), {}),
    "killed, two lanes": (lambda train: os.kill(os.getpid(), signal.SIGKILL), LANES),
    "killed beside torch's NCCL": (lambda train: os.kill(os.getpid(), signal.SIGKILL), {}),
}
#: Cases whose fault a CPU has too.
ON_CPU = ("healthy", "killed")


def fail_on_device():
    torch.ones(4, device="cuda")[torch.tensor([9], device="cuda")].sum()


def capture(train):
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        train()


def run_rank(case):
    import bagua.torch_api as bagua
    from bagua.torch_api.algorithms import ByteGradAlgorithm

    device = "cpu" if two_hosts.DRY else "cuda:0"
    if not two_hosts.DRY:
        torch.cuda.set_device(0)
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    start = datetime.timedelta(seconds=START)
    # The ranks may start further apart than the timeout that a fault is to end by.
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, timeout=start)
    timeout = datetime.timedelta(seconds=TIMEOUT)
    bagua.init_process_group(store, rank, 2, 1, timeout=timeout)
    beside = None
    if "torch's" in case:
        beside = dist.new_group(backend="nccl")
    torch.manual_seed(0)
    layers = [torch.nn.Linear(512, 512) for _ in range(6)]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model = model.with_bagua([optimizer], ByteGradAlgorithm(hierarchical=False))
    x = torch.randn(64, 512, device=device)

    def train():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if beside is not None:
            dist.all_reduce(torch.ones(1 << 20, device=device), group=beside)
        optimizer.step()

    fault, _ = CASES[case]
    for step in range(STEPS):
        if step == FAULT_IN and rank == 1:
            print(FAULT, flush=True)
            fault(train)
        train()
    if not two_hosts.DRY:
        torch.cuda.synchronize()
    assert all(p.isfinite().all() for p in model.parameters())
    bagua.destroy_process_group()
    print("all steps", flush=True)


def judge(case):
    """A row: whether it went as it should, and how both ranks have ended."""
    _, variables = CASES[case]
    stands = 1 if case == "stopped" else None
    survivor, lost = two_hosts.run([__file__, "--rank", case], LIMIT, variables, stands)
    if case == "healthy":
        good = survivor.status == lost.status == 0
    else:
        good = survivor.status not in (None, 0) and "Bagua" in survivor.said
        good &= "rank 1" in survivor.said or "another rank" in survivor.said
        good &= FAULT in lost.said
    if case == "a captured step":
        good &= "is being captured" in lost.said
    ends = [(rank.status, rank.seconds) for rank in (survivor, lost)]
    print(f"{'ok    ' if good else 'FAILED'} {case}: {ends}", flush=True)
    if not good:
        print(f"---- rank 0\n{survivor.said[-3000:]}\n---- rank 1\n{lost.said[-3000:]}", flush=True)
    return case, {"good": good, "ends": ends, "said": survivor.said[-600:]}


def main():
    cases = sys.argv[1:] or (ON_CPU if two_hosts.DRY else CASES)
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        rows = dict(pool.map(judge, cases))
    two_hosts.keep("fates", rows)
    failed = [case for case, row in rows.items() if not row["good"]]
    print(f"{len(rows) - len(failed)} of {len(rows)} passed; failed: {failed or 'none'}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        run_rank(sys.argv[2])
    else:
        main()
