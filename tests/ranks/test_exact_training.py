"""Exact gradients: training on ranks is training in one process on all ranks' data."""

import copy

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import GradientAllReduceAlgorithm
from support import training
from torch import nn

RANKS = pytest.mark.parametrize("size", [2, 3, 4], ids=lambda n: f"{n}_ranks")


def wrap(model, optimizers=None, **options):
    optimizers = [training.sgd(model)] if optimizers is None else optimizers
    average = options.pop("average", True)
    model = model.with_bagua(optimizers, GradientAllReduceAlgorithm(average=average), **options)
    return model, optimizers


@training.with_group
def train_and_compare_with_oracle_and_ddp(set_to_none, do_flatten):
    model = training.network()
    alone, for_ddp = copy.deepcopy(model), copy.deepcopy(model)
    model, optimizers = wrap(model, do_flatten=do_flatten)
    training.train_on_ranks(model, optimizers, set_to_none=set_to_none)
    training.assert_close(model, training.train_alone(alone, training.sgd(alone)))
    ddp = nn.parallel.DistributedDataParallel(for_ddp)
    training.train_on_ranks(ddp, training.sgd(ddp), set_to_none=set_to_none)
    training.assert_close(model, ddp, rtol=1e-6, atol=1e-7)
    return training.model_bits(model)


@RANKS
@pytest.mark.parametrize("set_to_none", [True, False], ids=["grads_none", "grads_zero"])
def test_training_equals_one_process_and_ddp(ranks, size, set_to_none):
    results = ranks(size, train_and_compare_with_oracle_and_ddp, set_to_none, True)
    assert len(set(results)) == 1


@pytest.mark.parametrize("set_to_none", [True, False], ids=["grads_none", "grads_zero"])
def test_training_without_flattening_gives_the_same_bits(ranks, set_to_none):
    flat = ranks(3, train_and_compare_with_oracle_and_ddp, set_to_none, True)
    copied = ranks(3, train_and_compare_with_oracle_and_ddp, set_to_none, False)
    assert flat == copied


@pytest.mark.parametrize("do_flatten", [True, False], ids=["flattened", "copied"])
def test_training_in_small_buckets_equals_one_process_and_ddp(ranks, do_flatten):
    arguments = (train_and_compare_with_oracle_and_ddp, True, do_flatten)
    results = ranks(4, *arguments, env=training.SMALL_BUCKETS)
    assert len(set(results)) == 1


@pytest.mark.parametrize("size", [3, 4], ids=lambda n: f"{n}_ranks")
def test_two_runs_give_equal_bits(ranks, size):
    first = ranks(size, train_and_compare_with_oracle_and_ddp, True, True)
    assert first == ranks(size, train_and_compare_with_oracle_and_ddp, True, True)


class RootLevel(nn.Module):
    """Parameters of the root module itself, as a class token has it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.token = nn.Parameter(torch.randn(7))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.inner = nn.Linear(training.FEATURES, 7)
        self.head = nn.Linear(7, training.OUTPUTS)

    def forward(self, x):
        return self.head(torch.tanh(self.inner(x) + self.token)) * self.scale


class Shared(nn.Module):
    """One weight used by two layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Linear(training.FEATURES, training.FEATURES)
        self.second = nn.Linear(training.FEATURES, training.FEATURES)
        self.second.weight = self.first.weight
        self.head = nn.Linear(training.FEATURES, training.OUTPUTS)

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


def bare_linear():
    torch.manual_seed(3)
    return nn.Linear(training.FEATURES, training.OUTPUTS)


@training.with_group
def train_and_compare(make):
    model = make()
    alone = copy.deepcopy(model)
    model, optimizers = wrap(model)
    names = [name for name, _ in model.bagua_build_params()]
    training.train_on_ranks(model, optimizers)
    training.assert_close(model, training.train_alone(alone, training.sgd(alone)))
    return names


def test_parameters_of_the_root_module_are_synchronised(ranks):
    names = ranks(3, train_and_compare, RootLevel)[0]
    assert names[:2] == ["token", "scale"]


def test_a_bare_linear_layer_is_synchronised(ranks):
    assert ranks(2, train_and_compare, bare_linear) == [["weight", "bias"]] * 2


def test_a_shared_parameter_is_sent_once(ranks):
    names = ranks(3, train_and_compare, Shared)[0]
    assert "first.weight" in names
    assert "second.weight" not in names


class MixedTypes(nn.Module):
    """One layer per floating dtype."""

    types = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(nn.Linear(5, 5).to(kind) for kind in self.types)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x[:, : training.OUTPUTS].float()


