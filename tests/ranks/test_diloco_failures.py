"""Local training in which weights become NaN."""

import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import OuterSGD
from ranks.test_diloco import (
    assert_outer_state_agrees,
    assert_weights_are_the_anchor,
    outer_state,
    own_step,
    own_steps,
)
from ranks.test_diloco_situations import normalised, wrapped
from support import training


@training.with_group
def nan_on_one_rank():
    """The warnings of a round with NaN in a weight of rank 1, in its buffers and its moments."""
    model, optimizer = wrapped(normalised(), interval=2, outer_optimizer=OuterSGD(0.7, 0.5))
    own_steps(model, optimizer, range(2))
    before = training.bits(outer_state(model).values())
    own_step(model, optimizer, 2)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model[0].weight[1, 2] = float("nan")
            model[1].running_var.fill_(float("inf"))
            for value in optimizer.state[model[0].weight].values():
                value.fill_(float("nan")) if value.dim() else None
    caught = training.warnings_of(lambda: optimizer.step())
    assert training.bits(outer_state(model).values()) == before
    stats = model.bagua_stats()["outer"]
    assert (stats["rounds"], stats["skipped_rounds"]) == (1, 1)
    if dist.get_rank() == 1:
        assert_weights_are_the_anchor(model)
        for state in optimizer.state.values():
            assert all(bool(value.isfinite().all()) for value in state.values())
    assert all(bool(b.isfinite().all()) for b in model.buffers())
    own_steps(model, optimizer, range(3, 5))
    assert_outer_state_agrees(model)
    assert_weights_are_the_anchor(model)
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    return caught


def test_nan_on_one_rank_leaves_the_anchor_and_that_rank_starts_from_it(ranks):
    (text,) = (text for said in ranks(3, nan_on_one_rank) for text in said)  # once per job
    assert "the average of an outer round is not finite, and changes nothing" in text
    assert "The weights of rank(s) 1 hold NaN or infinity" in text
