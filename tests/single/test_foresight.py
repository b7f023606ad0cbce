"""The cost model against closed forms, and its inputs."""

import dataclasses
import inspect
import json
import random
import time

import pytest
from bagua._foresight import profile_file
from bagua._foresight.candidate import Candidate
from bagua._foresight.cost import KNOWN, predict
from bagua._foresight.model.events import Timeline
from bagua._foresight.model.plan import buckets_of
from bagua._foresight.profile import BucketProfile, CodecSpeed, Link, Profile
from bagua.torch_api.algorithms import GlobalAlgorithmRegistry

NUMEL = 1 << 20
LINK = Link(latency=1e-3, bandwidth=1e7)
FAST = Link(latency=0.0, bandwidth=1e15)
FREE = 1e18  # bytes a second: passes over memory take no time
FLAT = {"hierarchical": False}
CANDIDATES = [
    Candidate("gradient_allreduce"),
    Candidate("gradient_allreduce", {"hierarchical": "sharded"}),
    Candidate("bytegrad", FLAT),
    Candidate("bytegrad", {"hierarchical": True, "codec": "int4_block", "error_feedback": True}),
    Candidate("qadam", FLAT),
    Candidate("power_sgd", {"rank": 4}),
    Candidate("sparse"),
    Candidate("sparse", {"random_sparse": True}),
    Candidate("decentralized", {**FLAT, "peer_selection_mode": "shift_one"}),
    Candidate("decentralized", {"communication_interval": 4}),
    Candidate("low_precision_decentralized", FLAT),
    Candidate("async"),
    Candidate("diloco", {"interval": 10, "codec": "int4_block"}),
    Candidate("diloco", {"interval": 20, "fragments": 2, "overlap_steps": 5}),
    Candidate("sparse_loco"),
]


def profile(ranks=2, *, buckets=1, compute=1.0, optimizer=0.25, link=LINK, **others):
    """A training of 4 MiB buckets that become ready at equal distances in backward."""
    ready = [(compute - optimizer) * (i + 1) / buckets for i in range(buckets)]
    figures = {"copy": FREE, "cores": 2.0} | others
    return Profile(
        ranks=ranks,
        nodes=figures.pop("nodes", (1,) * ranks),
        compute=compute,
        optimizer=optimizer,
        buckets=tuple(BucketProfile(NUMEL, 4 * NUMEL, at, ((1024, 1024),)) for at in ready),
        between=link,
        **figures,
    )


@pytest.mark.parametrize("ranks", [2, 3, 8, 1000])
def test_one_exact_bucket_takes_the_time_of_a_ring(ranks):
    found = predict(profile(ranks), Candidate("gradient_allreduce"))
    sent = 2 * 4 * NUMEL * (ranks - 1) // ranks
    ring = sent / LINK.bandwidth + 2 * (ranks - 1) * LINK.latency
    assert found.bytes_sent == sent
    assert found.step == pytest.approx(0.75 + ring + 0.25)
    assert found.exposed == pytest.approx(ring)
    assert found.busy == pytest.approx(ring)


def test_a_bucket_of_early_gradients_is_hidden_behind_backward():
    early = dataclasses.replace(
        profile(), buckets=(BucketProfile(NUMEL, 4 * NUMEL, 0.1, ((1024, 1024),)),)
    )
    found = predict(early, Candidate("gradient_allreduce"))
    assert found.step == pytest.approx(1.0)
    assert found.exposed == pytest.approx(0.0, abs=1e-9)
    assert found.busy == pytest.approx(0.42143, rel=1e-3)


def test_buckets_of_a_lane_follow_each_other():
    found = predict(profile(buckets=3), Candidate("gradient_allreduce"))
    for before, after in zip(found.spans, found.spans[1:], strict=False):
        assert after.start == pytest.approx(max(before.end, after.ready))
    assert found.step == pytest.approx(found.spans[-1].end + 0.25)


def test_lanes_share_the_link_and_not_the_latency():
    slow = dataclasses.replace(LINK, latency=0.2)
    one = predict(profile(buckets=4, link=slow), Candidate("gradient_allreduce"))
    two = predict(profile(buckets=4, link=slow), Candidate("gradient_allreduce", lanes=2))
    assert two.step < one.step - 0.2
    assert two.step > 4 * 4 * NUMEL / LINK.bandwidth


