"""A user's script for type checkers: `make lint` checks it, nothing runs it."""

from typing import Any

import bagua.torch_api as bagua
import torch
from bagua.comm_hooks import Handle
from bagua.torch_api.distributed import BaguaModule
from typing_extensions import assert_type

layer = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(layer.parameters())
model = bagua.wrap(layer, [optimizer])
model = bagua.wrap(layer)
model = bagua.wrap(layer, optimizer, "bytegrad")
with model.no_sync():
    assert_type(model(torch.ones(1, 2)), Any)
assert_type(model, BaguaModule)
hook = bagua.comm_hooks.register(torch.nn.parallel.DistributedDataParallel(layer), "bytegrad")
assert_type(hook, Handle)
assert_type(bagua.fsdp.compress(layer).stats(), dict[str, Any])
assert_type(model.bagua_stats(), dict[str, Any])
