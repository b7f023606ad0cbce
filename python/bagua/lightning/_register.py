"""The strategies for each installed package of Lightning, in its registries."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

from bagua.lightning._fabric import FabricMethods
from bagua.lightning._strategy import LauncherMethods, StrategyMethods

__all__ = ["TESTED", "fabric_strategies", "trainer_strategies"]

#: The release of both packages that the tests of this module run with.
TESTED = "2.6.6"

#: Package -> its modules of strategies. The two packages have class trees of their own.
_TRAINERS = {
    "lightning": "lightning.pytorch.strategies",
    "pytorch_lightning": "pytorch_lightning.strategies",
}
_FABRICS = {
    "lightning": "lightning.fabric.strategies",
    "pytorch_lightning": "lightning_fabric.strategies",
}


def trainer_strategies(public: str) -> dict[str, Any]:
    """Register ``"bagua"`` for the Trainer of every installed package; returns the classes.

    Args:
        public: name of the module in which the first class is found, for pickles.

    Raises:
        ImportError: no package is installed, or one lacks a method that is overridden or called.
    """
    found = {package: _trainer_strategy(package, public) for package in _installed()}
    if not found:
        raise ImportError(
            "bagua.lightning needs Lightning: pip install lightning (or pytorch-lightning)"
        )
    return found


def fabric_strategies(public: str) -> dict[str, Any]:
    """Register ``"bagua"`` for the Fabric of every installed package; returns the classes."""
    return {
        package: _registered(
            importlib.import_module(_FABRICS[package]),
            "STRATEGY_REGISTRY",
            FabricMethods,
            "BaguaFabricStrategy",
            public,
        )
        for package in _installed()
    }


def _installed() -> list[str]:
    return [package for package in _TRAINERS if find_spec(package) is not None]


def _trainer_strategy(package: str, public: str) -> Any:
    module = importlib.import_module(_TRAINERS[package])
    strategy = _registered(module, "StrategyRegistry", StrategyMethods, "BaguaStrategy", public)
    strategy.launcher_class = _subclass(
        module.launchers,
        "_MultiProcessingLauncher",
        LauncherMethods,
        "BaguaStrategy.launcher_class",
        public,
    )
    return strategy


def _registered(module: Any, registry: str, methods: Any, name: str, public: str) -> Any:
    strategy = _subclass(module, "DDPStrategy", methods, name, public)
    getattr(module, registry).register(
        "bagua", strategy, description="algorithms of bagua", override=True
    )
    return strategy


def _subclass(module: Any, base: str, methods: Any, name: str, public: str) -> Any:
    """A class found as ``name`` in ``public``; its methods go before those of ``base``."""
    theirs: Any = getattr(module, base, None)
    missing = [method for method in methods.NEEDED if not hasattr(theirs, method)]
    if missing:
        raise ImportError(
            f"bagua.lightning: {base} of {module.__name__} has no {' and no '.join(missing)}; "
            f"lightning {TESTED} is known to work"
        )
    attributes = {"__module__": public, "__qualname__": name, "__doc__": methods.__doc__}
    return type(name.rpartition(".")[2], (methods, theirs), attributes)