def test_encoding_on_the_only_core_takes_its_time_from_training():
    # 1 s encodes and decodes; nothing is on the wire.
    speed = CodecSpeed(encode=4 * NUMEL, decode=FREE, decode_add=FREE)
    figures = {"codecs": {"block_uint8": speed}, "link": FAST}
    early = [BucketProfile(NUMEL, 4 * NUMEL, 0.0)]
    shared, own = (
        dataclasses.replace(profile(**figures, cores=cores), buckets=tuple(early))
        for cores in (1.0, 2.0)
    )
    candidate = Candidate("bytegrad", FLAT)  # half of the bucket, and twice half of it
    assert predict(own, candidate).step == pytest.approx(1.5 + 0.25, rel=1e-3)
    assert predict(shared, candidate).step == pytest.approx(0.75 + 1.5 + 0.25, rel=1e-3)


def test_rounds_cost_their_share_of_a_step():
    every_step = predict(profile(), Candidate("gradient_allreduce"))
    found = predict(profile(), Candidate("diloco", {"interval": 10}))
    assert found.step - 1.0 == pytest.approx((every_step.step - 1.0) / 10, rel=1e-3)
    hidden = predict(profile(), Candidate("diloco", {"interval": 10, "overlap_steps": 5}))
    assert hidden.step == pytest.approx(1.0)
    assert hidden.bytes_sent == found.bytes_sent


def test_stragglers_slow_those_who_wait_for_all_in_each_step_most():
    slow = profile(64, spread=0.1, link=FAST)
    exact, rounds, alone = (
        predict(slow, Candidate(name)).step for name in ("gradient_allreduce", "diloco", "async")
    )
    assert exact == pytest.approx(1.0 + 0.1 * 2.35, rel=0.02)  # expected maximum of 64 normals
    assert rounds == pytest.approx(1.0 + 0.1 * 2.35 / 10, rel=0.02)  # 100 steps: a tenth
    assert alone == pytest.approx(1.0, rel=0.02)


# Asynchronous averages, which take time from training, are fewer on a slow link.
@pytest.mark.parametrize(
    "candidate", [c for c in CANDIDATES if c.algorithm != "async"], ids=Candidate.label
)
def test_a_step_is_never_faster_on_a_slower_link(candidate):
    own = profile(8, buckets=3, nodes=(2,) * 4, copy=5e9, cores=1.0)
    for ranks in (2, 8, 64):
        for slower, faster in ((1e6, 1e7), (1e7, 1e9), (1e9, 1e12)):
            steps = [
                predict(own, candidate, ranks=ranks, between=Link(1e-4, speed), inside=FAST).step
                for speed in (slower, faster)
            ]
            assert steps[0] >= steps[1] * (1 - 1e-9) >= own.compute * 0.999


@pytest.mark.parametrize("candidate", CANDIDATES, ids=Candidate.label)
def test_one_rank_pays_for_nothing(candidate):
    found = predict(profile(), candidate, ranks=1)
    assert (found.step, found.exposed, found.bytes_sent) == (1.0, 0.0, 0)


def test_ranks_of_one_node_use_the_link_inside():
    inside = Link(0.0, 1e9)
    node = profile(4, nodes=(4,), inside=inside)
    assert predict(node, Candidate("gradient_allreduce")).exposed == pytest.approx(
        1.5 * 4 * NUMEL / 1e9
    )
    two = predict(node, Candidate("bytegrad", {"hierarchical": True}), ranks=8)
    flat = predict(node, Candidate("bytegrad", FLAT), ranks=8)
    assert two.step < flat.step  # one rank of a node on its card instead of four


def test_a_thousand_ranks_are_predicted_in_milliseconds():
    large = profile(16, buckets=40, copy=5e9)
    start = time.process_time()
    for candidate in CANDIDATES:
        predict(large, candidate, ranks=1024)
    assert time.process_time() - start < 5.0  # 0.4 s on a core of its own


def test_buckets_of_another_size_hold_the_same_tensors():
    shapes = tuple((64, 64) for _ in range(32))
    whole = dataclasses.replace(
        profile(), buckets=(BucketProfile(32 * 4096, 4 * 32 * 4096, 0.64, shapes),)
    )
    cut = buckets_of(whole, 4 * 4 * 4096)
    assert [len(bucket.shapes) for bucket in cut] == [4] * 8
    assert sum(bucket.numel for bucket in cut) == whole.numel
    assert [bucket.ready for bucket in cut] == pytest.approx([0.08 * (i + 1) for i in range(8)])
    assert buckets_of(whole, None) == whole.buckets


def test_the_clock_conserves_work():
    """On one core the end is the sum of all work, whatever the order."""
    generator = random.Random(0)
    for _ in range(20):
        timeline, total, tasks = Timeline(1.0), 0.0, []
        for number in range(30):
            work = generator.random()
            after = generator.sample(tasks, min(2, number)) if number % 3 else []
            tasks.append(timeline.add(work, cores=1.0, after=after))
            total += work
        assert timeline.run() == pytest.approx(total)
        assert max(timeline.end) == pytest.approx(total)


