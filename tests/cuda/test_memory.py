"""Device memory: none is lost from step to step, and none stays when the model is gone."""

import gc

import pytest
import torch
import torch.distributed as dist
from support import training
from support.devices import each_device
from support.every_algorithm import ALGORITHMS, wrapped

WARM_UP, STEPS = 10, 50
#: Steps after which `auto` has chosen: the residuals of the candidate at work are memory, too.
TRIALS = 60


def allocated():
    """Bytes of device memory in use once all work is done; on CPU those of live tensors."""
    gc.collect()
    if training.device().type == "cpu":
        storages = [o.untyped_storage() for o in gc.get_objects() if isinstance(o, torch.Tensor)]
        return sum({s.data_ptr(): s.nbytes() for s in storages}.values())
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()  # one for each thread and stream that ever multiplied
    return torch.cuda.memory_allocated()


def allocated_by(model, optimizer, name):
    """Between two steps, with no average under way; the next forward resumes averaging."""
    optimizer.zero_grad()
    if name == "async":
        model.bagua_algorithm.abort(model)
    result = allocated()
    if name == "async":
        model.bagua_algorithm.resume(model)
    return result


def train_and_measure(name):
    model, optimizer = wrapped(name, training.network())
    data = [training.batch(step, dist.get_rank()) for step in range(4)]
    warm_up = TRIALS if name == "auto" else WARM_UP
    training.train(model, optimizer, [data[step % 4] for step in range(warm_up)])
    before = allocated_by(model, optimizer, name)
    training.train(model, optimizer, [data[step % 4] for step in range(STEPS)])
    return before, allocated_by(model, optimizer, name)


@training.with_group
def measure(name):
    train_and_measure(name)  # what the process keeps: kernels' workspaces, caches
    start = allocated()
    before, after = train_and_measure(name)
    return start, before, after, allocated()


@each_device
@pytest.mark.parametrize("name", ALGORITHMS)
def test_steps_and_models_leave_no_memory_behind(ranks, name, device):
    for start, before, after, end in ranks(2, measure, name, env=training.on_device(device)):
        assert before > start
        assert after <= before
        assert end <= start
