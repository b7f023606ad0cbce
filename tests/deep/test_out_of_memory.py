"""A rank that runs out of memory in a lane: all ranks raise, and none hangs."""

RUNS_OUT = """
import datetime, resource, sys, time
import torch
import bagua.torch_api as bagua
from bagua.torch_api.algorithms import ByteGradAlgorithm

bagua.init_process_group(timeout=datetime.timedelta(seconds=20))


def leave_little(bucket=None):
    if bagua.get_rank() == 1:
        time.sleep(0.5)  # until backward has freed what it needs no more
        pages = int(open("/proc/self/statm").read().split()[0])
        limit = pages * resource.getpagesize() + 8 * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


class LittleForTheLane(ByteGradAlgorithm):
    def reify(self, process_group):
        implementation = super().reify(process_group)
        append = implementation.init_operations

        def init_operations(ddp, bucket):
            append(ddp, bucket)
            bucket.append_python_op(leave_little)
            bucket.ops.insert(0, bucket.ops.pop())

        implementation.init_operations = init_operations
        return implementation


model = torch.nn.Linear(4000, 4000)  # 64 MB of gradients, 16 MB of messages
model = model.with_bagua([], LittleForTheLane(hierarchical=False))
loss = model(torch.ones(1, 4000)).sum()
start = time.monotonic()
try:
    loss.backward()
except bagua.BaguaError as error:
    print(round(time.monotonic() - start, 1), type(error).__name__, error)
    sys.exit(7)
"""
TORCH_SAYS = "can't allocate memory"
# Or the C library gives the lane what it has kept or reserved before the limit.
NOTHING_IS_KEPT = {"MALLOC_MMAP_THRESHOLD_": "1000000", "MALLOC_ARENA_MAX": "1"}


def test_a_lane_without_memory_is_an_error_on_every_rank_that_says_which(run_script):
    ends = run_script(2, RUNS_OUT, env=NOTHING_IS_KEPT, timeout=60.0, anew=True)
    for rank, end in enumerate(ends):
        assert end.returncode == 7, f"rank {rank}: {end.stdout}{end.stderr}"
        seconds, kind, text = end.stdout.split(" ", 2)
        assert kind == "BaguaError"
        assert float(seconds) < 10.0
        assert "rank 1 of 2, round 1, bucket '0' (64016000 bytes), CompressedAllReduce" in text
        assert TORCH_SAYS in text
