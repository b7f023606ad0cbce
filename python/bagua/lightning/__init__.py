"""Bagua's algorithms in Lightning: ``Trainer(strategy="bagua")``, and in Fabric.

Importing this module registers the strategies with the installed packages, ``lightning`` and
``pytorch_lightning``. ``BaguaStrategy`` and ``BaguaFabricStrategy`` are of ``lightning`` where both
are installed; ``strategies["pytorch_lightning"]`` is the other package's.
"""

from bagua.lightning._register import fabric_strategies, trainer_strategies

__all__ = ["BaguaFabricStrategy", "BaguaStrategy", "strategies"]

#: ``BaguaStrategy`` of each installed package, by the name of the package.
strategies = trainer_strategies(__name__)

BaguaStrategy = next(iter(strategies.values()))
BaguaFabricStrategy = next(iter(fabric_strategies(__name__).values()))
