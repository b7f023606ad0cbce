"""save_checkpoint and load_latest: which files, and other ranks. To the bit: test_checkpoint.py."""

import bagua.torch_api as bagua
import pytest
import torch
import torch.distributed.checkpoint as dcp
from bagua._core.state import step_folder as _step_folder
from bagua.torch_api.checkpoint import load_latest, save_checkpoint
from support import every_algorithm, training
from support.checkpoint_training import HIDDEN, file, refusal, steps, train_and_save, wrapped
from support.error_feedback import owed
from support.options import Mode, StrangeSGD, strange_state


@training.with_group
def save_while_averaging(folder):
    model, optimizer, state = wrapped("async")
    steps(model, optimizer, range(10))
    save_checkpoint(folder, state, 10)
    steps(model, optimizer, range(3))
    loaded, its_optimizer, its_state = wrapped("async", seed=1)
    step = load_latest(folder, its_state)
    steps(loaded, its_optimizer, range(10, 15))
    for one in (model, loaded):
        one.bagua_algorithm.abort(one)
    return step, loaded.bagua_algorithm.state_dict()


def test_asynchronous_averaging_goes_on(ranks, tmp_path):
    warmed_up = {"warmed_up": every_algorithm.WARM_UP, "averaging": 1}
    assert ranks(2, save_while_averaging, str(tmp_path)) == [(10, warmed_up)] * 2


WITH_RESIDUALS = ["bytegrad-feedback", "power_sgd", "sparse"]


@pytest.mark.parametrize("name", ["gradient_allreduce", "qadam", *WITH_RESIDUALS])
def test_from_three_to_two_to_four_ranks_training_goes_on(ranks, tmp_path, name):
    saved = None
    for size, upto in ((3, 6), (2, 10), (4, 14)):
        results = ranks(size, train_and_save, name, str(tmp_path), upto, size)
        first, _, loaded, after = zip(*results, strict=True)
        assert set(first) == {upto - 4 if saved else 0}
        keys = [key for key in (saved or [{}])[0] if key.startswith("rank0/error/")]
        names = [key.removeprefix("rank0/error/") for key in keys]
        assert len(names) == 6 or not saved or name not in WITH_RESIDUALS
        expected = owed(saved, names)
        for parameter, found in owed(loaded, names).items():
            torch.testing.assert_close(found, expected[parameter], rtol=1e-6, atol=1e-7)
            own = [loaded[rank][f"rank{rank}/error/{parameter}"] for rank in range(size)]
            assert all(torch.equal(error, own[0]) for error in own)
        assert not names or any(value.abs().max() > 1e-3 for value in expected.values())
        saved = after


@pytest.mark.parametrize("name", ["decentralized-all", "async"])
def test_weights_of_each_ranks_own_are_not_given_to_another_number_of_ranks(ranks, tmp_path, name):
    ranks(3, train_and_save, name, str(tmp_path), 4)
    for error in ranks(2, refusal, name, str(tmp_path)):
        assert error.startswith("ValueError")
        assert "'model/0.weight' differs between the 3 ranks that saved it" in error
        assert "there are 2 now" in error


def test_equal_tensors_of_all_ranks_are_written_once(ranks, tmp_path):
    for name in ("gradient_allreduce", "decentralized-all"):
        ranks(2, train_and_save, name, str(tmp_path / name), 2)
    mine, _ = _step_folder.read(file(tmp_path / "gradient_allreduce", 2, 1).parent)
    tensors = [path for path, value in mine.items() if isinstance(value, torch.Tensor)]
    assert {path[1] for path in tensors} == {"1.running_mean", "1.running_var"}, "of its own batch"
    own, _ = _step_folder.read(file(tmp_path / "decentralized-all", 2, 1).parent)
    assert ("model", "0.weight") in own


def test_torchs_own_functions_read_the_tensors_of_rank_0(ranks, tmp_path):
    ranks(2, train_and_save, "decentralized-all", str(tmp_path), 2)
    part = file(tmp_path, 2, 0).parent
    expected, _ = _step_folder.read(part)
    weight = torch.zeros(HIDDEN, training.FEATURES)
    dcp.load({"model": {"0.weight": weight}}, checkpoint_id=part, no_dist=True)
    assert torch.equal(weight, expected["model", "0.weight"])


def test_the_newest_stay_and_older_ones_go(ranks, tmp_path):
    ranks(2, train_and_save, "sparse", str(tmp_path), 4)
    abandoned = tmp_path / ".step-000000002.part"
    file(tmp_path, 2, 0).parents[1].rename(abandoned)
    ranks(2, train_and_save, "sparse", str(tmp_path), 8)
    assert {path.name for path in tmp_path.iterdir()} == {"step-000000006", "step-000000008"}


def test_the_names_are_public():
    assert bagua.checkpoint.save_checkpoint is save_checkpoint
    assert set(bagua.checkpoint.__all__) == {"PerRank", "load_latest", "save_checkpoint"}


def strange(factor, state):
    model = training.network()
    optimizer = StrangeSGD(model.parameters(), factor, state)
    model.with_bagua([optimizer], "gradient_allreduce")
    return optimizer


@training.with_group
def save_strange_options(folder):
    optimizer = strange(1, state=True)
    save_checkpoint(folder, {"optimizer": optimizer}, 1)
    load_strange_options(folder, optimizer)
    model = training.network()
    optimizer = training.sgd(model)
    model.with_bagua([optimizer], "gradient_allreduce")
    per_rank, first = bagua.checkpoint.PerRank(model), next(model.parameters())
    texts = {"text": "abc", "bytes": [b"de"]}
    for parameter in model.parameters():
        optimizer.state[parameter].update(texts)
    state = per_rank.state_dict()
    optimizer.state[first].clear()
    per_rank.load_state_dict(state)
    assert {key: optimizer.state[first][key] for key in texts} == texts
    optimizer.state["global_step"] = 5
    return training.error_of(per_rank.state_dict)


def load_strange_options(folder, saved):
    optimizer = strange(2, state=False)
    assert load_latest(folder, {"optimizer": optimizer}) == 1
    assert strange_state(optimizer, loosely=True) == strange_state(saved, loosely=True)


@training.with_group
def load_strange_options_alone(folder):
    load_strange_options(folder, strange(1, state=True))
    model = training.network()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    return training.error_of(lambda: load_latest(folder, {"optimizer": other}))


def test_options_and_state_of_every_type_are_saved_and_loaded(ranks, tmp_path):
    for error in ranks(2, save_strange_options, str(tmp_path)):
        assert "TypeError: PerRank: the optimizer's state['global_step'] is of no para" in error
    (error,) = ranks(1, load_strange_options_alone, str(tmp_path))
    assert error.startswith("UnknownNameError: ")
    assert "which this rank's own optimizer does not hold" in error
    assert "torch.serialization.add_safe_globals" in error


def test_a_class_is_not_taken_by_the_name_in_a_file(tmp_path):
    part = tmp_path / "step-000000001" / "rank-0"
    with pytest.raises(TypeError, match=r"'a/mode' needs 'support\.options\.Mode', which"):
        _step_folder.write(part, {("a", "mode"): Mode.SLOW})
