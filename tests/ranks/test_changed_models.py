"""Models that change after the wrap. The errors: test_plan_guard.py, situations/changes.py."""

import warnings

import pytest
import torch
from support import faults, training


@faults.with_bagua_group
def wrap_again_after_a_change():
    model, optimizer = faults.wrapped()
    faults.step(model, optimizer)
    model.load_state_dict(faults.network().state_dict(), assign=True)
    model.eval()
    model(torch.randn(4, 5))  # evaluation communicates nothing and is not refused
    model.train()
    model, optimizer = faults.wrapped(model)
    faults.step(model, optimizer)
    return model.bagua_stats()["rounds"]


def test_the_remedy_for_a_change_works(ranks):
    assert ranks(2, wrap_again_after_a_change) == [1, 1]


@faults.with_bagua_group
def freeze_and_thaw(do_flatten):
    model, optimizer = faults.wrapped(do_flatten=do_flatten)
    frozen = model[0].weight
    faults.step(model, optimizer)
    kept = frozen.grad.clone()
    frozen.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        faults.loss_of(model).backward()
    stays = torch.equal(frozen.grad, kept)
    frozen.requires_grad_(True)
    faults.step(model, optimizer)
    training.assert_ranks_agree(model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model(torch.randn(4, 5, requires_grad=True)).sum().backward()
    # That forward gets the buffers of rank 0, as in torch; no gradients follow.
    return stays, [bucket["rounds"] for bucket in model.bagua_stats()["buckets"]]


@pytest.mark.parametrize("do_flatten", [True, False], ids=["flattened", "copied"])
def test_a_frozen_parameter_keeps_its_gradient_and_all_frozen_send_no_gradients(ranks, do_flatten):
    assert ranks(3, freeze_and_thaw, do_flatten) == [(True, [3])] * 3
