"""Checkpoints that are cut, changed, missing, or cannot be written: the one before is used."""

import errno
import hashlib
import itertools
import os
import re
import resource
import shutil
from pathlib import Path

import bagua.torch_api as bagua
import torch
import torch.distributed as dist
from bagua._core.state import step_folder as _step_folder
from bagua.torch_api.checkpoint import load_latest, save_checkpoint
from support import training
from support.checkpoint_training import file, refusal, steps, train_and_save, wrapped


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def cut_to_nothing(path):
    path.write_bytes(b"")


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def replace_by_another(path):
    """The file of the same name of another training."""
    other = path.parents[3] / "other"
    path.write_bytes((other / path.relative_to(path.parents[2])).read_bytes())


DAMAGE = {
    "truncated": (cut, "truncated"),
    "empty": (cut_to_nothing, "truncated: it has 0 bytes"),
    "corrupted": (flip_a_bit, "corrupted"),
    "missing": (lambda path: path.unlink(), "cannot be read.*No such file"),
    "of-another-saving": (replace_by_another, "corrupted|truncated"),
}


@training.with_group
def load(name, folder):
    model, _, state = wrapped(name, seed=3)
    steps_loaded = []
    warned = training.warnings_of(lambda: steps_loaded.append(load_latest(folder, state)))
    bits = training.bits(model.parameters())
    return steps_loaded[0], [w for w in warned if "checkpoints refused" in w], bits


def test_a_file_that_is_damaged_is_refused_and_all_ranks_load_the_one_before(ranks, tmp_path):
    folder = tmp_path / "this"
    ranks(2, train_and_save, "sparse", str(tmp_path / "other"), 6, 1)
    ranks(2, train_and_save, "sparse", str(folder), 4)
    expected = ranks(2, load, "sparse", str(folder))
    ranks(2, train_and_save, "sparse", str(folder), 6)
    for (damage, (spoil, reason)), rank in itertools.product(DAMAGE.items(), (0, 1)):
        path = file(folder, 6, rank)
        whole = path.read_bytes()
        spoil(path)
        results = ranks(2, load, "sparse", str(folder))
        assert [(step, bits) for step, _, bits in results] == [(4, expected[0][2])] * 2, damage
        said = results[0][1] + results[1][1]
        assert len(said) == len(set(said)), "once per job"
        assert any(f"{path}: " in text and re.search(reason, text) for text in said), said
        assert all("Loaded instead: step 4" in text for text in said)
        path.write_bytes(whole)


def test_with_damaged_files_only_loading_raises(ranks, tmp_path):
    ranks(2, train_and_save, "sparse", str(tmp_path), 2)
    cut(file(tmp_path, 2, 1))
    first, second = ranks(2, refusal, "sparse", str(tmp_path))
    for error in (first, second):
        assert error.startswith(f"BaguaError: {tmp_path}: none of the checkpoints there can be")
    assert f"{file(tmp_path, 2, 1)}: truncated" in second


def test_a_first_checkpoint_that_was_never_finished_is_as_good_as_none(ranks, tmp_path):
    ranks(2, train_and_save, "sparse", str(tmp_path), 2)
    (tmp_path / "step-000000002").rename(tmp_path / ".step-000000002.part")
    for step, warned, _ in ranks(2, load, "sparse", str(tmp_path)):
        assert (step, warned) == (None, [])
    assert ranks(2, load, "sparse", str(tmp_path / "not-there"))[0][:2] == (None, [])


