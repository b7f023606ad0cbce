"""Local training whose outer state is in host memory, beside the same run where it is not."""

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import DiLoCoAlgorithm, OuterSGD
from support import training
from support.devices import each_device

FORMS = {
    "exact": {},
    "streamed-int4": {"codec": "int4_block", "fragments": 2, "overlap_steps": 1},
    "mixed": {"overlap_steps": 1, "merge": 0.5},
}
STEPS = 9
INTERVAL = 4


@training.with_group
def train(form, dtype, outer_device):
    """This rank's weights on the CPU, and where its buckets are."""
    model = training.network().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rule = OuterSGD(0.7, 0.5)
    arguments = FORMS[form] | {"outer_device": outer_device}
    model.with_bagua([optimizer], DiLoCoAlgorithm(rule, INTERVAL, **arguments))
    for step in range(STEPS):
        optimizer.zero_grad()
        data = tuple(t.to(dtype) for t in training.batch(step, dist.get_rank()))
        training.squared_error(model, data).backward()
        optimizer.step()
    model.bagua_algorithm.sync()
    assert len(set(training.gather(training.bits(model.parameters())))) == 1
    devices = {bucket.backend_tensor.device.type for bucket in model.bagua_buckets}
    devices |= {value.device.type for value in state_of(model) if value.is_floating_point()}
    return torch.cat([p.detach().cpu().flatten() for p in model.parameters()]), devices


def state_of(model):
    state = model.bagua_algorithm.state_dict()
    return [value for value in state.values() if isinstance(value, torch.Tensor)]


@each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("form", FORMS)
def test_outer_state_in_host_memory_trains_as_on_the_cpu(ranks, form, dtype, device):
    found = ranks(2, train, form, dtype, "cpu", env=training.on_device(device), timeout=60)
    expected = ranks(2, train, form, dtype, None, timeout=60)
    for (weights, devices), (on_cpu, _) in zip(found, expected, strict=True):
        assert devices == {"cpu"}
        if device == "cpu":
            assert torch.equal(weights, on_cpu)
        else:
            torch.testing.assert_close(weights, on_cpu, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("outer_device", ["cuda", torch.device("cpu"), ""], ids=str)
def test_other_devices_are_refused(outer_device):
    with pytest.raises(ValueError, match=r'outer_device=.* must be "cpu", or None'):
        DiLoCoAlgorithm(outer_device=outer_device)
