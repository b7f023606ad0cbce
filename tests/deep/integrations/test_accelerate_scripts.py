"""The scripts by which Accelerate tests itself, with bagua's hooks or class in every Accelerator.

They are a part of its package. Each asserts what it expects; here is asserted that bagua took part.
"""

import contextlib
import importlib
import io
import os
from unittest import mock

import pytest

#: Script -> whether it prepares models.
SCRIPTS = {
    "test_script": True,
    "test_sync": True,
    "test_distributed_data_loop": True,
    "test_ops": False,
}


#: Parts of a script that need torchdata, which nothing here uses.
WITH_TORCHDATA = ("test_stateful_dataloader", "test_stateful_dataloader_save_state")


def run(script):
    """The script's main(), without its output; as on several GPUs, where it joins uneven inputs."""
    from accelerate import Accelerator
    from integrations import accelerate_state

    accelerate_state.forget()
    module = importlib.import_module(f"accelerate.test_utils.scripts.{script}")
    on_cpu = {"ACCELERATE_USE_CPU": "1", "ACCELERATE_BYPASS_DEVICE_MAP": "true"}
    several = property(lambda self: self.distributed_type.name == "MULTI_CPU")
    left_out = {name: mock.Mock() for name in WITH_TORCHDATA}
    with (
        mock.patch.dict(os.environ, on_cpu),
        mock.patch.dict(vars(module), left_out),
        mock.patch.object(Accelerator, "multi_device", several),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        module.main()


def with_hooks(script):
    """Number of models that got a hook."""
    import accelerate
    from bagua.integrations.accelerate import use

    init, all_hooks = accelerate.Accelerator.__init__, []

    def begin(self, *arguments, **options):
        init(self, *arguments, **options)
        all_hooks.append(use(self, "gradient_allreduce"))

    with mock.patch.object(accelerate.Accelerator, "__init__", begin):
        run(script)
    return sum(len(hooks.handles) for hooks in all_hooks)


@pytest.mark.parametrize("script", SCRIPTS)
def test_accelerates_own_scripts_pass_with_hooks(ranks, script):
    for hooked in ranks(2, with_hooks, script):
        assert (hooked > 0) == SCRIPTS[script]


def with_the_class(script):
    """Number of models that were wrapped by bagua's class, in the place of torch's."""
    import torch
    from bagua.torch_api.data_parallel import DistributedDataParallel

    made = []

    class Counted(DistributedDataParallel):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            made.append(1)

    with mock.patch.object(torch.nn.parallel, "DistributedDataParallel", Counted):
        run(script)
    return len(made)


# test_sync calls a private member of torch's class: Accelerator.trigger_sync_in_backward.
@pytest.mark.parametrize("script", ["test_script", "test_distributed_data_loop"])
def test_accelerates_own_scripts_pass_with_the_class(ranks, script):
    for wrapped in ranks(2, with_the_class, script):
        assert wrapped > 0