@training.with_group
def save_with_a_full_disk(folder):
    model, optimizer, state = wrapped("sparse")
    steps(model, optimizer, [0])
    save_checkpoint(folder, state, 1)
    steps(model, optimizer, [1])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        error = training.error_of(lambda: save_checkpoint(folder, state, 2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    again = load_latest(folder, wrapped("sparse", seed=1)[2])
    save_checkpoint(folder, state, 2)
    return error, again, load_latest(folder, wrapped("sparse", seed=1)[2])


def test_a_full_disk_loses_nothing_and_raises_on_all(ranks, tmp_path):
    (other, *others), (own, *own_others) = ranks(2, save_with_a_full_disk, str(tmp_path))
    assert f"OSError: [Errno {errno.EFBIG}]" in own
    assert other.startswith("BaguaError: save_checkpoint: rank(s) [1] could not write step 2")
    assert others == own_others == [1, 2]
    assert not list(tmp_path.glob(".*")), "nothing half-written stays"


class Code:
    def __init__(self, number):
        self.number = number


class Holder:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value() if callable(self.value) else self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


@training.with_group
def save_what_cannot_be_saved(folder):
    one = dist.get_rank() == 1

    def refused(state, step):
        return training.error_of(lambda: save_checkpoint(folder, state, step))

    return [
        refused({"x": Holder(re.compile("a") if one else 0)}, 1),
        refused({"x": Holder(0)}, 7 if one else 1),
        refused({"x": {"value": 1}}, 1),
        refused({"x": Holder(1)}, -1),
    ]


def test_saving_refuses_values_that_loading_would_refuse(ranks, tmp_path):
    (other, at_first, *_), (code, step, plain, negative) = ranks(
        2, save_what_cannot_be_saved, str(tmp_path)
    )
    assert code.startswith("TypeError: the state has values that cannot be loaded: ")
    assert "re._compile, which is not plain data" in code
    assert "rank(s) [1] could not write step 1" in other
    assert "rank(s) [1] could not write step 1" in at_first
    assert step == "ValueError: save_checkpoint: step=7 here, 1 on rank 0"
    assert plain.startswith("TypeError: state['x'] is a dict, which has no state_dict")
    assert negative.startswith("ValueError: save_checkpoint: step=-1 must not be negative")


@training.with_group
def load_a_value_of_a_class(folder):
    save_checkpoint(folder, {"x": Holder(Code(3))}, 1)
    knows, other = Holder(Code(0)), Holder(None)
    error = training.error_of(lambda: load_latest(folder, {"x": other}))
    load_latest(folder, {"x": knows})
    return error, other.value, knows.value.number


def test_a_value_of_a_class_is_loaded_where_the_class_is_known(ranks, tmp_path):
    for error, other, number in ranks(2, load_a_value_of_a_class, str(tmp_path)):
        assert ".Code', which this rank's own optimizer does not hold" in error
        assert (other, number) == (None, 3)


@training.with_group
def load_under_another_name(folder):
    kept = Holder([1, (2.0, "three"), {"four": None}])
    save_checkpoint(folder, {"kept": kept}, 1)
    empty = Holder(None)
    error = training.error_of(lambda: load_latest(folder, {"other": empty}))
    load_latest(folder, {"kept": empty})
    return error, empty.value


def test_names_that_were_not_saved_are_listed(ranks, tmp_path):
    error, value = ranks(1, load_under_another_name, str(tmp_path))[0]
    assert "has nothing under ['other'], only under ['kept']" in error
    assert value == [1, (2.0, "three"), {"four": None}]


def save_here(folder, step, value=0, keep=2):
    saved = []

    def save():
        saved.append(save_checkpoint(folder, {"x": Holder(value)}, step, keep=keep))
        raise StopIteration

    error = training.error_of(save)
    return None if saved else error


def fail():
    raise ZeroDivisionError("of the user")


@training.with_group
def save_apart(folder):
    """Everything that keeps rank 1's part from where the others look for it."""
    rank, errors = dist.get_rank(), {}
    other = f"{folder}/rank-{rank}"  # as disks of the machines, mounted under one name
    errors["own disks"] = save_here(other, 1)
    os.makedirs(other, exist_ok=True)
    before = os.getcwd()
    os.chdir(other)
    errors["relative path"] = save_here("here", 1)
    os.chdir(before)
    errors["state_dict raises"] = save_here(folder, 1, fail if rank else 0)
    errors["not a path"] = save_here(None if rank else folder, 1)
    errors["not a step"] = save_here(folder, 1.5 if rank else 1)
    errors["not a number"] = save_here(folder, 1, keep=None if rank else 2)
    errors["quantised"] = save_here(
        folder, 1, torch.quantize_per_tensor(torch.ones(1), 1, 0, torch.qint8) if rank else 0
    )
    Path(f"{folder}/file").touch()
    errors["a file"] = save_here(f"{folder}/file", 1)
    bagua.barrier()
    return errors, save_here(folder, 1), load_latest(folder, {"x": Holder(None)})


def test_a_part_that_is_not_where_the_others_look_fails_on_all_ranks(ranks, tmp_path):
    (first, *ends), (second, *other_ends) = ranks(2, save_apart, str(tmp_path))
    assert ends == other_ends == [None, 1]
    reasons = {
        "own disks": "is not the folder that rank 0 sees as .*give a folder of a file system",
        "relative path": "rank-1/here is not the folder that rank 0 sees as .*rank-0/here: give",
        "state_dict raises": "ZeroDivisionError: of the user",
        "not a path": "TypeError: .*NoneType",
        "not a step": "TypeError: 'float' object cannot be interpreted as an integer",
        "not a number": "TypeError: .*NoneType",
        "quantised": "TypeError: .*is of dtype torch.qint8.*dequantize",
    }
    for what, reason in reasons.items():
        assert re.search(reason, second[what]), second[what]
        told = first[what]
        assert told.startswith("BaguaError: save_checkpoint: rank(s) [1] could not write step 1: ")
        assert re.search(reason, told), told
        assert told.endswith("; the checkpoints before it are kept")
    assert first["a file"].startswith(("NotADirectoryError", "FileExistsError"))
    assert "rank(s) [0] could not write step 1: " in second["a file"]


def when(name, act):
    """Acts behind the next call of a function of the folder, as somebody else at that moment."""
    function = getattr(_step_folder, name)

    def call(*arguments, **more):
        setattr(_step_folder, name, function)
        result = function(*arguments, **more)
        act()
        return result

    setattr(_step_folder, name, call)


@training.with_group
def save_beside_others(folder):
    rank, errors, folder = dist.get_rank(), {}, Path(folder)
    errors["first"] = save_here(folder, 1)
    place = folder / "step-000000002"

    def before(name, act):
        if rank == 0:
            when(name, act)

    before("begin", lambda: shutil.rmtree(folder / ".step-000000002.part"))
    errors["removed at first"] = save_here(folder, 2)
    if rank == 1:
        when("write", lambda: shutil.rmtree(folder / ".step-000000002.part" / "rank-1"))
    errors["removed when written"] = save_here(folder, 2)
    before("publish", lambda: shutil.rmtree(place))
    errors["removed when published"] = save_here(folder, 2)
    before("publish", lambda: (place / "digests").write_text("of another training"))
    errors["replaced when published"] = save_here(folder, 2)
    bagua.barrier()
    if rank == 0:
        shutil.copytree(folder / "step-000000001", folder / "step-000000009")
    errors["another training"] = save_here(folder, 2)
    errors["again"] = save_here(folder, 2)
    return errors, load_latest(folder, {"x": Holder(None)})


def test_files_that_change_while_they_are_saved_fail_on_all_ranks(ranks, tmp_path):
    for errors, loaded in ranks(2, save_beside_others, str(tmp_path)):
        assert (errors.pop("first"), errors.pop("again"), loaded) == (None, None, 9)
        strange = errors.pop("another training")
        assert "another training has written step(s) [9] into" in strange
        for what, error in errors.items():
            assert re.search(r"other training|rank\(s\) \[[01]\] could not", error), (what, error)
    assert len(errors) == 4


@training.with_group
def load_apart(folder):
    rank = dist.get_rank()
    if rank == 1:
        save = _step_folder.write(
            _step_folder.part_of(_step_folder.hidden(Path(folder) / "1" / "step-000000004"), 0),
            {("x", "value"): 1},
            alike=[],
        )
        _step_folder.publish(Path(folder) / "1" / "step-000000004", save)
    bagua.barrier()
    return training.error_of(lambda: load_latest(f"{folder}/{rank}", {"x": Holder(None)}))


def test_a_checkpoint_that_rank_0_does_not_see_is_not_passed_over(ranks, tmp_path):
    first, second = ranks(2, load_apart, str(tmp_path))
    reason = "has step 4, and rank 0 sees no step there: give a folder that all ranks share"
    assert second.startswith("FileNotFoundError: load_latest: ")
    assert first.startswith("BaguaError: load_latest: rank(s) [1] could not look into ")
    assert reason in first
    assert reason in second


@training.with_group
def count_messages(folder):
    comm = bagua.communication.get_default_group().get_global_communicator()
    main = bagua.communication.get_default_group().connections
    save_here(folder, 1)
    before = comm.traffic()["messages_sent"], main.main_traffic()["messages_sent"]
    save_here(folder, 2)
    after = comm.traffic()["messages_sent"], main.main_traffic()["messages_sent"]
    return [late - early for late, early in zip(after, before, strict=True)]


def test_a_save_takes_six_messages_one_after_the_other(ranks, tmp_path):
    results = ranks(2, count_messages, str(tmp_path))
    assert all(0 < sum(counts) <= 6 for counts in results), results


@training.with_group
def load_strange(folder):
    return training.error_of(lambda: load_latest(folder, {"x": Holder(None)}))


def test_a_hostile_part_is_damaged_on_all_ranks(ranks, tmp_path):
    """With right digests: Note [Files of others]."""
    ranks(2, save_two, str(tmp_path))
    part = tmp_path / "step-000000001" / "rank-1"
    whole = torch.load(part / "values.pt", weights_only=True)
    for change in ({"leaves": None}, {"more": {}}, {"more": {"alike": [("y",)]}}, {"places": {}}):
        torch.save({**whole, **change}, part / "values.pt")
        forge_digests(part.parent)
        for error in ranks(2, load_strange, str(tmp_path)):
            assert error.startswith("BaguaError: "), (change, error)
            assert "none of the checkpoints there can be loaded" in error
            assert str(part) in error, (change, error)
            assert "cannot be understood" in error


@training.with_group
def save_two(folder):
    value = torch.ones(2) + dist.get_rank()
    return save_here(folder, 1, value)


def forge_digests(place):
    files = sorted(path for path in place.glob("rank-*/*") if path.is_file())
    lines = "".join(
        f"{hashlib.blake2b(path.read_bytes()).hexdigest()} {path.stat().st_size} "
        f"{path.parent.name}/{path.name}\n"
        for path in files
    )
    (place / "digests").write_text(lines + hashlib.blake2b(lines.encode()).hexdigest())
