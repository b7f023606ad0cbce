"""Ranks that skip, stop, leave or die: the others say which, soon, and can end cleanly."""

import datetime
import signal

import bagua.torch_api as bagua
import pytest
import torch.distributed as dist
from bagua.torch_api.algorithms import GradientAllReduceAlgorithm
from support import faults

SHORT = 4.0  # seconds of timeout where a test waits for it
# Other ranks' news are asked for every half second; the rest is for a busy machine.
SECONDS_UNTIL_TOLD = 4.0


@faults.with_bagua_group
def skip_a_step():
    group = dist.new_group(timeout=datetime.timedelta(seconds=SHORT))
    model, optimizer = faults.wrapped(process_group=group)
    faults.step(model, optimizer)
    result = None if faults.is_last() else faults.steps_until_error(model, optimizer)
    faults.barrier_of_store("over")
    return result


def test_a_rank_that_skips_a_step_ends_the_wait_of_the_others_at_the_groups_timeout(ranks):
    *others, _ = ranks(2, skip_a_step)
    for error, seconds in others:
        verdict, here = error.split("\n")
        assert verdict == (
            "BaguaTimeoutError: rank 1 is 1 round behind, in round 1: between two rounds"
        )
        # The step and the message inside it have the same 4 s: either may be over first.
        where, seen = here.split(", round 2: ")
        assert where == "  Seen here: module 'Sequential', rank 0 of 2"
        assert seen.startswith("no result within 4000 ms") or (
            "with peer 1 failed: Timed out waiting 4000ms" in seen
        )
        assert seconds < SHORT + SECONDS_UNTIL_TOLD


@faults.with_bagua_group
def leave_early(how):
    model, optimizer = faults.wrapped()
    if not faults.is_last():
        return faults.steps_until_error(model, optimizer)
    for _ in range(3):
        faults.step(model, optimizer)
    if how == "close":
        model.bagua_ddp.close()
    elif how == "after-forward":
        faults.loss_of(model)
        bagua.destroy_process_group()
    else:
        bagua.destroy_process_group()
    return None


@pytest.mark.parametrize("how", ["destroy", "close", "after-forward"])
def test_a_rank_with_fewer_steps_is_named_soon(ranks, how):
    *others, _ = ranks(3, leave_early, how)
    for error, seconds in others:
        assert error.startswith("BaguaError")
        assert "rank 2 exited after 3 rounds" in error
        assert seconds < SECONDS_UNTIL_TOLD


@faults.with_bagua_group
def fail_in_an_op():
    model, optimizer = faults.wrapped(algorithm=Failing())
    return faults.steps_until_error(model, optimizer)


class Failing(GradientAllReduceAlgorithm):
    def reify(self, process_group):
        implementation = super().reify(process_group)
        append = implementation.init_operations

        def init_operations(ddp, bucket):
            append(ddp, bucket)
            bucket.append_python_op(fail_on_the_last_rank)

        implementation.init_operations = init_operations
        return implementation


def fail_on_the_last_rank(bucket):
    if faults.is_last():
        raise ZeroDivisionError("of the op")


def test_a_failing_op_of_a_user_raises_on_every_rank(ranks):
    for error, _ in ranks(3, fail_in_an_op):
        assert error.startswith("BaguaError")
        assert "rank 2 of 3, round 1, bucket '0'" in error
        assert "PythonOp(fail_on_the_last_rank)" in error
        assert "ZeroDivisionError: of the op" in error


