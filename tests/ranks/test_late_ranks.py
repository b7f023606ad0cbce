"""Rounds that go on without ranks that are late, and take them in again with what they trained."""

import collections
import contextlib
import time

import pytest
import torch
from bagua._outer.loop import Fragment, OuterLoop
from bagua.torch_api.algorithms import DiLoCoAlgorithm, Elastic, OuterSGD
from ranks.test_diloco import assert_outer_state_agrees, own_step
from support import training

INTERVAL, ROUNDS, LATE = 4, 8, 2  # rank
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


@contextlib.contextmanager
def counting_steps():
    """For each launch: steps since the fragment's last one, and its change over what is sent."""
    launch, after_step = Fragment.launch, OuterLoop._after_step
    launches, steps = [], collections.Counter()

    def noted(self, weights, *args):
        change = [a - weights[name].detach() for name, a in self.named_anchors()]
        launch(self, weights, *args)
        norm = torch.cat([each.flatten() for each in change]).norm().item()
        launches.append((steps.pop(self.part), norm / self.own_norm))

    def after(self):
        steps.update(fragment.part for fragment in self.state.fragments)
        after_step(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fragment, "launch", noted)
        patch.setattr(OuterLoop, "_after_step", after)
        yield launches


@training.with_group
def one_is_late(form):
    """(members after each round of this rank, largest change of what a late rank had trained, and
    what `counting_steps` finds)."""
    model = training.network()
    optimizer = training.sgd(model)
    elastic = Elastic(quorum=2, grace=1.0)
    algorithm = DiLoCoAlgorithm(OuterSGD(0.7, 0.5), INTERVAL, elastic=elastic, **FORMS[form])
    largest, restore = keeps_what_it_trained(model)
    with counting_steps() as launches, contextlib.ExitStack() as undo:
        undo.callback(restore)
        model.with_bagua([optimizer], algorithm)
        outer, step, members, made = model.bagua_algorithm, 0, [], 0
        rank = model.process_group.rank
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
    outer.sync()
    assert_outer_state_agrees(model)
    return members, largest, launches


@pytest.mark.timeout(120)
@pytest.mark.parametrize("form", FORMS)
def test_a_late_rank_is_passed_over_and_its_steps_count_in_the_next_round(ranks, form):
    results = ranks(3, one_is_late, form, timeout=90.0)
    for members, largest, launches in results[:LATE]:
        assert [made for made, _ in members] == list(range(1, ROUNDS + 1))
        assert members[0][1] == members[-1][1] == [0, 1, 2]
        assert [0, 1] in [those for _, those in members]
        assert largest == []
        assert max(steps for steps, _ in launches) == INTERVAL
    members, largest, launches = results[LATE]
    assert members[0] == (1, [0, 1, 2])
    assert members[-1] == (ROUNDS, [0, 1, 2])
    assert len(largest) == 1
    assert largest[0] < 1e-6
    # The turn of a fragment may have passed when it comes back: then it has trained for longer.
    longest = INTERVAL if form == "exact" else 3 * INTERVAL // 2
    assert max(steps for steps, _ in launches) == longest
    for steps, ratio in (each for _, _, launches in results for each in launches):
        assert ratio == pytest.approx(max(1.0, steps / INTERVAL), rel=1e-5)


def test_a_grace_is_a_positive_number():
    with pytest.raises(ValueError, match="grace=0 must be positive seconds"):
        Elastic(grace=0)
