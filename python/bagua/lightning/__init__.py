"""Bagua's algorithms in Lightning: ``Trainer(strategy="bagua")``, and in Fabric.

Importing this module registers the strategies with the packages that have been imported,
``lightning`` and ``pytorch_lightning``; where none has, it imports the first that is installed.
``BaguaStrategy`` and ``BaguaFabricStrategy`` are of the first of these packages, in this order.
``strategies["pytorch_lightning"]`` imports and registers the other one.
"""

from typing import Any

from bagua.lightning import _register

__all__ = ["BaguaFabricStrategy", "BaguaStrategy", "strategies"]


class _Strategies(dict[str, Any]):
    """``BaguaStrategy`` by the name of its package."""

    def __missing__(self, package: str) -> Any:
        self[package], _ = _register.register(package, __name__)
        return self[package]


_registered = [
    (package, _register.register(package, __name__)) for package in _register.packages_in_use()
]

#: ``BaguaStrategy`` of each package, by the name of the package, which is imported on demand.
strategies = _Strategies({package: trainer for package, (trainer, _) in _registered})

BaguaStrategy, BaguaFabricStrategy = _registered[0][1]