WRAPS = {
    "module": "model.with_bagua([], GradientAllReduceAlgorithm())",
    "hook": "hooked(model)",
    "sharded": "sharded(model, (3,))",
    "sharded-weights": "sharded(model, (3,), weights=True)",
    "replicas": "sharded(model, (2, 2), reduce_scatter=True)",
}
DIES = """
import os, signal, sys, time, datetime
import torch
import bagua.torch_api as bagua
from bagua import comm_hooks, fsdp
from bagua.torch_api.algorithms import ByteGradAlgorithm, GradientAllReduceAlgorithm
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

def hooked(model):
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    comm_hooks.register(ddp, ByteGradAlgorithm(hierarchical=False))
    return ddp

def sharded(model, shape, **options):
    names = ("replicate", "shard")[-len(shape):]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    fsdp.compress(model, **options)
    return model

def has_beaten():
    below = store
    while hasattr(below, "underlying_store"):
        below = below.underlying_store
    return any(key.endswith("/beat/{victim}") for key in below.list_keys())

torch.manual_seed(0)
bagua.init_process_group(timeout=datetime.timedelta(seconds={timeout}))
store = torch.distributed.distributed_c10d._get_default_store()
model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 300))
model = {wrap}
store.set(str(bagua.get_rank()), str(os.getpid()))
for step in range(1000):
    last = step == 5 and bagua.get_rank() == {victim}
    if step == 5 and bagua.get_rank() == 0:
        time.sleep({pause})
    while last and not has_beaten():  # on a busy machine six steps may be quicker
        time.sleep(0.01)
    start = time.monotonic()
    try:
        if last and {where!r} == "forward":
            {fate}
        loss = model(torch.randn(4, 300)).sum()
        if last and {where!r} == "backward":
            {fate}
        loss.backward()
    except bagua.BaguaError as error:
        print(round(time.monotonic() - start, 1), type(error).__name__, error)
        sys.stdout.flush()
        if "SIGSTOP" in "{fate}" and bagua.get_rank() == 0:
            time.sleep(2.0)  # or the other survivor would take this one for silent
            os.kill(int(store.get("{victim}")), signal.SIGCONT)
        {leave}(7)
    if last:
        {fate}
"""


def dies(wrap, fate, victim=2, where="backward", timeout=60, pause=0):
    """A script in which `fate` is met in the sixth step; pause: seconds that rank 0 is late."""
    # torch's group of a sharded model waits for the dead one.
    leave = "sys.exit" if wrap in ("module", "hook") else "os._exit"
    return DIES.format(
        wrap=WRAPS[wrap],
        fate=fate,
        victim=victim,
        where=where,
        timeout=timeout,
        pause=pause,
        leave=leave,
    )


@pytest.mark.parametrize(
    ("wrap", "where", "victim"),
    [
        ("module", "backward", 0),
        ("module", "backward", 2),
        ("module", "after the step", 2),
        ("hook", "backward", 2),
        ("sharded", "forward", 2),
        ("sharded", "backward", 2),
        ("sharded-weights", "forward", 2),
        ("replicas", "backward", 3),
    ],
)
def test_the_survivors_of_a_killed_rank_say_so_and_end_cleanly(run_script, wrap, where, victim):
    is_sharded = wrap not in ("module", "hook")
    n = 4 if wrap == "replicas" else 3
    ends = run_script(n, dies(wrap, faults.KILLED, victim, where), timeout=60.0)
    assert ends[victim].returncode == -signal.SIGKILL
    most = SECONDS_UNTIL_TOLD + (1.0 if is_sharded else 0.0)
    for rank, text in faults.told(ends, victim, most).items():
        module = "FSDPSequential" if is_sharded else "Sequential"
        assert f"module '{module}', rank {rank} of {n}" in text
        killed = f"BaguaError rank {victim} was killed, stopped or cut off"
        if not is_sharded:
            killed += ", or left by os._exit(): silent for over a second, last in "
            for ornament in ("third_party", "typically", "Check the logs"):
                assert ornament not in text
        hosts_the_store = victim == 0
        verdict = text.startswith(killed)
        assert verdict or (hosts_the_store and "The job's store does not answer" in text), text


@pytest.mark.parametrize("wrap", ["module", "sharded"])
def test_a_stopped_rank_is_named_at_the_timeout_and_raises_when_it_goes_on(run_script, wrap):
    ends = run_script(3, dies(wrap, faults.STOPPED, timeout=SHORT), timeout=60.0)
    for text in faults.told(ends, 2, SHORT + SECONDS_UNTIL_TOLD, SHORT - 1).values():
        assert "rank 2 was killed, stopped or cut off, or left by os._exit(): silent for" in text
    assert ends[2].returncode == 7, ends[2].stdout + ends[2].stderr
    assert "Sequential', rank 2 of 3" in ends[2].stdout


@pytest.mark.parametrize("pause", [0, 3], ids=["together", "one later"])
def test_the_survivors_of_a_rank_that_exits_name_it(run_script, pause):
    """Later: when the other survivor has failed, and published that it has."""
    ends = run_script(3, dies("hook", "sys.exit(0)", pause=pause))
    assert ends[2].returncode == 0, ends[2].stderr
    for text in faults.told(ends, 2, SECONDS_UNTIL_TOLD).values():
        assert text.startswith("BaguaError rank 2 exited after 5 rounds"), text
