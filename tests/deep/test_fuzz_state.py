"""State dicts of a damaged or another file: refused with ValueError, nothing changed, or loaded."""

import copy
import hashlib
import io
import os
import resource
import zipfile

import bagua.torch_api as bagua
import numpy as np
import pytest
import torch
import torch.distributed as dist
from bagua._core.state import step_folder
from bagua._core.state.archive import load_archive
from mlbench_core.aggregation.pytorch.centralized import (
    PowerAggregation,
    SparsifiedAggregation,
)
from support import training
from support.every_algorithm import ALGORITHMS, WARM_UP, wrapped
from support.mutations import STRANGE, attempt, chances, changed_bytes, changed_value

MEMORYLESS = [name for name in ALGORITHMS if name.startswith(("gradient", "bytegrad"))]
STATES = 250
SEED = 30


def same(first, second):
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    return first == second


def load_many(owner, state):
    """Loads changed states; (those refused, those whose refusal changed something)."""
    refused, changed = 0, []
    for number, chance in chances(STATES, SEED):
        before = copy.deepcopy(owner.state_dict())
        _, message = attempt(ValueError, owner.load_state_dict, changed_value(chance, state))
        if not message:
            continue
        refused += 1
        after = owner.state_dict()
        if before.keys() != after.keys() or not all(same(before[k], after[k]) for k in before):
            changed.append((number, message))
    return refused, changed


@training.with_group
def load_into_algorithm(name):
    model = training.network()
    model, optimizer = wrapped(name, model)
    rank = dist.get_rank()
    training.train(model, optimizer, [training.batch(s, rank) for s in range(WARM_UP + 2)])
    if name == "async":
        bagua_algorithm = model.bagua_algorithm
        bagua_algorithm.abort(model)
    state = copy.deepcopy(model.bagua_algorithm.state_dict())
    outcome = load_many(model.bagua_algorithm, state)
    model.bagua_algorithm.load_state_dict(state)
    if name != "async":
        training.train(model, optimizer, [training.batch(9, rank)])
    return outcome


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_takes_any_state(ranks, name):
    for refused, changed in ranks(2, load_into_algorithm, name):
        # Where nothing is remembered a changed state is mostly an empty one.
        assert refused > (STATES * 0.2 if name not in MEMORYLESS else 0)
        assert changed == []


AGGREGATIONS = {
    "power": lambda model: PowerAggregation(model=model),
    "sparsified": lambda model: SparsifiedAggregation(model, ratio=0.2),
}


@training.with_group
def load_into_aggregation(name):
    model = training.network()
    aggregation = AGGREGATIONS[name](model)
    data = training.batch(0, dist.get_rank())
    training.squared_error(model, data).backward()
    aggregation.agg_grad()(model, "avg_world")
    state = copy.deepcopy(aggregation.state_dict())
    outcome = load_many(aggregation, state)
    aggregation.load_state_dict(state)
    aggregation.agg_grad()(model, "avg_world")
    return outcome


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_an_aggregation_takes_any_state(ranks, name):
    for refused, changed in ranks(2, load_into_aggregation, name):
        assert refused > STATES * 0.2
        assert changed == []


@training.with_group
def load_into_per_rank():
    model, optimizer = wrapped("decentralized-all", training.network())
    training.train(model, optimizer, [training.batch(0, dist.get_rank())])
    keeper = bagua.checkpoint.PerRank(model)
    own = f"rank{dist.get_rank()}"
    wrong = ([], {1: 2}, {}, {"rank7": {}}, {own: []}, {own: {}}, {own: {"model": {}}})
    messages = [training.error_of(lambda s=state: keeper.load_state_dict(s)) for state in wrong]
    state, refused, changed = copy.deepcopy(keeper.state_dict()), 0, []
    for number, chance in chances(STATES, SEED):
        before = model_and_momentum(model, optimizer)
        damaged = {own: changed_value(chance, state[own])}
        _, message = attempt(ValueError, keeper.load_state_dict, damaged)
        refused += bool(message)
        after = model_and_momentum(model, optimizer)
        if message and any(not same(a, b) for a, b in zip(before, after, strict=True)):
            changed.append((number, message))
        keeper.load_state_dict(state)
    training.train(model, optimizer, [training.batch(1, dist.get_rank())])
    return messages, refused, changed


def model_and_momentum(model, optimizer):
    states = [value for state in optimizer.state.values() for value in state.values()]
    return copy.deepcopy([*model.state_dict().values(), *states])


def test_per_rank_takes_any_state(ranks):
    for messages, refused, changed in ranks(2, load_into_per_rank):
        assert all(message.startswith("ValueError: ") for message in messages)
        assert refused > STATES * 0.2
        assert changed == []


LEAVES = {
    ("model", "weight"): torch.arange(6.0).reshape(2, 3),
    ("model", "bias"): torch.arange(3).to(torch.bfloat16),
    ("optimizer", "groups"): [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}, torch.ones(2)],
    ("optimizer", "strange"): [np.float32(1), {1: frozenset([2])}, np.arange(3), torch.ones(1)],
    ("step",): 3,
}
FILES = 400


def written(folder):
    place = step_folder.place_of(folder, 3)
    part = step_folder.part_of(step_folder.hidden(place), 0)
    step_folder.publish(place, step_folder.write(part, LEAVES, alike=[]))
    return place


def read_all(place):
    saved = step_folder.check(place, 0, 1)
    assert saved == 1
    return step_folder.read(step_folder.part_of(place, 0))


