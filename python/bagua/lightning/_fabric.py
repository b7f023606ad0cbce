"""``BaguaFabricStrategy``: its methods, for the strategy class of either package."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from bagua.lightning._wrapping import Wrapping
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.data_parallel import DistributedDataParallel

__all__ = ["FabricMethods"]


class FabricMethods:
    """Fabric trains by one of bagua's algorithms: ``Fabric(strategy=BaguaFabricStrategy(...))``.

    A subclass of Fabric's ``DDPStrategy``. The wrapper, a
    ``bagua.torch_api.data_parallel.DistributedDataParallel``, is what ``fabric.setup`` puts around
    the module.

    Args:
        algorithm: a registered name, or an object of ``bagua.torch_api.algorithms``.
        flatten: gradients are views of their buckets.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision,
            process_group_backend, timeout, start_method: as ``DDPStrategy`` has them.
        find_unused_parameters, broadcast_buffers, bucket_cap_mb, static_graph: as
            ``DistributedDataParallel`` has them.
        bagua_kwargs: arguments of the algorithm, where it is given by name.

    Raises:
        TypeError: ``algorithm`` is something else, or does not take ``bagua_kwargs``.
        ValueError: no algorithm has this name, or an argument is out of its range.
    """

    #: Methods of Fabric's class that are overridden or called.
    NEEDED = (
        *("setup_module_and_optimizers", "setup_module", "setup_optimizer"),
        *("_setup_distributed", "_determine_ddp_device_ids"),
    )

    # Attributes of Fabric's classes.
    precision: Any
    cluster_environment: Any

    def __init__(
        self,
        algorithm: str | Algorithm = "gradient_allreduce",
        flatten: bool = True,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision: Any = None,
        *,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool | None = None,
        bucket_cap_mb: float | None = None,
        static_graph: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        start_method: str = "popen",
        **bagua_kwargs: Any,
    ) -> None:
        self._wrapping = Wrapping(
            algorithm,
            bagua_kwargs,
            gradient_as_bucket_view=flatten,
            find_unused_parameters=find_unused_parameters,
            broadcast_buffers=broadcast_buffers,
            bucket_cap_mb=bucket_cap_mb,
            static_graph=static_graph,
        )
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
            process_group_backend=process_group_backend,
            start_method=start_method,
            **({} if timeout is None else {"timeout": timeout}),
        )  # type: ignore[call-arg]

    def _setup_distributed(self) -> None:
        """Join the job, and say which node this is: hierarchical algorithms ask."""
        super()._setup_distributed()  # type: ignore[misc]
        os.environ.setdefault("NODE_RANK", str(self.cluster_environment.node_rank()))

    def setup_module_and_optimizers(
        self,
        module: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        *others: Any,
    ) -> tuple[Any, ...]:
        """Wrap the module together with its optimizers."""
        wrapper = self._wrap(module, optimizers)
        return wrapper, [self.setup_optimizer(o) for o in optimizers], *others  # type: ignore[attr-defined]

    def setup_module(self, module: torch.nn.Module) -> DistributedDataParallel:
        """Wrap a module whose optimizers come later.

        Raises:
            RuntimeError, ValueError: the algorithm needs the optimizers, as all do that average
                weights.
        """
        wrapper = self._wrap(module, ())
        algorithm = wrapper.bagua_ddp.bagua_algorithm
        if algorithm.ranks_agree is False:
            wrapper.bagua_ddp.pause()
            wrapper.bagua_ddp.close()
            raise RuntimeError(
                f"fabric: {type(algorithm).__name__} averages weights between the optimizers' "
                "steps; set the module and its optimizers up in one call: "
                "fabric.setup(module, optimizer)"
            )
        return wrapper

    def _wrap(
        self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
    ) -> DistributedDataParallel:
        device_ids = self._determine_ddp_device_ids()  # type: ignore[attr-defined]
        scaler = getattr(self.precision, "scaler", None)
        return self._wrapping.wrap(module, device_ids, optimizers, scaler)