def test_a_transfer_that_wants_little_of_a_core_gets_it():
    timeline = Timeline(1.0)
    wire = timeline.add(1.0, cores=0.25, link="between")
    training = timeline.add(1.0, cores=1.0)
    assert timeline.run() == pytest.approx(1.25)
    assert timeline.end[wire] == pytest.approx(1.0)
    assert timeline.end[training] == pytest.approx(1.25)


@pytest.mark.parametrize(
    ("cores", "work", "end"),
    [(1.0, 1.0, 0.5), (1.0, 0.25, 0.25), (2.0, 1.0, 0.0), (0.5, 0.25, 0.5)],
)
def test_a_thread_that_wakes_waits_while_all_cores_are_busy(cores, work, end):
    """Beside ``work`` seconds of training; ranks that outnumber the cores never leave one free."""
    timeline = Timeline(cores)
    wake = timeline.add(0.5, wakes=True)
    timeline.add(work, cores=1.0)
    timeline.run()
    assert timeline.end[wake] == pytest.approx(end)


@pytest.mark.parametrize(("cores", "waits"), [(2.0, 0.0), (0.5, 1.0)])
def test_each_small_all_reduce_waits_for_a_core(cores, waits):
    """Two in a row of PowerSGD, after a training that ends with its only bucket."""
    link, late = Link(1e-3, 1e15), {"optimizer": 0.0, "cores": cores}
    idle = predict(profile(4, link=link, **late), Candidate("power_sgd", {"rank": 4}))
    wakes = dataclasses.replace(link, wake=0.01)
    busy = predict(profile(4, link=wakes, **late), Candidate("power_sgd", {"rank": 4}))
    assert busy.step - idle.step == pytest.approx(waits * 0.02)


def test_equal_candidates_are_one_and_have_one_label():
    one = Candidate("bytegrad", {"codec": "int4_block", "error_feedback": True})
    other = Candidate("bytegrad", {"error_feedback": True, "codec": "int4_block"})
    assert one == other
    assert len({one, other}) == 1
    assert one.label() == "bytegrad(codec='int4_block', error_feedback=True)"
    assert one != Candidate("bytegrad", one.arguments, lanes=2)


def test_a_profile_survives_its_file(tmp_path):
    own = profile(
        4,
        nodes=(2, 2),
        inside=Link(1e-6, 1e10, 1e-10, messages=5e9, wake=1e-3),
        codecs={"int4_block": CodecSpeed(1e9, 2e9, 3e9)},
        errors={"int4_block": 0.1},
        speeds={"top_k": 1e9},
        spread=0.05,
    )
    profile_file.write_profile(own, tmp_path / "run.json")
    assert profile_file.read_profile(tmp_path / "run.json") == own


def changed(**changes):
    return {**profile_file.values_of(profile()), **changes}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no JSON"),
        ("[]", "no profile of bagua"),
        (json.dumps(changed(bagua_profile=2)), "version 2, and this bagua reads version 1"),
        (json.dumps(changed(ranks=3)), r"nodes=\(1, 1\) do not hold ranks=3"),
        (json.dumps(changed(compute=-1.0)), "compute=-1.0 must be a positive number"),
        (json.dumps(changed(buckets=[])), "there are no buckets"),
        (json.dumps(changed(surprise=1)), "surprise"),
        (json.dumps({"bagua_profile": 1, "ranks": 2}), "the profile has no 'nodes'"),
        (json.dumps(changed(optimizer=0.9)), "a bucket is ready after 0.75 s"),
    ],
    ids=lambda value: value[:40] if "{" not in value else "",
)
def test_files_that_hold_no_profile_say_why(tmp_path, text, message):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        profile_file.read_profile(tmp_path / "run.json")
    assert "run.json" in str(caught.value)


def test_unknown_algorithms_are_refused_by_name():
    with pytest.raises(ValueError, match="know algorithm 'magic'; it knows async, bytegrad"):
        predict(profile(), Candidate("magic"))
    with pytest.raises(ValueError, match="ranks=0 must be at least 1"):
        predict(profile(), Candidate("async"), ranks=0)


def test_the_model_has_the_names_and_defaults_of_the_algorithms():
    for name, arguments in KNOWN.items():
        parameters = inspect.signature(GlobalAlgorithmRegistry.get(name)).parameters
        for argument, default in arguments.items():
            assert parameters[argument].default == default, f"{name}: {argument}"