@training.with_group
def train_mixed_types():
    model, _ = wrap(MixedTypes(), [])
    data = training.batch(0, dist.get_rank())
    local = training.local_gradients(model, training.squared_error, data)
    expected = {name: training.mean_over_ranks(grad) for name, grad in local.items()}
    training.squared_error(model, data).backward()
    training.assert_ranks_agree(model)
    for name, p in model.named_parameters():
        assert p.grad.dtype == p.dtype
        # gloo adds in the bucket's own type, so terms that cancel leave the type's rounding.
        rounding = 4 * torch.finfo(p.dtype).eps * local[name].abs().max().item()
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-2, atol=rounding)
    return sorted(str(bucket.backend_tensor.dtype) for bucket in model.bagua_buckets)


def test_mixed_types_have_one_bucket_per_type(ranks):
    kinds = ["torch.bfloat16", "torch.float16", "torch.float32", "torch.float64"]
    assert ranks(3, train_mixed_types) == [kinds] * 3


@training.with_group
def train_with_two_optimizers():
    model = training.network()
    alone = copy.deepcopy(model)

    def two(m):
        adam = torch.optim.Adam(m[2].parameters(), lr=0.01)
        return [torch.optim.SGD(m[0].parameters(), lr=0.1), adam]

    model, optimizers = wrap(model, two(model))
    training.train_on_ranks(model, optimizers)
    training.assert_close(model, training.train_alone(alone, two(alone)))
    return len(model.bagua_optimizers)


def test_several_optimizers_train_one_model(ranks):
    assert ranks(3, train_with_two_optimizers) == [2, 2, 2]


@training.with_group
def gradients_of_the_sum():
    model, _ = wrap(training.network(), [], average=False)
    data = training.batch(0, dist.get_rank())
    local = training.local_gradients(model, training.squared_error, data)
    training.squared_error(model, data).backward()
    training.assert_ranks_agree(model)
    for name, p in model.named_parameters():
        expected = training.mean_over_ranks(local[name]) * dist.get_world_size()
        torch.testing.assert_close(p.grad, expected)
    return True


def test_average_false_gives_the_sum(ranks):
    assert all(ranks(3, gradients_of_the_sum))


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


@training.with_group
def train_channels_last(set_to_none):
    model = Convolutions().to(memory_format=torch.channels_last)
    alone = copy.deepcopy(model)
    optimizer = training.sgd(model)
    model, _ = wrap(model, [optimizer])
    images = torch.randn(dist.get_world_size(), 2, 3, 6, 6)
    mine = images[dist.get_rank()].to(memory_format=torch.channels_last)

    def steps(trained, trainer, data):
        for _ in range(3):
            trainer.zero_grad(set_to_none=set_to_none)
            trained(data).square().mean().backward()
            trainer.step()

    caught = training.warnings_of(lambda: steps(model, optimizer, mine))
    training.assert_ranks_agree(model)
    steps(alone, training.sgd(alone), images.flatten(0, 1))
    training.assert_close(model, alone)
    return caught, [p.grad.stride() == p.stride() for p in model.parameters()]


@pytest.mark.parametrize("set_to_none", [True, False], ids=["grads_none", "grads_zero"])
def test_channels_last_gradients_keep_their_strides_without_warnings(ranks, set_to_none):
    for caught, same_strides in ranks(2, train_channels_last, set_to_none):
        assert caught == []
        assert all(same_strides)


@training.with_group
def train_on_one_rank(do_flatten):
    model = training.network()
    alone = copy.deepcopy(model)
    model, optimizers = wrap(model, do_flatten=do_flatten)
    training.train_on_ranks(model, optimizers)
    training.train_alone(alone, training.sgd(alone))
    return training.model_bits(model) == training.model_bits(alone), model.bagua_stats()["total"]


@pytest.mark.parametrize("do_flatten", [True, False], ids=["flattened", "copied"])
def test_one_rank_trains_as_without_bagua_and_sends_nothing(ranks, do_flatten):
    equal, total = ranks(1, train_on_one_rank, do_flatten)[0]
    assert equal
    assert total["bytes_sent"] == 0


@training.with_group
def run_a_model_without_gradients():
    model = training.network().requires_grad_(False)
    with torch.no_grad():
        model[0].weight += dist.get_rank()
    model, _ = wrap(model, [])
    output = model(torch.ones(1, training.FEATURES))
    training.assert_ranks_agree(model)
    return output.tolist(), model.bagua_buckets, model.bagua_stats()["rounds"]


def test_a_model_without_gradients_is_broadcast_and_runs(ranks):
    results = ranks(2, run_a_model_without_gradients)
    assert results[0] == results[1]
    assert results[0][1:] == ([], 0)
