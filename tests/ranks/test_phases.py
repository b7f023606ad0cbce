"""Calls that every rank must make, and that one does not make."""

import warnings

import bagua.torch_api as bagua
import pytest
import torch.distributed as dist
from bagua.torch_api.algorithms import GradientAllReduceAlgorithm
from support import training


def wrap_on_rank_0_only(waits):
    """`with_bagua` under `if rank == 0`, while rank 1 ends: perhaps after rank 0 has said so."""
    bagua.init_process_group()
    store = dist.distributed_c10d._get_default_store()
    said = []

    def say(message, *_, **__):
        said.append(str(message))
        store.set("said", "1")

    try:
        if dist.get_rank() == 1:
            if waits:
                store.wait(["said"])
            return "", []
        warnings.showwarning = say
        warnings.simplefilter("always")
        model = training.network()
        algorithm = GradientAllReduceAlgorithm()
        return training.error_of(lambda: model.with_bagua([], algorithm)), said
    finally:
        bagua.destroy_process_group()


@pytest.mark.parametrize("waits", [False, True], ids=["exits_at_once", "exits_late"])
def test_a_wrap_on_one_rank_names_the_rank_it_waits_for_and_the_one_that_exited(ranks, waits):
    env = {"BAGUA_STRAGGLER_SECONDS": "0.5" if waits else "0"}
    (error, said), _ = ranks(2, wrap_on_rank_0_only, waits, env=env, fresh=True)
    assert error.startswith("BaguaError: with_bagua, rank 0 of 2: rank 1 has exited")
    assert "if rank == 0" in error
    assert bool(said) == waits
    for line in said:
        assert "with_bagua, rank 0 of 2: waiting for other ranks" in line
        assert "rank 1 has sent no heartbeat" in line