def forge_digests(place):
    """Digests that are right, as whoever changes a file can write them."""
    lines = ""
    for path in sorted(place.glob("rank-*/*")):
        data = path.read_bytes()
        digest = hashlib.blake2b(data).hexdigest()
        lines += f"{digest} {len(data)} {path.parent.name}/{path.name}\n"
    (place / "digests").write_text(lines + hashlib.blake2b(lines.encode()).hexdigest())


def archive_of(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def values_of(chance, data):
    """Another values.pt: changed bytes, a changed pickle, or changed values."""
    way = chance.randrange(3)
    if way == 0:
        return changed_bytes(chance, data)
    if way == 1:
        records = {
            name: changed_bytes(chance, record) if chance.random() < 0.4 else record
            for name, record in records_of(data).items()
        }
        return packed(records)
    content = torch.load(io.BytesIO(data), weights_only=True)
    while True:
        try:
            return archive_of(changed_value(chance, content))
        except Exception:  # noqa: BLE001 - a value that torch cannot save
            continue


def records_of(data):
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def packed(records, compression=zipfile.ZIP_STORED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, record in records.items():
            archive.writestr(name, record)
    return buffer.getvalue()


def test_any_files_of_a_checkpoint_are_read_or_damaged(tmp_path):
    place = written(tmp_path)
    files = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    refused = 0
    for number, chance in chances(FILES, SEED):
        path = chance.choice(sorted(files))
        data = files[path]
        path.write_bytes(
            values_of(chance, data) if path.name == "values.pt" else changed_bytes(chance, data)
        )
        if path.name != "digests" and chance.random() < 0.95:
            forge_digests(place)
        read, message = attempt(step_folder.Damaged, read_all, place)
        refused += read is None
        assert read is not None or str(place) in message, number
        assert message.isprintable(), number
        for name, whole in files.items():
            name.write_bytes(whole)
    assert FILES * 0.6 < refused < FILES
    assert read_all(place)[0].keys() == LEAVES.keys()


def pickle_of(*parts):
    """An archive with such a pickle: texts are operations, numbers are pushed."""
    program = b"\x80\x02"
    for part in parts:
        program += part if isinstance(part, bytes) else b"\x8a\x08" + part.to_bytes(8, "little")
    return packed({"archive/data.pkl": program + b".", "archive/version": b"3\n"})


MANY = 2**36
BOMB = packed({"archive/data.pkl": b"\x80\x02N.", "archive/data/0": bytes(2**28)}, 8)
ARCHIVES = {
    "bytearray of a number": pickle_of(b"c__builtin__\nbytearray\n", MANY, b"\x85R"),
    "storage of a number": pickle_of(b"ctorch\nFloatStorage\n", MANY, b"\x85R"),
    "storage of the memo": pickle_of(
        b"ctorch\nFloatStorage\nq\x00X\x01\x00\x00\x00ah\x00", MANY, b"\x85R"
    ),
    "tensor of a number": pickle_of(b"ctorch\nFloatTensor\n", MANY, b"\x85R"),
    "code": pickle_of(b"cos\nsystem\nX\x02\x00\x00\x00ls\x85R"),
    "compressed": BOMB,
    "deep": pickle_of(b"]" * 10**5 + b"a" * (10**5 - 1)),
    "doubled": pickle_of(b"K\x01" + b"q\x00h\x00h\x00\x86" * 60),
    "within itself": pickle_of(b"]q\x00h\x00a"),
    "sets of a shared list": pickle_of(b"]q\x00c__builtin__\nset\nh\x00\x85R"),
    "nothing": b"",
    "older format": b"\x80\x02N.",
}


def test_an_archive_that_allocates_by_its_numbers_is_refused_before():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for what, data in ARCHIVES.items():
        loaded, message = attempt(Exception, load_archive, data)
        assert loaded is None, what
        assert message or data == b"", what
        assert "alloc" not in message, what
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**19, "KiB"


def test_plain_values_of_every_kind_come_back_from_an_archive():
    values = [v for v in STRANGE if not isinstance(v, (type, range)) and v not in (b"\xff",)]
    values += [bytearray(b"ab"), b"cd", 1j, {1}, torch.float16, torch.Size([2]), torch.eye(2)]
    again = (0.9, [0.99])
    values += [[again, again, {"a": again[1]}]]
    values += [torch.device("cpu"), torch.eye(2).to_sparse(), torch.nn.Parameter(torch.ones(1))]
    for value in values:
        if isinstance(value, str) and "\ud7ff" in value:
            continue
        assert repr(load_archive(archive_of(value))) == repr(value)


def test_what_is_no_regular_file_of_the_folder_is_damaged_at_once(tmp_path):
    place = written(tmp_path / "this")
    other = written(tmp_path / "other")
    for name in ("digests", "rank-0/values.pt", "rank-0/__0_0.distcp"):
        path, whole = place / name, (place / name).read_bytes()
        makes = [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")]
        makes.append(lambda path, name=name: path.symlink_to(other / name))
        path.unlink()
        for make in makes:
            make(path)
            _, message = attempt(step_folder.Damaged, read_all, place)
            assert "it is a link" in message or "it is not a regular file" in message
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        path.write_bytes(whole)
    (place / "rank-0").rename(tmp_path / "moved")
    (place / "rank-0").symlink_to(tmp_path / "moved")
    assert "it is a link" in attempt(step_folder.Damaged, read_all, place)[1]
