"""AutoAlgorithm: the choice is the same on all ranks, and trains as what was chosen."""

import dataclasses
import functools
import json
from unittest import mock

import bagua.torch_api as bagua
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bagua._foresight.profile import BucketProfile, CodecSpeed, Link, Profile
from bagua._foresight.profile_file import write_profile
from bagua.torch_api.algorithms import AutoAlgorithm
from bagua.torch_api.algorithms.auto import Candidate, course
from bagua.torch_api.algorithms.auto.choice import rows_of, with_trials
from bagua.torch_api.algorithms.auto.probe import links, measuring
from bagua.torch_api.algorithms.auto.probe.links import Links
from bagua.torch_api.algorithms.auto.saved import choice_text
from bagua.torch_api.checkpoint import load_latest, save_checkpoint
from support import training
from support.error_feedback import all_bits, train_step, wide_network
from torch import nn

FAST, SLOW, SLOWER = Link(1e-5, 5e9), Link(1e-4, 2e6), Link(1e-4, 1e6)
EIGHT = "bytegrad(codec='block_uint8', hierarchical=False)"
FOUR_BITS = Candidate(
    "bytegrad", {"codec": "int4_block", "error_feedback": True, "hierarchical": False}
)
FOUR = FOUR_BITS.label()
SMALLER_BUCKETS = dataclasses.replace(FOUR_BITS, bucket_bytes=256)
SMALLER = SMALLER_BUCKETS.label()
#: Nothing that loses is allowed. Where no step is left for trials either, no time decides.
ONLY_EXACT = {"max_error": 0.0, "max_error_with_feedback": 0.0}
STEPS_OF_A_MEASUREMENT = 7


def profile(link, ranks=2, nodes=None, errors=None, codec=5e9, **more):
    """Of a model of four million parameters whose step takes 20 ms."""
    speeds = CodecSpeed(codec, codec, codec)
    names = ["block_uint8", "int4_block", "minmax_uint8"]
    errors = {
        **{"block_uint8": 0.01, "int4_block": 0.12, "rank 4": 0.8, "rank 1": 0.97},
        "largest 0.01": 0.9,
    } | (errors or {})
    buckets = tuple(BucketProfile(1_000_000, 4_000_000, 0.004 * (i + 2)) for i in range(4))
    return Profile(
        ranks,
        nodes or (ranks,),
        compute=0.024,
        optimizer=0.004,
        buckets=buckets,
        between=link,
        codecs=dict.fromkeys(names, speeds),
        errors=errors,
        **more,
    )


def wrapped(algorithm, seed=0):
    model = wide_network(seed)
    optimizer = training.sgd(model, lr=0.02)
    return model.with_bagua([optimizer], algorithm), optimizer


def choice_of(model):
    choice = model.bagua_stats()["choice"]
    json.dumps(choice)  # plain data
    return choice["state"], choice["chosen"]


def train(model, optimizer, steps, first=0):
    data = [training.batch(first + step, dist.get_rank()) for step in range(steps)]
    training.train(model, optimizer, data, after_step=training.assert_ranks_agree)


@training.with_group
def chosen_by(given, arguments):
    model, optimizer = wrapped(AutoAlgorithm(profile=given, **arguments))
    train(model, optimizer, 3)
    choice = model.bagua_stats()["choice"]
    refused = {row["candidate"]: row["refusal"] for row in choice["table"] if row["refusal"]}
    return choice_of(model), choice["why"], refused, training.model_bits(model)


CHOICES = {
    "fast": (profile(FAST), {}, "gradient_allreduce"),
    "slow": (profile(SLOW), {}, FOUR),
    "4 bits lose much": (profile(SLOW, errors={"int4_block": 0.4}), {}, EIGHT),
    "little is allowed": (profile(SLOW), {"max_error_with_feedback": 0.1}, EIGHT),
    "nothing is allowed": (
        profile(SLOW),
        {"max_error": 0.0, "max_error_with_feedback": 0.0},
        "gradient_allreduce",
    ),
    "errors that are not in the profile": (
        dataclasses.replace(profile(SLOW), errors={}),
        {},
        FOUR,
    ),
    "slow codecs": (profile(Link(1e-5, 3e9), codec=2e7), {}, "gradient_allreduce"),
    "few candidates": (
        profile(SLOW),
        {"candidates": ["gradient_allreduce", "bytegrad"]},
        "bytegrad(hierarchical=False)",
    ),
    "much is allowed": (
        profile(SLOW),
        {"candidates": ["power_sgd", "sparse", "bytegrad"], "max_error_with_feedback": 0.95},
        "sparse",
    ),
}


