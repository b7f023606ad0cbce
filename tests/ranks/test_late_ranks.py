"""Rounds that go on without ranks that are late, and take them in again with what they trained."""

import time

import pytest
import torch
from bagua._outer.loop import OuterLoop
from bagua.torch_api.algorithms import DiLoCoAlgorithm, Elastic, OuterSGD
from ranks.test_diloco import assert_outer_state_agrees, own_step
from support import training

INTERVAL, ROUNDS, LATE = 4, 6, 2  # rank
SECONDS = 3.0  # for which it stops
FORMS = {
    "exact": {},
    "streaming in 4 bits by samples": {
        "fragments": 2,
        "overlap_steps": 1,
        "codec": "int4_block",
        "weight": "samples",
    },
}


def keeps_what_it_trained(model):
    """Have it checked that a late rank's pseudo-gradient stays when its anchors change."""
    original, largest = OuterLoop.follow, []

    def pseudo_gradients(loop):
        weights = dict(model.named_parameters())
        for fragment in loop.state.fragments:
            for name, anchor in fragment.named_anchors():
                yield anchor - weights[name].detach()

    def follow(self, before):
        kept = list(pseudo_gradients(before))
        moved = [a.clone() for f in self.state.fragments for a in f.anchors]
        original(self, before)
        pairs = zip(kept, pseudo_gradients(self), strict=True)
        largest.append(max((a - b).abs().max().item() for a, b in pairs))
        stood = [a for f in before.state.fragments for a in f.anchors]
        assert not all(map(torch.equal, moved, stood)), "others have gone on meanwhile"

    OuterLoop.follow = follow
    return largest, lambda: setattr(OuterLoop, "follow", original)


@training.with_group
def one_is_late(form):
    """(members after each round of this rank, largest change of what a late rank had trained)."""
    model = training.network()
    optimizer = training.sgd(model)
    elastic = Elastic(quorum=2, grace=1.0)
    algorithm = DiLoCoAlgorithm(OuterSGD(0.7, 0.5), INTERVAL, elastic=elastic, **FORMS[form])
    model.with_bagua([optimizer], algorithm)
    outer, step, members, made = model.bagua_algorithm, 0, [], 0
    rank = model.process_group.rank
    largest, restore = keeps_what_it_trained(model)
    try:
        while made < ROUNDS:
            if rank == LATE and step == INTERVAL + 1:
                time.sleep(SECONDS)
            own_step(model, optimizer, step, samples=1)
            step += 1
            if outer.outer_rounds > made:
                made = outer.outer_rounds
                members.append((made, list(model.process_group.ranks)))
                # None is to be through before the late one is back.
                while made == ROUNDS // 2 + 1 and len(model.process_group.ranks) < 3 and rank == 0:
                    membership = model.process_group.membership
                    if membership.requests():
                        break
                    time.sleep(0.02)
    finally:
        restore()
    outer.sync()
    assert_outer_state_agrees(model)
    return members, largest


@pytest.mark.timeout(120)
@pytest.mark.parametrize("form", FORMS)
def test_a_late_rank_is_passed_over_and_its_steps_count_in_the_next_round(ranks, form):
    results = ranks(3, one_is_late, form, timeout=90.0)
    for members, largest in results[:LATE]:
        assert [made for made, _ in members] == list(range(1, ROUNDS + 1))
        assert members[0][1] == members[-1][1] == [0, 1, 2]
        assert [0, 1] in [those for _, those in members]
        assert largest == []
    members, largest = results[LATE]
    assert members[0] == (1, [0, 1, 2])
    assert members[-1] == (ROUNDS, [0, 1, 2])
    assert len(largest) == 1
    assert largest[0] < 1e-6


def test_a_grace_is_a_positive_number():
    with pytest.raises(ValueError, match="grace=0 must be positive seconds"):
        Elastic(grace=0)
