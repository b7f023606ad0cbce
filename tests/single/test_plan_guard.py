"""The guard that compares a module with what it was at the wrap."""

import weakref

import pytest
import torch
from bagua import _C
from torch import nn
from torch.nn.utils import prune


def dicts_of(model):
    """The dictionaries that the guard compares: of each module its parameters and its modules."""
    return [d for module in model.modules() for d in (module._parameters, module._modules)]


def guard(model):
    return _C.PlanGuard([name for name, _ in model.named_modules()], dicts_of(model))


def places_of(model):
    return [name for name, _ in model.named_modules()], dicts_of(model), set()


def network():
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 3, bias=False), nn.ReLU()))
    model.register_parameter("own", nn.Parameter(torch.ones(1)))
    model[0].bias.requires_grad_(False)
    return model


def set_data(model):
    model.own.data = torch.ones(2)


CHANGES = {
    "replaced": (
        lambda model: setattr(model[0], "weight", nn.Parameter(torch.zeros(3, 2))),
        "'0.weight' was replaced by another tensor (load_state_dict(assign=True) does this)",
    ),
    "assigned": (
        lambda model: model.load_state_dict(network().state_dict(), assign=True),
        "'own' was replaced by another tensor (load_state_dict(assign=True) does this)",
    ),
    "root-parameter": (
        lambda model: setattr(model, "own", nn.Parameter(torch.ones(1))),
        "'own' was replaced by another tensor (load_state_dict(assign=True) does this)",
    ),
    "layer": (
        lambda model: model.__setitem__(0, nn.Linear(2, 3)),
        "'0' was replaced by another object",
    ),
    "unfrozen": (
        lambda model: model[0].bias.requires_grad_(),
        "'0.bias' was unfrozen (requires_grad changed)",
    ),
    "dtype": (lambda model: model.half(), "'own' changed from Float to Half"),
    "shape": (set_data, "'own' changed its shape to [2]"),
    "new-parameter": (
        lambda model: model[1][1].register_parameter("slope", nn.Parameter(torch.ones(1))),
        "'1.1.slope' is new",
    ),
    "new-at-the-root": (
        lambda model: model.register_parameter("other", nn.Parameter(torch.ones(1))),
        "'other' is new",
    ),
    "new-layer": (lambda model: model[1].add_module("last", nn.Linear(3, 1)), "'1.last' is new"),
    "removed": (lambda model: delattr(model, "own"), "'own' was removed"),
    "removed-layer": (lambda model: model[1].__delitem__(1), "'1.1' was removed"),
    "bias-for-none": (
        lambda model: setattr(model[1][0], "bias", nn.Parameter(torch.ones(3))),
        "'1.0.bias' was replaced by another object",
    ),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_the_first_difference_is_named(kind):
    model = network()
    made, dicts = guard(model), dicts_of(model)
    assert made.difference(dicts) == ""
    CHANGES[kind][0](model)
    assert made.difference(dicts) == CHANGES[kind][1]


def test_other_names_and_places_of_the_same_parameters_are_accepted():
    model = network()
    made = _C.PlanGuard(*places_of(model))
    old = dicts_of(model)
    assert not made.moved(old)
    prune.l1_unstructured(model[0], "weight", 0.5)
    nn.utils.parametrize.register_parametrization(model[1][0], "weight", nn.Identity())
    model[1].add_module("last", nn.Sequential(nn.ReLU(), model[0]))
    assert made.moved(old)
    assert made.accept_places(*places_of(model))
    new = dicts_of(model)
    assert made.difference(new) == ""
    assert not made.moved(new)
    assert made.trains(new)
    model[0].bias.requires_grad_()
    assert made.difference(new) == "'0.bias' was unfrozen (requires_grad changed)"
    prune.remove(model[0], "weight")
    model[0].bias.requires_grad_(False)
    assert made.accept_places(*places_of(model))
    assert made.difference(dicts_of(model)) == ""


@pytest.mark.parametrize(
    "kind", ["replaced", "root-parameter", "layer", "new-parameter", "new-at-the-root", "removed"]
)
def test_places_with_other_parameters_are_not_accepted(kind):
    model = network()
    made = _C.PlanGuard(*places_of(model))
    prune.l1_unstructured(model[1][0], "weight", 0.5)
    CHANGES[kind][0](model)
    assert not made.accept_places(*places_of(model))


def test_freezing_is_no_difference_and_a_model_of_frozen_parameters_does_not_train():
    model = network()
    made, dicts = guard(model), dicts_of(model)
    assert made.trains(dicts)
    model[1][0].weight.requires_grad_(False)
    assert made.difference(dicts) == ""
    assert made.trains(dicts)
    model.requires_grad_(False)
    assert made.difference(dicts) == ""
    assert not made.trains(dicts)


@pytest.mark.parametrize(
    ("replacement", "trains"),
    [
        (lambda p: p.detach().requires_grad_(), False),
        (lambda p: p.detach(), False),
        (lambda p: 2 * p, True),
        (lambda p: p, True),
    ],
    ids=["leaves", "constants", "functions", "itself"],
)
def test_a_model_trains_inside_functional_call_where_its_parameters_are_reached(
    replacement, trains
):
    model = network()
    made, dicts = guard(model), dicts_of(model)
    seen = []
    model.register_forward_pre_hook(lambda *_: seen.append(made.trains(dicts)))
    passed = {name: replacement(p) for name, p in model.named_parameters()}
    torch.func.functional_call(model, passed, (torch.ones(1, 2),))
    del passed["own"]
    torch.func.functional_call(model, passed, (torch.ones(1, 2),))
    assert seen == [trains, True]


def test_a_model_that_was_frozen_at_the_wrap_is_left_to_others():
    model = network().requires_grad_(False)
    assert guard(model).trains(dicts_of(model))


def test_a_tensor_of_functional_call_is_no_difference():
    model = network()
    made, dicts = guard(model), dicts_of(model)
    seen = []
    model[1][1].register_forward_hook(lambda *_: seen.append(made.difference(dicts)))
    values = {name: p.detach() * 2 for name, p in model.named_parameters()}
    torch.func.functional_call(model, values, torch.ones(1, 2))
    assert seen == [""]


def test_effects_of_training_are_no_difference():
    model = network()
    made, dicts = guard(model), dicts_of(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for set_to_none in (True, False):
        optimizer.zero_grad(set_to_none=set_to_none)
        (model(torch.randn(2, 2)).sum() * model.own).sum().backward()
        optimizer.step()
    model.eval()
    model.load_state_dict(network().state_dict())
    assert made.difference(dicts) == ""


def test_a_shared_parameter_is_no_difference():
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    model[1].weight = model[0].weight
    made, dicts = guard(model), dicts_of(model)
    assert made.difference(dicts) == ""
    model[1].weight = nn.Parameter(torch.zeros(3, 3))
    assert "'1.weight' was replaced" in made.difference(dicts)


def test_the_guard_does_not_keep_a_module_alive():
    model = network()
    made = guard(model)
    gone = weakref.ref(model)
    del model
    assert gone() is None
    assert made is not None
