"""``BaguaStrategy``: its methods, for the strategy class of either package."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from bagua.lightning import _checkpoint
from bagua.lightning._wrapping import Wrapping
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.data_parallel import DistributedDataParallel

__all__ = ["LauncherMethods", "StrategyMethods"]

_FITTING = "fit"
#: The start method whose ranks are programs of their own, which go on after training.
_PROGRAMS = "popen"


class LauncherMethods:
    """Bring the algorithm's state from rank 0 to the process that started it.

    In a file, as Lightning does with the weights: the queue for the other results is read only
    when the ranks have ended, and holds less than an algorithm's state.
    """

    #: Methods of Lightning's class that are extended.
    NEEDED = ("get_extra_results", "update_main_process_results")

    # An attribute of Lightning's class.
    _strategy: StrategyMethods

    def get_extra_results(self, trainer: Any) -> dict[str, Any]:
        """On the first rank of a node: the results, with the file of the state."""
        extra: dict[str, Any] = super().get_extra_results(trainer)  # type: ignore[misc]
        if self._strategy.end_of_children is not None:
            file = Path(tempfile.mkdtemp(), "bagua.pt")
            torch.save(self._strategy.end_of_children, file)
            extra[_checkpoint.KEY] = str(file)
        return extra

    def update_main_process_results(self, trainer: Any, extra: dict[str, Any]) -> None:
        """Load that file, and remove it."""
        super().update_main_process_results(trainer, extra)  # type: ignore[misc]
        if (name := extra.get(_checkpoint.KEY)) is not None:
            self._strategy.end_of_children = torch.load(name, weights_only=True)
            shutil.rmtree(Path(name).parent)


class StrategyMethods:
    """Train by one of bagua's algorithms: ``Trainer(strategy=BaguaStrategy("bytegrad"))``.

    A subclass of Lightning's ``DDPStrategy``, with the arguments of Bagua's strategy. The
    ``LightningModule`` is wrapped after its optimizers were made; ``trainer.strategy.model`` is the
    wrapper, a ``bagua.torch_api.data_parallel.DistributedDataParallel``, while ``fit`` runs.

    Args:
        algorithm: a registered name, or an object of ``bagua.torch_api.algorithms``.
        flatten: gradients are views of their buckets.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin,
            process_group_backend, timeout, start_method: as ``DDPStrategy`` has them.
        find_unused_parameters, broadcast_buffers, bucket_cap_mb, static_graph: as
            ``DistributedDataParallel`` has them.
        bagua_kwargs: arguments of the algorithm, where it is given by name.

    Raises:
        TypeError: ``algorithm`` is something else, or does not take ``bagua_kwargs``.
        ValueError: no algorithm has this name, or an argument is out of its range.
    """

    strategy_name = "bagua"
    #: Methods of Lightning's class that are overridden or called.
    NEEDED = (
        *("setup_distributed", "setup", "configure_ddp", "determine_ddp_device_ids"),
        *("pre_backward", "post_backward", "teardown", "lightning_module_state_dict"),
        *("save_checkpoint", "load_optimizer_state_dict", "_configure_launcher"),
    )
    #: Starts ranks as children of this process; set by the subclass.
    launcher_class: type

    # Attributes of Lightning's classes.
    model: Any
    lightning_module: Any
    optimizers: list[torch.optim.Optimizer]
    lr_scheduler_configs: list[Any]
    precision_plugin: Any
    cluster_environment: Any
    root_device: torch.device

    def __init__(
        self,
        algorithm: str | Algorithm = "gradient_allreduce",
        flatten: bool = True,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
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
        self._start_method = start_method
        self._end_of_fit: _checkpoint.RankState | None = None
        #: An entry of a checkpoint, in rank 0's process and in the one that started the ranks.
        self.end_of_children: dict[str, Any] | None = None
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            start_method=start_method,
            **({} if timeout is None else {"timeout": timeout}),
        )  # type: ignore[call-arg]

    # Setting up, in the order of the calls.

    def _configure_launcher(self) -> None:
        """Have a launcher of children bring back the algorithm's state at the end."""
        super()._configure_launcher()  # type: ignore[misc]
        self.end_of_children = None
        if self._start_method != _PROGRAMS:
            self._launcher = self.launcher_class(self, start_method=self._start_method)

    def setup_distributed(self) -> None:
        """Join the job, and say which node this is: hierarchical algorithms ask."""
        super().setup_distributed()  # type: ignore[misc]
        os.environ.setdefault("NODE_RANK", str(self.cluster_environment.node_rank()))

    def setup(self, trainer: Any) -> None:
        """Make the optimizers, then wrap: algorithms that own them need both."""
        super().setup(trainer)  # type: ignore[misc]
        self._end_of_fit = self.end_of_children = None
        if trainer.state.fn == _FITTING:
            self.model = self._setup_model(self.model)

    def configure_ddp(self) -> None:
        """Nothing: :meth:`setup` wraps later than torch's class is."""

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        return self._wrapping.wrap(
            model,
            self.determine_ddp_device_ids(),  # type: ignore[attr-defined]
            self.optimizers,
            getattr(self.precision_plugin, "scaler", None),
            len(self.lr_scheduler_configs),
        )

    @property
    def _wrapper(self) -> DistributedDataParallel | None:
        return self.model if isinstance(self.model, DistributedDataParallel) else None

    # Training.

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        """In manual optimization: have this backward, inside of the forward, communicate."""
        wrapper = self._wrapper
        if wrapper is not None and not self.lightning_module.automatic_optimization:
            wrapper.forwards.before_inner_backward(closure_loss)

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """Nothing: communication is complete when backward returns."""

    @property
    def _interrupted(self) -> bool:
        """Whether an exception ended training: the other ranks are not to be waited for."""
        interrupted: bool = self.lightning_module.trainer.interrupted
        return interrupted

    def teardown(self) -> None:
        """Unwrap the module. Its weights stay as they are on this rank."""
        wrapper = self._wrapper
        if wrapper is not None:
            if not self._interrupted:
                wrapper.bagua_ddp.pause()
                own = _checkpoint.of_this_rank(wrapper, self.optimizers)
                if self._start_method == _PROGRAMS:
                    self._end_of_fit = own
                else:
                    self.end_of_children = _checkpoint.of_all_ranks(own)
            wrapper.bagua_ddp.close()
        super().teardown()  # type: ignore[misc]

    # Checkpoints.

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's weights, of one moment; a file gets those of rank 0."""
        wrapper = self._wrapper
        if wrapper is None or wrapper.bagua_ddp.bagua_algorithm.ranks_agree is not False:
            return super().lightning_module_state_dict()  # type: ignore[misc,no-any-return]
        with wrapper.bagua_ddp.exclusive():
            return _checkpoint.copied(super().lightning_module_state_dict())  # type: ignore[misc]

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Add the state of the algorithm, of all ranks, to what rank 0 writes."""
        if "optimizer_states" in checkpoint:
            self._add_state(checkpoint)
        super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[misc]

    def _add_state(self, checkpoint: dict[str, Any]) -> None:
        if self.end_of_children is not None:
            checkpoint[_checkpoint.KEY] = self.end_of_children
        elif (wrapper := self._wrapper) is not None:
            own = _checkpoint.of_this_rank(wrapper, self.optimizers)
            _checkpoint.add(checkpoint, own, alone=self._interrupted)
        elif self._end_of_fit is not None:
            _checkpoint.add(checkpoint, self._end_of_fit, alone=self._interrupted)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the state of the algorithm too, which is wrapped already.

        Raises:
            ValueError: the checkpoint is of another algorithm or, where ranks hold different
                weights, of another number of ranks.
        """
        super().load_optimizer_state_dict(checkpoint)  # type: ignore[misc]
        if (wrapper := self._wrapper) is not None:
            _checkpoint.restore(checkpoint, wrapper, self.optimizers)
