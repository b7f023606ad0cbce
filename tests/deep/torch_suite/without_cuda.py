"""torch's tests of DistributedDataParallel on a CPU: what names a CUDA device means the CPU there.

`suite` is the module `distributed_test`, with nothing skipped for want of a GPU. A rank that has
used the functions is good for one test only.
"""

import contextlib
import functools
import os

import torch
from torch.overrides import TorchFunctionMode

RANKS = 2
#: torch.compile would see the replaced functions; this test names devices in calls of `cuda` only.
COMPILED = {"test_ddp_compile_static_graph"}


def _is_cuda(device):
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


def _on_cpu(device):
    return "cpu" if _is_cuda(device) else device


class _CpuForCuda(TorchFunctionMode):
    """Where a function of torch is given a CUDA device, or its number, it gets the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if func is torch.Tensor.to:
            args = (args[0], *map(_on_cpu, args[1:]))
        elif func is torch.device and args and _is_cuda(args[0]):
            args = ("cpu",)
        return func(*args, **kwargs)


class _Stream:
    """A stream or an event where nothing runs."""

    def __init__(self, *args, **kwargs):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *args):
        return None

    def wait(self, *args, **kwargs):
        return None

    wait_stream = wait_event = record = synchronize = wait

    def record_event(self, event=None):
        return event or _Stream()

    def query(self):
        return True


def _replace(owner, names, make):
    for name in names:
        setattr(owner, name, lambda *args, **kwargs: make())


@contextlib.contextmanager
def cuda_calls_are_nothing(name):
    """For the test `name`; what is put in place stays there."""
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    if name in COMPILED:
        torch.compile = functools.partial(torch.compile, backend="aot_eager")  # without a compiler
        yield
        return
    cuda = torch.cuda
    _replace(cuda, ("set_device", "synchronize", "manual_seed", "manual_seed_all"), lambda: None)
    _replace(cuda, ("stream", "device"), contextlib.nullcontext)
    _replace(cuda, ("current_device",), lambda: 0)
    _replace(cuda, ("device_count",), lambda: RANKS)
    for owner, names in (
        (cuda, ("Stream", "Event", "current_stream")),
        (torch, ("Stream", "Event")),
        (torch.accelerator, ("current_stream",)),
    ):
        _replace(owner, names, _Stream)
    # Modules read the device of `to` themselves.
    parse_to = torch._C._nn._parse_to
    torch._C._nn._parse_to = lambda *args, **kwargs: parse_to(
        *map(_on_cpu, args), **{name: _on_cpu(value) for name, value in kwargs.items()}
    )
    with _CpuForCuda():
        yield


def put_in_place(ddp):
    """Lets the tests find `ddp` under all names of torch's class, without the GPUs they give it."""
    original = ddp.__init__

    def __init__(self, module, device_ids=None, output_device=None, *args, **kwargs):
        original(self, module, None, None, *args, **kwargs)

    ddp.__init__ = __init__
    torch.nn.parallel.DistributedDataParallel = ddp
    torch.nn.parallel.distributed.DistributedDataParallel = ddp
    suite.DistributedDataParallel = ddp


def _import_suite():
    os.environ["BACKEND"] = "gloo"
    os.environ["WORLD_SIZE"] = str(RANKS)
    # What a test saves, it may load.
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    from torch.testing._internal import common_distributed

    def always(*args, **kwargs):
        return lambda test: test

    common_distributed.skip_if_no_gpu = lambda test: test
    for name in ("skip_if_lt_x_gpu", "nccl_skip_if_lt_x_gpu", "require_n_gpus_for_nccl_backend"):
        setattr(common_distributed, name, always)
    common_distributed.init_multigpu_helper = lambda world_size, backend: {
        rank: [rank] for rank in range(world_size)
    }
    from torch.testing._internal.distributed import distributed_test as suite

    # The CUDA forms of these would be switched off.
    suite.autocast = lambda *args, **kwargs: torch.autocast("cpu", *args, **kwargs)
    suite.GradScaler = lambda *args, **kwargs: torch.amp.GradScaler("cpu", *args, **kwargs)
    tests = suite.DistributedTest._DistTestBase
    _run_what_gpus_made_flaky(tests)
    return suite


def _run_what_gpus_made_flaky(tests):
    """torch skips some tests because of an issue with their runs on GPUs."""
    for name in dir(tests):
        test = getattr(tests, name)
        if getattr(test, "__unittest_skip_why__", "").startswith("https://"):
            test = getattr(test, "__wrapped__", test)
            test.__unittest_skip__ = False
            setattr(tests, name, test)


suite = _import_suite()
