"""Checkpoints that are cut, changed, missing, or cannot be written: the one before is used."""

import errno
import itertools
import re
import resource

import torch.distributed as dist
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
        (warning,), (others,) = results[rank][1], results[1 - rank][1]
        assert "Loaded instead: step 4" in others
        assert f"{path}: " in warning
        assert re.search(reason, warning), warning
        assert "Loaded instead: step 4" in warning
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
    pass


class Holder:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


@training.with_group
def save_what_cannot_be_saved(folder):
    one = dist.get_rank() == 1

    def refused(state, step):
        return training.error_of(lambda: save_checkpoint(folder, state, step))

    return [
        refused({"x": Holder(Code() if one else 0)}, 1),
        refused({"x": Holder(0)}, 7 if one else 1),
        refused({"x": {"value": 1}}, 1),
        refused({"x": Holder(1)}, -1),
    ]


def test_saving_refuses_values_that_loading_would_refuse(ranks, tmp_path):
    (other, at_first, *_), (code, step, plain, negative) = ranks(
        2, save_what_cannot_be_saved, str(tmp_path)
    )
    assert "UnpicklingError: Weights only load failed" in code
    assert "rank(s) [1] could not write step 1" in other
    assert "rank(s) [1] could not write step 1" in at_first
    assert step == "ValueError: save_checkpoint: step=7 here, 1 on rank 0"
    assert plain.startswith("TypeError: state['x'] is a dict, which has no state_dict")
    assert negative.startswith("ValueError: save_checkpoint: step=-1 must not be negative")


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
