"""A DeviceMesh of one dimension as process_group=, and one of two dimensions refused by name."""

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import GradientAllReduceAlgorithm
from bagua.torch_api.data_parallel import DistributedDataParallel
from support import training

HOUSES = pytest.mark.parametrize("how", ["with_bagua", "class"])


def wrap(how, model, group):
    optimizer = training.sgd(model)
    if how == "with_bagua":
        algorithm = GradientAllReduceAlgorithm()
        return model.with_bagua([optimizer], algorithm, process_group=group), optimizer
    return DistributedDataParallel(model, process_group=group, optimizers=[optimizer]), optimizer


@training.with_group
def train_over_a_slice(how):
    """Two replicas of two parts: ranks 0 and 2 have different data, and so have 1 and 3."""
    rank = dist.get_rank()
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "part"))
    model, optimizer = wrap(how, training.network(seed=rank), mesh["replica"])
    training.train(model, optimizer, [training.batch(step, rank) for step in range(3)])
    members = [rank % 2, rank % 2 + 2]
    alone = training.network(seed=members[0])
    both = [[training.batch(step, member) for member in members] for step in range(3)]
    whole = [tuple(torch.cat(side) for side in zip(*parts, strict=True)) for parts in both]
    training.train(alone, training.sgd(alone), whole)
    training.assert_close(model, alone)
    return training.model_bits(model), list(model.bagua_ddp.process_group.ranks)


@HOUSES
def test_a_slice_of_a_mesh_trains_by_itself(ranks, how):
    results = ranks(4, train_over_a_slice, how)
    assert [members for _, members in results] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    digests = [digest for digest, _ in results]
    assert digests[0] == digests[2] != digests[1] == digests[3]


@training.with_group
def pass_a_mesh_of_two_dimensions(how):
    named = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("replica", "part"))
    unnamed = dist.init_device_mesh("cpu", (1, 2))
    return (
        training.error_of(lambda: wrap(how, training.network(), named)),
        training.error_of(lambda: wrap(how, training.network(), unnamed)),
    )


@HOUSES
def test_a_mesh_of_two_dimensions_is_refused_with_the_names_of_its_slices(ranks, how):
    for named, unnamed in ranks(2, pass_a_mesh_of_two_dimensions, how):
        assert named.startswith("ValueError: process_group is a DeviceMesh of 2 dimensions")
        assert 'pass mesh["replica"] or mesh["part"]' in named
        assert unnamed.startswith("ValueError: process_group is a DeviceMesh of 2 dimensions")
        assert "pass mesh.get_group(dimension)" in unnamed
