"""A user's script for type checkers: `make lint` checks it, nothing runs it."""

from typing import Any

import bagua.torch_api as bagua
import torch
from bagua.torch_api.distributed import BaguaModule
from typing_extensions import assert_type

layer = torch.nn.Linear(2, 2)
model = bagua.wrap(layer, [torch.optim.SGD(layer.parameters())])
with model.no_sync():
    assert_type(model(torch.ones(1, 2)), Any)
assert_type(model, BaguaModule)
assert_type(model.bagua_stats(), dict[str, Any])
