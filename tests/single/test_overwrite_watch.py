"""The watch of weights that an optimizer overwrites with values that do not depend on them."""

import torch
from bagua import _C


def parameter():
    weight = torch.nn.Parameter(torch.randn(3, 4))
    weight.grad = torch.randn(3, 4)
    return weight


def found(step, weight):
    watch = _C.OverwriteWatch([weight])
    with torch.no_grad():
        step(weight)
    return watch.end()


def replace(weight, value):
    weight.data = value


def test_weights_that_come_from_a_copy_are_found():
    master, flat = torch.randn(3, 4, dtype=torch.float64), torch.randn(20)
    steps = {
        "copy": lambda w: w.copy_(master.sub_(w.grad)),
        "copy through data": lambda w: w.data.copy_(master),
        "new memory": lambda w: replace(w, master.to(w.dtype)),
        "set": lambda w: w.set_(master.float()),
        "part of a flat copy": lambda w: w.copy_(flat[4:16].view_as(w)),
        "lists": lambda w: torch._foreach_copy_([w], [master.to(w)]),
        "out": lambda w: torch.add(master.float(), 1, out=w),
        "zeros at first": lambda w: w.zero_().add_(master),
        "a look at the weights": lambda w: (w.double().clone(), w.copy_(master)),
        "in parts": lambda w: [row.copy_(part) for row, part in zip(w, master, strict=True)],
    }
    missed = [name for name, step in steps.items() if found(step, parameter()) != [0]]
    assert not missed


def test_steps_on_the_weights_are_not_found():
    master = torch.randn(3, 4)
    steps = {
        "nothing": lambda w: None,
        "sgd": lambda w: torch.optim.SGD([w], lr=0.1).step(),
        "no rate": lambda w: torch.optim.SGD([w], lr=0.0).step(),
        "lists": lambda w: torch.optim.Adam([w], foreach=True).step(),
        "fused": lambda w: torch.optim.AdamW([w], fused=True).step(),
        "Muon": lambda w: torch.optim.Muon([w]).step(),
        "new memory": lambda w: replace(w, w - 0.1 * w.grad),
        "written whole": lambda w: w.copy_(w * 0.9 - w.grad),
        "a mean with a copy": lambda w: w.copy_(master.lerp_(w, 0.5)),
        "a part": lambda w: w[0].copy_(master[0]),
        "every second column": lambda w: w[:, ::2].copy_(master[:, ::2]),
        "by way of a copy": lambda w: w.copy_(w.double().sub_(w.grad).float().clone()),
        "weights of now": lambda w: w.copy_(master.copy_(w).sub_(w.grad)),
    }
    wrong = [name for name, step in steps.items() if found(step, parameter())]
    assert not wrong


def test_a_watch_that_a_step_has_left_open_ends_with_the_next():
    first, second = parameter(), parameter()
    left = _C.OverwriteWatch([first])
    assert found(lambda w: w.copy_(torch.zeros(3, 4)), second) == [0]
    with torch.no_grad():
        first.zero_()
    assert left.end() == []