@pytest.mark.parametrize("case", CHOICES)
@pytest.mark.parametrize("size", [2, 3], ids=lambda n: f"{n}_ranks")
def test_figures_decide_and_all_ranks_choose_the_same(ranks, size, case):
    given, arguments, expected = CHOICES[case]
    given = dataclasses.replace(given, ranks=size, nodes=(size,))
    results = ranks(size, chosen_by, given, arguments)
    assert results == [results[0]] * size
    choice, why, refused, _ = results[0]
    assert choice == ("chosen", expected), (why, refused)
    if case == "slow":
        assert "name it in candidates=" in refused["power_sgd(rank=4)"]


def measured_and_fast(*arguments):
    """Links(FAST), after a measurement: on a busy machine its own result may speak for 8 bits."""
    links.measure_links(*arguments)
    return Links(FAST, None)


@training.with_group
def exact_after_measuring():
    model, optimizer = wrapped(AutoAlgorithm(most_steps=STEPS_OF_A_MEASUREMENT))
    oracle, states = wide_network(), []
    with mock.patch.object(measuring, "measure_links", measured_and_fast):
        for step in range(14):
            train(model, optimizer, 1, first=step)
            states.append(choice_of(model))
    training.train_alone(oracle, training.sgd(oracle, lr=0.02), 14)
    training.assert_close(model, oracle)
    errors = [row["error"] for row in model.bagua_stats()["choice"]["table"]]
    return states, errors, training.model_bits(model)


@pytest.mark.parametrize("size", [2, 3], ids=lambda n: f"{n}_ranks")
def test_a_tiny_model_is_measured_and_trained_exactly(ranks, size):
    results = ranks(size, exact_after_measuring)
    assert results == [results[0]] * size
    states, errors, _ = results[0]
    assert states[0] == ("measuring", None)
    assert states[-1] == ("chosen", "gradient_allreduce")
    assert errors[0] == 0
    assert all(0 < error < 1 for error in errors[1:3]), errors


@training.with_group
def on_two_nodes():
    model, optimizer = wrapped(AutoAlgorithm())
    train(model, optimizer, 9)
    choice = json.loads(json.dumps(model.bagua_stats()["choice"]))
    rows = {row["candidate"]: row["predicted_seconds"] for row in choice["table"]}
    return choice["profile"], rows


