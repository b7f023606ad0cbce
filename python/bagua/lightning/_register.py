"""The strategies for each installed package of Lightning, in its registries."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from typing import Any

from bagua.lightning._fabric import FabricMethods
from bagua.lightning._strategy import LauncherMethods, StrategyMethods

__all__ = ["TESTED", "packages_in_use", "register"]

#: The release of both packages that the tests of this module run with.
TESTED = "2.6.6"

#: Package -> its modules of strategies, for a Trainer and for Fabric. The two packages have class
#: trees of their own, and one logger, which belongs to the one that was imported last.
_MODULES = {
    "lightning": ("lightning.pytorch.strategies", "lightning.fabric.strategies"),
    "pytorch_lightning": ("pytorch_lightning.strategies", "lightning_fabric.strategies"),
}


def packages_in_use() -> list[str]:
    """The packages that have been imported; if none has, the first that is installed.

    Raises:
        ImportError: no package is installed.
    """
    installed = [package for package in _MODULES if find_spec(package) is not None]
    if not installed:
        raise ImportError(
            "bagua.lightning needs Lightning: pip install lightning (or pytorch-lightning)"
        )
    imported = [
        package
        for package in installed
        if any(module.partition(".")[0] in sys.modules for module in _MODULES[package])
    ]
    return imported or installed[:1]


def register(package: str, public: str) -> tuple[Any, Any]:
    """Register ``"bagua"`` with a package, which is imported; for its Trainer and its Fabric.

    Args:
        public: name of the module in which the classes are found, for pickles.

    Returns:
        The two strategies.

    Raises:
        KeyError: there is no such package.
        ImportError: it is not installed, or lacks a method that is overridden or called.
    """
    _, fabric = _MODULES[package]
    return _trainer_strategy(package, public), _registered(
        importlib.import_module(fabric),
        "STRATEGY_REGISTRY",
        FabricMethods,
        "BaguaFabricStrategy",
        public,
    )


def _trainer_strategy(package: str, public: str) -> Any:
    module = importlib.import_module(_MODULES[package][0])
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
