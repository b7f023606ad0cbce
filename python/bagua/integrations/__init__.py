"""Compressed gradients in training libraries that construct ``DistributedDataParallel`` themselves.

Import the module of the library: ``bagua.integrations.accelerate`` or
``bagua.integrations.transformers``. As an attribute it is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bagua.integrations import accelerate as accelerate, transformers as transformers


def __getattr__(name: str) -> Any:
    if name in ("accelerate", "transformers"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
