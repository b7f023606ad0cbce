"""A failure of the device after the last step is raised before its results are kept, or at the end.

The device is a stand-in: an engine whose settle() raises. tests/cpp/device_streams.cpp has the
engine's own part.
"""

import threading

import bagua.torch_api as bagua
import pytest
from bagua.torch_api.checkpoint import PerRank, save_checkpoint
from support import training


class FailsLate:
    """An engine that finds at the next look that the device has failed, and says so once."""

    def __init__(self, engine):
        self._engine = engine
        self._told = False

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def settle(self):
        if not self._told:
            self._told = True
            raise bagua.BaguaError("the device has failed")


def trained():
    model = training.network()
    optimizer = training.sgd(model)
    model = model.with_bagua([optimizer], training.algorithm("exact"))
    training.train_on_ranks(model, optimizer, steps=2)
    running = model.bagua_ddp._running
    running.engine = FailsLate(running.engine)
    return model, optimizer


@training.with_group
def keep(how, folder):
    model, optimizer = trained()
    calls = {
        "state_dict": model.state_dict,
        "per_rank": PerRank(model).state_dict,
        "checkpoint": lambda: save_checkpoint(folder, {"model": model, "optimizer": optimizer}, 1),
        "average": lambda: bagua.average_weights(model),
    }
    with pytest.raises(bagua.BaguaError, match="the device has failed"):
        calls[how]()


@pytest.mark.parametrize("how", ["state_dict", "per_rank", "checkpoint", "average"])
def test_nothing_is_kept_of_a_round_that_failed_on_the_device(ranks, tmp_path, how):
    ranks(2, keep, how, str(tmp_path))
    assert not list(tmp_path.iterdir())


@training.with_group
def end(how):
    model, optimizer = trained()
    ending = model.bagua_ddp.close if how == "close" else bagua.destroy_process_group
    with pytest.raises(bagua.BaguaError, match="the device has failed"):
        ending()
    assert "bagua-lane0" not in {thread.name for thread in threading.enumerate()}
    model.state_dict()  # told once
    if how == "destroy":
        with pytest.raises(bagua.BaguaError, match="init_process_group"):
            training.train_on_ranks(model, optimizer, steps=1)


@pytest.mark.parametrize("how", ["close", "destroy"])
def test_the_end_tells_what_no_step_has_told_and_ends_all(ranks, how):
    ranks(2, end, how)