def test_between_two_nodes_both_kinds_of_links_and_hierarchical_candidates_are_measured(ranks):
    nodes = [
        {"GROUP_RANK": str(node), "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(size)}
        for node, size in enumerate((2, 1))
        for local in range(size)
    ]
    results = ranks(3, on_two_nodes, env=nodes)
    assert results == [results[0]] * 3
    found, rows = results[0]
    assert found["nodes"] == [2, 1]
    assert all(found[name]["bandwidth"] > 0 for name in ("between", "inside"))
    assert rows["gradient_allreduce(hierarchical=True)"] > 0
    assert rows["bytegrad(codec='block_uint8', hierarchical='sharded')"] > 0


@training.with_group
def overflows_at_first():
    model = wide_network()
    optimizer, scaler = training.sgd(model), torch.amp.GradScaler("cpu", init_scale=2.0**20)
    model.with_bagua([optimizer], AutoAlgorithm(most_steps=30), grad_scaler=scaler)
    for step in range(64):
        train_step(model, optimizer, step, scaler, overflow=step < 3)
        training.assert_ranks_agree(model)
    table = model.bagua_stats()["choice"]["table"]
    return choice_of(model), [row["error"] for row in table][:3]


def test_errors_are_those_of_the_first_gradients_that_are_finite(ranks):
    results = ranks(2, overflows_at_first)
    assert results[0] == results[1]
    choice, errors = results[0]
    assert choice[0] == "chosen"
    assert 0 < errors[1] < errors[2] < 1


@training.with_group
def chosen_after_one_step():
    model, optimizer = wrapped(AutoAlgorithm(most_steps=1, **ONLY_EXACT))
    train(model, optimizer, 1)
    table = model.bagua_stats()["choice"]["table"]
    return choice_of(model), [row["error"] for row in table][:3]


def test_one_step_is_enough_to_choose(ranks):
    for choice, errors in ranks(2, chosen_after_one_step):
        assert choice == ("chosen", "gradient_allreduce")
        assert 0 < errors[1] < errors[2] < 1


@training.with_group
def tried(exact):
    """The predictions say that lossy candidates are faster; nothing is, for so small a model."""
    promise = functools.partial(rows_that_promise, exact)
    with (
        mock.patch.object(course, "rows_of", promise),
        mock.patch.object(course, "other_size", return_value=None),
    ):
        model, optimizer = wrapped(AutoAlgorithm())
        names = []
        for step in range(60):
            train(model, optimizer, 1, first=step)
            names.append((choice_of(model)[0], model.bagua_algorithm.at_work.label()))
    table = model.bagua_stats()["choice"]["table"]
    trials = [row["candidate"] for row in table if row["measured_seconds"] is not None]
    return names, trials, training.model_bits(model)


def rows_that_promise(exact, *arguments, four=None, **named):
    rows = rows_of(*arguments, **named)
    four = 0.9 * exact if four is None else four
    promised = {"gradient_allreduce": exact, EIGHT: 0.8 * exact, FOUR: four}
    return [dataclasses.replace(r, predicted=promised.get(r.candidate.label(), 2)) for r in rows]


# 7 steps are measured; a trial's first step builds buckets, and the next ones count.
@pytest.mark.parametrize(("exact", "steps"), [(1.0, 7 + 3 * 3), (0.05, 7 + 3 * 13), (0.02, 58)])
def test_close_candidates_are_tried_and_measurements_decide(ranks, exact, steps):
    results = ranks(2, tried, exact)
    assert results[0] == results[1]
    names, trials, _ = results[0]
    assert trials == ["gradient_allreduce", EIGHT, FOUR]
    order = list(dict.fromkeys(names))
    assert order[:4] == [
        ("measuring", "gradient_allreduce"),
        ("trying", "gradient_allreduce"),
        ("trying", FOUR),
        ("trying", EIGHT),
    ]
    assert names[-1][0] == "chosen"
    assert 1 + [state for state, _ in names].index("chosen") == steps


@training.with_group
def tried_with_smaller_buckets(seconds):
    """4 bits are predicted to win by far; ``seconds`` are those of the trials."""
    measured = dict(zip([SMALLER_BUCKETS, FOUR_BITS], seconds, strict=True))
    with (
        mock.patch.object(course, "rows_of", functools.partial(rows_that_promise, 9.0, four=1.0)),
        mock.patch.object(course, "other_size", return_value=SMALLER_BUCKETS) as asked,
        mock.patch.object(course, "with_trials", lambda rows, _: with_trials(rows, measured)),
    ):
        model, optimizer = wrapped(AutoAlgorithm())
        stages = []
        for step in range(20):
            train(model, optimizer, 1, first=step)
            at_work = model.bagua_algorithm.at_work.label(), len(model.bagua_buckets) > 1
            stages.append((choice_of(model)[0], *at_work))
    again, its_optimizer = wrapped(AutoAlgorithm(), seed=1)
    again.bagua_algorithm.load_state_dict(model.bagua_algorithm.state_dict())
    train(again, its_optimizer, 1)
    cuts = [[len(bucket.tensors) for bucket in one.bagua_buckets] for one in (model, again)]
    stages = list(dict.fromkeys(stages))
    return stages, choice_of(model), asked.call_count, cuts, training.model_bits(model)


@pytest.mark.parametrize(
    ("seconds", "chosen"), [((0.9, 1.0), SMALLER), ((0.98, 1.0), FOUR), ((1.1, 1.0), FOUR)]
)
def test_smaller_buckets_are_tried_and_taken_if_clearly_faster(ranks, seconds, chosen):
    results = ranks(2, tried_with_smaller_buckets, seconds)
    assert results[0] == results[1]
    stages, choice, asked, (cut, cut_again), _ = results[0]
    assert choice == ("chosen", chosen)
    assert asked == 1
    assert [stage for stage in stages if stage[0] == "trying"] == [
        ("trying", "gradient_allreduce", False),  # until the next forward
        ("trying", SMALLER, True),
        ("trying", FOUR, False),
    ]
    assert stages[-1] == ("chosen", chosen, chosen == SMALLER)
    assert cut == cut_again


@training.with_group
def links_that_change(to, restored=None):
    """The alarm comes in round 4; ``restored``: the choice of a checkpoint."""
    calls = []

    def alarm(self, stats):
        calls.append(stats)
        return len(calls) == 4

    with (
        mock.patch.object(course.Watching, "round_ended", alarm),
        mock.patch.object(course, "measure_links", return_value=Links(to, None)),
    ):
        model, optimizer = wrapped(AutoAlgorithm(profile=profile(SLOW)))
        if restored is not None:
            choice = choice_text(restored, profile(SLOW))
            model.bagua_algorithm.load_state_dict({"choice": choice})
        at_work = []
        for step in range(8):
            train(model, optimizer, 1, first=step)
            at_work.append(model.bagua_algorithm.at_work.label())
    return at_work, model.bagua_stats()["choice"]["replans"], training.model_bits(model)


@pytest.mark.parametrize(
    ("to", "restored", "expected"),
    [
        (FAST, None, [FOUR] * 4 + ["gradient_allreduce"] * 4),
        (SLOWER, None, [FOUR] * 8),
        (FAST, SMALLER_BUCKETS, [SMALLER] * 4 + ["gradient_allreduce"] * 4),
        (SLOWER, SMALLER_BUCKETS, [SMALLER] * 8),
    ],
)
def test_a_link_that_changes_for_long_is_planned_for_again_on_all_ranks_at_once(
    ranks, to, restored, expected
):
    results = ranks(2, links_that_change, to, restored)
    assert results[0] == results[1]
    at_work, replans, _ = results[0]
    assert at_work == expected
    assert replans == 1


def auto_state(link=SLOW, seed=0):
    given = None if link is None else profile(link)
    model, optimizer = wrapped(AutoAlgorithm(profile=given), seed)
    return model, optimizer, {"m": model, "o": optimizer, "a": model.bagua_algorithm}


@training.with_group
def resumed(folder):
    model, optimizer, state = auto_state()
    train(model, optimizer, 4)
    save_checkpoint(folder, state, 4)
    train(model, optimizer, 3, first=4)
    again, its_optimizer, its_state = auto_state(link=None, seed=1)
    train(again, its_optimizer, 1, first=50)
    step = load_latest(folder, its_state)
    train(again, its_optimizer, 3, first=step)
    same = all_bits(again.bagua_algorithm.state_dict()) == all_bits(
        model.bagua_algorithm.state_dict()
    )
    return choice_of(again), same, training.model_bits(again) == training.model_bits(model)


def test_a_checkpoint_brings_the_choice_and_its_residuals_without_measuring(ranks, tmp_path):
    assert ranks(2, resumed, str(tmp_path)) == [(("chosen", FOUR), True, True)] * 2


@training.with_group
def resumed_from_dcp(folder):
    model, optimizer, _ = auto_state()
    train(model, optimizer, 4)
    dcp.save({"m": model, "a": model.bagua_algorithm}, checkpoint_id=folder)
    again, _, _ = auto_state(link=None, seed=1)
    for _ in range(2):  # the first brings the choice, whose residuals the second one asks for
        dcp.load({"m": again, "a": again.bagua_algorithm}, checkpoint_id=folder)
    states = [all_bits(one.bagua_algorithm.state_dict()) for one in (model, again)]
    return choice_of(again), states[0] == states[1]


def test_distributed_checkpoints_bring_the_choice_then_its_residuals(ranks, tmp_path):
    assert ranks(2, resumed_from_dcp, str(tmp_path)) == [(("chosen", FOUR), True)] * 2


@training.with_group
def saved_too_early_and_damaged():
    model, optimizer = wrapped(AutoAlgorithm(most_steps=STEPS_OF_A_MEASUREMENT, **ONLY_EXACT))
    train(model, optimizer, 1)
    early = model.bagua_algorithm.state_dict()
    model.bagua_algorithm.load_state_dict(early)
    messages = [
        training.error_of(lambda state=state: model.bagua_algorithm.load_state_dict(state))
        for state in ({"rounds": 3}, {"choice": "?"}, {"choice": '{"algorithm": "qadam"}'})
    ]
    train(model, optimizer, 12, first=1)
    return early, messages, choice_of(model)


def test_a_state_from_before_the_choice_changes_nothing_and_others_are_refused(ranks):
    results = ranks(2, saved_too_early_and_damaged)
    early, messages, choice = results[0]
    assert early == {"choice": ""}
    assert "no 'choice': it is of another algorithm" in messages[0]
    assert all("names no algorithm" in message for message in messages[1:])
    assert choice == ("chosen", "gradient_allreduce")


@training.with_group
def alone_or_of_one_kind():
    model, optimizer = wrapped(AutoAlgorithm())
    train(model, optimizer, 2)
    only, its_optimizer = wrapped(AutoAlgorithm([Candidate("bytegrad", {"hierarchical": False})]))
    train(only, its_optimizer, 2)
    return choice_of(model), choice_of(only), only.bagua_stats()["choice"]["why"]


def test_one_rank_and_one_candidate_need_no_measuring(ranks):
    exact, only = ("chosen", "gradient_allreduce"), ("chosen", "bytegrad(hierarchical=False)")
    assert ranks(1, alone_or_of_one_kind)[0][:2] == (exact, only)
    for choice, second, why in ranks(2, alone_or_of_one_kind):
        assert (choice[0], second, why) == ("measuring", only, "the only candidate")


@training.with_group
def sparse_embedding():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.with_bagua([optimizer], AutoAlgorithm())
    for step in range(3):
        optimizer.zero_grad()
        model(torch.tensor([[step, dist.get_rank()]])).square().sum().backward()
        optimizer.step()
    return choice_of(model), training.bits(model.parameters())


def test_a_model_with_sparse_gradients_keeps_the_algorithm_that_takes_them(ranks):
    results = ranks(2, sparse_embedding)
    assert results[0] == results[1]
    assert results[0][0] == ("chosen", "gradient_allreduce")


@training.with_group
def profiles_that_differ():
    wrapped(AutoAlgorithm(profile=profile(SLOW if dist.get_rank() else FAST)))


def test_ranks_with_different_profiles_are_refused_at_the_wrap(ranks):
    with pytest.raises(Exception, match="differ in the model or the arguments of with_bagua"):
        ranks(2, profiles_that_differ)


def warnings_of_the_start():
    try:
        return training.warnings_of(bagua.init_process_group)
    finally:
        bagua.destroy_process_group()


def test_variables_of_baguas_autotuning_are_taken_with_a_word_on_rank_0(ranks):
    asked = {"BAGUA_AUTOTUNE": "1", "BAGUA_AUTOTUNE_MAX_SAMPLES": "30"}
    first, second = ranks(2, warnings_of_the_start, env=asked)
    assert second == []
    (said,) = first
    assert "BAGUA_AUTOTUNE, BAGUA_AUTOTUNE_MAX_SAMPLES: no effect" in said
    assert "Algorithm.init('auto')" in said
    assert ranks(2, warnings_of_the_start, env={"BAGUA_AUTOTUNE": "0"}) == [[], []]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"candidates": []}, "leaves nothing to choose"),
        ({"candidates": "bytegrad"}, r"a list of names: \['bytegrad'\]"),
        ({"candidates": ["qadam"]}, "'qadam' is not chosen by measuring"),
        ({"candidates": ["bytegrad", "bytegrad"]}, "is given twice"),
        ({"candidates": [Candidate("bytegrad", {"codec": "?"})]}, "bytegrad.codec='.'.*:"),
        ({"candidates": [3]}, "names or Candidate"),
        ({"max_error": -1.0}, "max_error=-1.0"),
        ({"most_steps": 0}, "most_steps=0"),
    ],
)
def test_arguments_are_checked_by_name(arguments, said):
    with pytest.raises((TypeError, ValueError), match=said):
        AutoAlgorithm(**arguments)


def test_a_profile_may_be_a_file(tmp_path):
    write_profile(profile(FAST), tmp_path / "run.json")
    assert AutoAlgorithm(profile=tmp_path / "run.json").profile == profile(FAST)
    with pytest.raises(OSError, match="missing"):
        AutoAlgorithm(profile=tmp_path / "missing.json")
