"""`write_stats` through TensorBoard's own writer and reader."""

import math

import bagua.torch_api as bagua
import pytest
import torch
import torch.distributed as dist
from bagua.comm_hooks import register
from bagua.torch_api.algorithms import ByteGradAlgorithm, GradientAllReduceAlgorithm
from bagua.torch_api.data_parallel import DistributedDataParallel
from support import training
from support.cases import over
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

PER_ROUND = {
    "bytes_sent_per_round",
    "bytes_received_per_round",
    "messages_sent_per_round",
    "messages_received_per_round",
    "wire_ms_per_round",
    "encode_ms_per_round",
    "waiting_ms_per_round",
    "busy_ms_per_round",
    "nonfinite_rounds",
}
CLOCKED = {"hidden_ms_per_round", "exposed_ms_per_round", "hidden_share"}


class Notebook:
    """Writer that keeps what it is given."""

    def __init__(self):
        self.lines = []

    def add_scalar(self, tag, value, step):
        self.lines.append((tag, value, step))


def wrapped(algorithm=None):
    model = training.network()
    optimizer = training.sgd(model)
    model.with_bagua([optimizer], algorithm or GradientAllReduceAlgorithm())
    return model, optimizer


@training.with_group
def train_and_write(folder):
    model, optimizer = wrapped()
    writer = SummaryWriter(f"{folder}/{dist.get_rank()}")
    written, before = [], model.bagua_stats()
    for steps in (3, 2):
        training.train_on_ranks(model, optimizer, steps)
        now = model.bagua_stats()
        written.append((bagua.write_stats(model, writer), before, now))
        before = now
    writer.close()
    return written


def test_tensorboard_reads_what_was_written(ranks, tmp_path):
    results = ranks(2, train_and_write, str(tmp_path))
    for rank, written in enumerate(results):
        events = EventAccumulator(str(tmp_path / str(rank))).Reload()
        assert set(events.Tags()["scalars"]) == {f"bagua/{tag}" for tag in PER_ROUND | CLOCKED}
        for position, (values, before, now) in enumerate(written):
            rounds = now["rounds"] - before["rounds"]
            assert rounds == (3, 2)[position]
            for tag, value in values.items():
                event = events.Scalars(f"bagua/{tag}")[position]
                assert event.step == now["rounds"]
                assert event.value == pytest.approx(value, rel=1e-5)
            wire = now["total"]["wire_ns"] - before["total"]["wire_ns"]
            assert values["wire_ms_per_round"] == pytest.approx(wire / 1e6 / rounds)
            exposed = now["exposed_ns"] - before["exposed_ns"]
            assert values["exposed_ms_per_round"] == pytest.approx(exposed / 1e6 / rounds)
            assert 0.0 <= values["hidden_share"] <= 1.0
        first, second = (values["bytes_sent_per_round"] for values, _, _ in written)
        exact = 4 * sum(p.numel() for p in training.network().parameters())
        assert exact < second < 1.5 * exact, "gradients, and the ranks' agreement"
        assert math.isclose(first, second)


@training.with_group
def tell_each_writer_its_own_interval():
    model, optimizer = wrapped()
    early, late = Notebook(), Notebook()
    assert bagua.write_stats(model, early) == {}
    training.train_on_ranks(model, optimizer, 2)
    assert bagua.write_stats(model, early, step=70) != {}
    assert bagua.write_stats(model, early) == {}, "no round since"
    training.train_on_ranks(model, optimizer, 1)
    both = bagua.write_stats(model, early), bagua.write_stats(model, late, prefix="other")
    steps = {step for _, _, step in early.lines}
    prefixes = {tag.split("/")[0] for tag, _, _ in late.lines}
    model.with_bagua([optimizer], ByteGradAlgorithm(hierarchical=False))
    training.train_on_ranks(model, optimizer, 1)
    anew = bagua.write_stats(model, early)
    stats = model.bagua_stats()
    tables = [*stats["communicators"].values(), stats["control"]]
    return both, steps, prefixes, anew, sum(table["bytes_sent"] for table in tables)


def test_each_writer_has_its_own_interval(ranks):
    for both, steps, prefixes, anew, sent in ranks(2, tell_each_writer_its_own_interval):
        first, second = both
        assert first["bytes_sent_per_round"] == pytest.approx(second["bytes_sent_per_round"])
        assert first["wire_ms_per_round"] != second["wire_ms_per_round"]
        assert steps == {70, 3}
        assert prefixes == {"other"}
        assert anew["bytes_sent_per_round"] == sent, "one round of the new buckets"


@training.with_group
def write_after_new_buckets(rounds):
    model, optimizer = wrapped()
    training.train_on_ranks(model, optimizer, 2)
    bagua.write_stats(model, writer := Notebook())
    model.bagua_ddp.rebuild()
    training.train_on_ranks(model, optimizer, rounds)
    return bagua.write_stats(model, writer), bagua.write_stats(model, Notebook())


@over(rounds=(1, 2, 5))
def test_counters_of_new_buckets_are_counted_from_their_start(ranks, rounds):
    for written, from_start in ranks(2, write_after_new_buckets, rounds):
        assert written == from_start


@training.with_group
def write_of_everything_that_has_statistics():
    ddp = DistributedDataParallel(training.network())
    optimizer = training.sgd(ddp)
    torchs = torch.nn.parallel.DistributedDataParallel(training.network())
    handle = register(torchs, ByteGradAlgorithm(hierarchical=False))
    training.train_on_ranks(ddp, optimizer, 2)
    training.train_on_ranks(torchs, training.sgd(torchs), 2)
    return [set(bagua.write_stats(source, Notebook())) for source in (ddp, handle)]


def test_the_class_and_hooks_have_statistics_too(ranks):
    for of_class, of_hook in ranks(2, write_of_everything_that_has_statistics):
        assert of_class == PER_ROUND | CLOCKED
        assert of_hook == PER_ROUND


def test_wrong_arguments_are_named():
    with pytest.raises(TypeError, match=r"module after bagua.wrap, .* not of Linear"):
        bagua.write_stats(torch.nn.Linear(1, 1), Notebook())
    with pytest.raises(TypeError, match="has no add_scalar"):
        bagua.write_stats(torch.nn.Linear(1, 1), object())
