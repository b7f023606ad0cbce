"""Arguments of DistributedDataParallel: refused before anything is sent, or honoured."""

import inspect
from collections import OrderedDict, namedtuple
from types import SimpleNamespace

import pytest
import torch
from bagua.torch_api.data_parallel import DistributedDataParallel, _arguments
from bagua.torch_api.data_parallel.distributed import _to_device
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP


def test_positions_are_torchs():
    mine = list(inspect.signature(DistributedDataParallel).parameters.values())
    positional = [p.name for p in mine if p.kind is p.POSITIONAL_OR_KEYWORD]
    theirs = list(inspect.signature(TorchDDP).parameters)
    assert positional[: len(theirs)] == theirs, "of the installed torch, which may know fewer"
    ours = ["optimizers", "algorithm", "grad_scaler", "guard"]
    assert [p.name for p in mine if p.kind is p.KEYWORD_ONLY] == ours


def test_unsupported_arguments_are_refused_with_the_alternative():
    with pytest.raises(NotImplementedError, match=r"mixed_precision=...\) .*; use torch.autocast"):
        DistributedDataParallel(nn.Linear(2, 2), mixed_precision=1)


def test_delayed_parameters_are_checked():
    model = nn.Linear(2, 2)
    for arguments in (
        {"delay_all_reduce_named_params": [("weight", model.weight)]},
        {"param_to_hook_all_reduce": model.bias},
    ):
        with pytest.raises(ValueError, match="need to be set at the same time"):
            DistributedDataParallel(model, **arguments)
    with pytest.raises(ValueError, match="'other' is not a parameter of the module"):
        DistributedDataParallel(
            model,
            delay_all_reduce_named_params=[("other", nn.Parameter(torch.ones(1)))],
            param_to_hook_all_reduce=model.bias,
        )


def test_arguments_without_effect_warn():
    frozen = nn.Linear(2, 2).requires_grad_(False)  # refused afterwards: nothing is sent
    with (
        pytest.warns(FutureWarning, match="check_reduction is deprecated and does nothing"),
        pytest.raises(RuntimeError, match="no parameter of the module needs a gradient"),
    ):
        DistributedDataParallel(frozen, check_reduction=True)


def test_bucket_sizes_are_one_or_a_list():
    assert _arguments.bucket_bytes(None, None) is None
    assert _arguments.bucket_bytes(1.5, []) == 3 * 2**19
    assert _arguments.bucket_bytes(25, [1, 0.5]) == (2**20, 2**19)
    with pytest.raises(ValueError, match="bucket_cap_mb_list=0 must be a positive number of MiB"):
        _arguments.bucket_bytes(None, [1, 0])


def test_modules_that_cannot_be_wrapped_are_refused():
    with pytest.raises(TypeError, match=r"wraps a torch.nn.Module, not \[\]"):
        DistributedDataParallel([])
    with pytest.raises(RuntimeError, match="parameter 'weight' is uninitialised; run a forward"):
        DistributedDataParallel(nn.LazyLinear(2))
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match="on different types of device: cpu, meta; move it"):
        DistributedDataParallel(mixed)
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"DistributedDataParallel: Linear is not a torch.optim.O"):
        DistributedDataParallel(model, optimizers=[model])
    with pytest.raises(ValueError, match=r"DistributedDataParallel: unknown algorithm 'bytegrd'"):
        DistributedDataParallel(nn.Linear(2, 2), algorithm="bytegrd")
    with pytest.raises(RuntimeError, match=r"call torch.distributed.init_process_group\(\) or"):
        DistributedDataParallel(nn.Linear(2, 2))


def on(*places):
    return [SimpleNamespace(device=torch.device(place)) for place in places]


@pytest.mark.parametrize(
    ("places", "ids", "output", "expected"),
    [
        (["cpu"], None, None, (None, None)),
        (["cpu"], [], None, (None, None)),
        (["cuda:1", "cuda:1"], [1], None, ([1], 1)),
        (["cuda:1"], [torch.device("cuda", 1)], 1, ([1], 1)),
        (["cuda:0", "cuda:1"], None, None, (None, None)),
    ],
    ids=str,
)
def test_one_device_id_is_accepted(places, ids, output, expected):
    assert _arguments.devices(on(*places), ids, output) == expected


@pytest.mark.parametrize(
    ("places", "ids", "output", "message"),
    [
        (["cuda:0"], [0, 1], None, "must be None or one device: start one process per device"),
        (["cpu"], [0], None, "is for modules on one accelerator; this one is on cpu"),
        (["cuda:0", "cuda:1"], [0], None, "this one is on cuda:0, cuda:1: pass device_ids=None"),
        (["cuda:0"], [1], None, "the module is on cuda:0: move it to cuda:1"),
        (["cuda:0"], ["cpu"], None, "the module is on cuda:0"),
        (["cuda:0"], [0], 1, "output_device=1 must be the module's device cuda:0 or None"),
        (["cuda:0"], None, 0, r"output_device=0 needs device_ids=\[0\]"),
    ],
    ids=str,
)
def test_device_ids_that_do_not_fit_are_refused(places, ids, output, message):
    with pytest.raises(ValueError, match=message):
        _arguments.devices(on(*places), ids, output)


Pair = namedtuple("Pair", "first second")


def test_inputs_are_moved_wherever_they_are():
    inputs = [
        torch.ones(1),
        (torch.ones(1), 3, "text"),
        Pair(torch.ones(2), [torch.ones(1)]),
        OrderedDict(a={"b": torch.ones(1)}),
        None,
    ]
    moved = _to_device(inputs, torch.device("meta"))
    assert moved[0].is_meta
    assert moved[1][0].is_meta
    assert moved[1][1:] == (3, "text")
    assert isinstance(moved[2], Pair)
    assert moved[2].first.is_meta
    assert moved[2].second[0].is_meta
    assert isinstance(moved[3], OrderedDict)
    assert moved[3]["a"]["b"].is_meta
    assert moved[4] is None
    assert not inputs[0].is_meta
