"""Bagua's algorithms in Lightning: ``Trainer(strategy="bagua")``, and in Fabric.

Importing this module registers the strategies with the packages that have been imported,
``lightning`` and ``pytorch_lightning``; where none has, it imports the first that is installed.
``BaguaStrategy`` and ``BaguaFabricStrategy`` are of the first of these packages, in this order.
``strategies["pytorch_lightning"]`` imports and registers the other one, and
``strategies["lightning_fabric"]`` is its strategy for Fabric.
"""

from __future__ import annotations

import functools
import importlib
import os
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, SupportsFloat

import torch

from bagua._core.group.warn import warn
from bagua._core.state.saved_values import copied
from bagua.torch_api._rank_state import of_all_ranks, rank_state, restore, shared_weights
from bagua.torch_api.algorithms import Algorithm, GlobalAlgorithmRegistry, QAdamOptimizer
from bagua.torch_api.data_parallel import DistributedDataParallel
from bagua.torch_api.guard import Guard

__all__ = ["BaguaFabricStrategy", "BaguaStrategy", "strategies"]

#: The release of both packages that the tests of this module run with.
TESTED = "2.6.6"

#: Package -> its modules of strategies, for a Trainer and for Fabric. The two packages have
#: separate class trees, and one logger, which belongs to the one that was imported last.
_MODULES = {
    "lightning": ("lightning.pytorch.strategies", "lightning.fabric.strategies"),
    "pytorch_lightning": ("pytorch_lightning.strategies", "lightning_fabric.strategies"),
}
#: Package of a strategy -> that of the other strategy of this kind.
_OTHER = {
    "lightning.pytorch": "pytorch_lightning",
    "pytorch_lightning": "lightning.pytorch",
    "lightning.fabric": "lightning_fabric",
    "lightning_fabric": "lightning.fabric",
}
#: The algorithm whose argument is known only when the optimizers are.
_NEEDS_OPTIMIZER = "qadam"
_FITTING = "fit"
#: The start method whose ranks are separate programs, which go on after training.
_PROGRAMS = "popen"
#: Of a checkpoint: the state of all ranks.
_KEY = "bagua"
_REMEDY = "give the strategy that algorithm, or begin with the weights of the checkpoint alone"


class _TrainerMethods:
    """Train by one of bagua's algorithms: ``Trainer(strategy=BaguaStrategy("bytegrad"))``.

    A subclass of Lightning's ``DDPStrategy``, with the arguments of Bagua's strategy. The
    ``LightningModule`` is wrapped after its optimizers were made; ``trainer.strategy.model`` is the
    wrapper, a ``bagua.torch_api.data_parallel.DistributedDataParallel``, while ``fit`` runs.

    Args:
        algorithm: a registered name, or an object of ``bagua.torch_api.algorithms``.
        flatten: gradients are views of their buckets.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin,
            process_group_backend, timeout, start_method: as ``DDPStrategy`` has them.
        find_unused_parameters, broadcast_buffers, bucket_cap_mb, static_graph, guard: as
            ``bagua.torch_api.data_parallel.DistributedDataParallel`` has them.
        samples: a function from a batch to the number of its samples or tokens, by which ranks
            weigh in a step, such as ``lambda batch: len(batch[0])``. None: they count alike.
        bagua_kwargs: arguments of the algorithm, where it is given by name.

    Raises:
        TypeError: ``algorithm`` is something else, or does not take ``bagua_kwargs``.
        ValueError: no algorithm has this name, or an argument is out of its range.
    """

    strategy_name = "bagua"
    #: Methods of Lightning's class that are overridden or called.
    NEEDED = (
        *("setup_distributed", "setup", "configure_ddp", "determine_ddp_device_ids"),
        *("pre_backward", "post_backward", "on_validation_start", "on_validation_end"),
        *("teardown", "lightning_module_state_dict", "save_checkpoint"),
        *("load_optimizer_state_dict", "_configure_launcher", "training_step"),
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
        guard: Guard | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        start_method: str = "popen",
        samples: Callable[[Any], SupportsFloat] | None = None,
        **bagua_kwargs: Any,
    ) -> None:
        self._wrapping = _Wrapping(
            algorithm,
            bagua_kwargs,
            gradient_as_bucket_view=flatten,
            find_unused_parameters=find_unused_parameters,
            broadcast_buffers=broadcast_buffers,
            bucket_cap_mb=bucket_cap_mb,
            static_graph=static_graph,
            guard=guard,
        )
        self._start_method = start_method
        self._samples = samples
        self._end_of_fit: dict[str, Any] = {}
        self._anchor = ExitStack()  # of a validation
        self._validating = False
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
        self._end_of_fit, self.end_of_children = {}, None
        if trainer.state.fn == _FITTING:
            self.model = self._setup_model(self.model)
            if self._wrapper and self._samples is not None:
                self._wrapper.bagua_samples(0)  # before the sanity check gives buffers
            if (
                self._wrapper
                and self._wrapper.bagua_ddp.bagua_algorithm.traits.ranks_agree is False
            ):
                _end_each_rank_by_its_own_signal(trainer)

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

    def training_step(self, *arguments: Any, **options: Any) -> Any:
        """Say of how many samples the batch is, the first argument."""
        if self._wrapper is not None and self._samples is not None:
            self._wrapper.bagua_samples(self._samples(arguments[0]))
        return super().training_step(*arguments, **options)  # type: ignore[misc]

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        """In manual optimization: have this backward, inside of the forward, communicate."""
        wrapper = self._wrapper
        if wrapper is not None and not self.lightning_module.automatic_optimization:
            wrapper.bagua_ddp.before_inner_backward(closure_loss)

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """Nothing: communication is complete when backward returns."""

    @property
    def _interrupted(self) -> bool:
        """Whether an exception ended training: the other ranks are not to be waited for."""
        interrupted: bool = self.lightning_module.trainer.interrupted
        return interrupted

    def on_validation_start(self) -> None:
        """Validate with the weights that the ranks share, if the algorithm has such."""
        super().on_validation_start()  # type: ignore[misc]
        self._validate(True)

    def on_validation_end(self) -> None:
        self._validate(False)
        super().on_validation_end()  # type: ignore[misc]

    def _validate(self, validating: bool) -> None:
        self._anchor.close()
        self._validating = validating
        wrapper = self._wrapper
        if validating and wrapper is not None:
            self._anchor.enter_context(wrapper.bagua_ddp.bagua_algorithm.anchor())

    def teardown(self) -> None:
        """Unwrap the module. Its weights are those that the ranks share, or this rank's."""
        self._validate(False)
        wrapper = self._wrapper
        if wrapper is not None:
            if not self._interrupted:
                wrapper.bagua_ddp.pause()
                own = rank_state(wrapper.bagua_ddp)
                if self._start_method == _PROGRAMS:
                    self._end_of_fit = own
                else:
                    self.end_of_children = of_all_ranks(own)
                wrapper.bagua_ddp.bagua_algorithm.sync()
            wrapper.bagua_ddp.close()
            self.model = self.lightning_module
        super().teardown()  # type: ignore[misc]

    # Checkpoints.

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights that the ranks share, or this rank's; a file gets those of rank 0."""
        wrapper = self._wrapper
        if wrapper is None or wrapper.bagua_ddp.bagua_algorithm.traits.ranks_agree is not False:
            return super().lightning_module_state_dict()  # type: ignore[misc,no-any-return]
        with shared_weights(wrapper.bagua_ddp):
            state: dict[str, Any] = copied(super().lightning_module_state_dict())  # type: ignore[misc]
        return state

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Add the state of the algorithm, of all ranks, to what rank 0 writes."""
        if "optimizer_states" in checkpoint:
            self._add_state(checkpoint)
        super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[misc]

    def _add_state(self, checkpoint: dict[str, Any]) -> None:
        entry, own = self.end_of_children, self._end_of_fit
        if (wrapper := self._wrapper) is not None:
            with self._own_weights():
                own = rank_state(wrapper.bagua_ddp)
        if own:
            if self._interrupted:
                warn(
                    "training was interrupted, so the checkpoint has no state of bagua's "
                    "algorithm: other ranks, which hold a part of it, may be gone",
                    RuntimeWarning,
                    each_rank=True,
                )
            else:
                entry = of_all_ranks(own)
        if entry is not None:
            checkpoint[_KEY] = entry

    @contextmanager
    def _own_weights(self) -> Iterator[None]:
        validating = self._validating
        self._validate(False)
        try:
            yield
        finally:
            self._validate(validating)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the state of the algorithm too, which is wrapped already; see ``restore``."""
        super().load_optimizer_state_dict(checkpoint)  # type: ignore[misc]
        if (wrapper := self._wrapper) is not None:
            restore(wrapper.bagua_ddp, checkpoint.get(_KEY), _REMEDY)


def _end_each_rank_by_its_own_signal(trainer: Any) -> None:
    """Have ranks that train by themselves not wait for each other in every batch.

    Lightning broadcasts there whether rank 0 has received SIGTERM, and once more in the handler.
    """
    connector = trainer._signal_connector
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = _nothing
    connector._sigterm_notifier_fn = functools.partial(_note_sigterm, connector)


def _nothing() -> None:
    """Each rank ends after the batch in which it received SIGTERM, which Lightning looks at."""


def _note_sigterm(connector: Any, signum: Any, frame: Any) -> None:
    launcher = connector.trainer.strategy.launcher
    if not connector.received_sigterm and launcher is not None:
        launcher.kill(signum)
    connector.received_sigterm = True


class _LauncherMethods:
    """Bring the algorithm's state from rank 0 to the process that started it.

    In a file, as Lightning does with the weights: the queue for the other results is read only
    when the ranks have ended, and holds less than an algorithm's state.
    """

    #: Methods of Lightning's class that are extended.
    NEEDED = ("get_extra_results", "update_main_process_results")

    # An attribute of Lightning's class.
    _strategy: _TrainerMethods

    def get_extra_results(self, trainer: Any) -> dict[str, Any]:
        """On the first rank of a node: the results, with the file of the state."""
        extra: dict[str, Any] = super().get_extra_results(trainer)  # type: ignore[misc]
        if self._strategy.end_of_children is not None:
            file = Path(tempfile.mkdtemp(), "bagua.pt")
            torch.save(self._strategy.end_of_children, file)
            extra[_KEY] = str(file)
        return extra

    def update_main_process_results(self, trainer: Any, extra: dict[str, Any]) -> None:
        """Load that file, and remove it."""
        super().update_main_process_results(trainer, extra)  # type: ignore[misc]
        if (name := extra.get(_KEY)) is not None:
            self._strategy.end_of_children = torch.load(name, weights_only=True)
            shutil.rmtree(Path(name).parent)


class _FabricMethods:
    """Fabric trains by one of bagua's algorithms: ``Fabric(strategy=BaguaFabricStrategy(...))``.

    A subclass of Fabric's ``DDPStrategy``. The wrapper, a
    ``bagua.torch_api.data_parallel.DistributedDataParallel``, is what ``fabric.setup`` puts around
    the module.

    Args:
        precision: as Fabric's ``DDPStrategy`` has it.
        others: those of ``BaguaStrategy``, which raise the same.
    """

    #: Methods of Fabric's class that are overridden or called.
    NEEDED = (
        *("setup_module_and_optimizers", "setup_module", "setup_optimizer"),
        *("_setup_distributed", "_determine_ddp_device_ids", "get_module_state_dict"),
        *("save_checkpoint", "load_checkpoint"),
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
        guard: Guard | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        start_method: str = "popen",
        **bagua_kwargs: Any,
    ) -> None:
        self._wrapping = _Wrapping(
            algorithm,
            bagua_kwargs,
            gradient_as_bucket_view=flatten,
            find_unused_parameters=find_unused_parameters,
            broadcast_buffers=broadcast_buffers,
            bucket_cap_mb=bucket_cap_mb,
            static_graph=static_graph,
            guard=guard,
        )
        self._wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
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
        super()._setup_distributed()  # type: ignore[misc]
        os.environ.setdefault("NODE_RANK", str(self.cluster_environment.node_rank()))

    def setup_module_and_optimizers(
        self,
        module: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        *others: Any,
    ) -> tuple[Any, ...]:
        wrapper = self._wrap(module, optimizers)
        return wrapper, [self.setup_optimizer(o) for o in optimizers], *others  # type: ignore[attr-defined]

    def setup_module(self, module: torch.nn.Module) -> DistributedDataParallel:
        """Wrap a module whose optimizers come later; RuntimeError if the algorithm needs them."""
        wrapper = self._wrap(module, ())
        algorithm = wrapper.bagua_ddp.bagua_algorithm
        if algorithm.traits.ranks_agree is False:
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
        wrapper = self._wrapping.wrap(module, device_ids, optimizers, scaler)
        self._wrappers.add(wrapper)
        return wrapper

    @contextmanager
    def anchor(self) -> Iterator[None]:
        """A context in which modules have the weights that the ranks share, to evaluate them.

        That is the anchor of ``diloco``. With other algorithms weights are as
        training has left them. It does not communicate.
        """
        with ExitStack() as stack:
            for wrapper in list(self._wrappers):
                stack.enter_context(wrapper.bagua_ddp.bagua_algorithm.anchor())
            yield

    # Checkpoints.

    def get_module_state_dict(self, module: torch.nn.Module) -> dict[str, Any]:
        """The weights that the ranks share, or this rank's; a file gets those of rank 0."""
        if not isinstance(module, DistributedDataParallel):
            return super().get_module_state_dict(module)  # type: ignore[misc,no-any-return]
        with shared_weights(module.bagua_ddp):
            state: dict[str, Any] = copied(super().get_module_state_dict(module))  # type: ignore[misc]
        return state

    def save_checkpoint(self, path: Any, state: dict[str, Any], *others: Any, **named: Any) -> None:
        """Add the state of the algorithm, of all ranks, to what rank 0 writes."""
        for name, wrapper in _wrappers_in(state):
            entry = of_all_ranks(rank_state(wrapper.bagua_ddp))
            state = state if entry is None else {**state, f"{_KEY}/{name}": entry}
        super().save_checkpoint(path, state, *others, **named)  # type: ignore[misc]

    def load_checkpoint(
        self, path: Any, state: Any = None, *others: Any, **named: Any
    ) -> dict[str, Any]:
        """Load the state of the algorithm too; see ``restore``."""
        rest: dict[str, Any] = super().load_checkpoint(path, state, *others, **named)  # type: ignore[misc]
        for name, wrapper in _wrappers_in(state):
            restore(wrapper.bagua_ddp, rest.pop(f"{_KEY}/{name}", None), _REMEDY)
        return rest


def _wrappers_in(state: Any) -> list[tuple[str, DistributedDataParallel]]:
    items = state.items() if isinstance(state, Mapping) else ()
    return [(name, part) for name, part in items if isinstance(part, DistributedDataParallel)]


class _Wrapping:
    """Arguments of a strategy.

    ``arguments``: of the algorithm, where it is given by name. ``wrapper``: of
    ``DistributedDataParallel``.
    """

    def __init__(
        self, algorithm: str | Algorithm, arguments: Mapping[str, Any], **wrapper: Any
    ) -> None:
        # Checks
        if isinstance(algorithm, Algorithm):
            if arguments:
                raise TypeError(
                    f"BaguaStrategy: {sorted(arguments)} are not arguments of the strategy; pass "
                    f"those of the algorithm to {type(algorithm).__name__} itself"
                )
        elif not isinstance(algorithm, str):
            raise TypeError(
                "BaguaStrategy: algorithm must be a name or an instance of "
                f"bagua.torch_api.algorithms.Algorithm, not {algorithm!r}"
            )
        else:
            _check_name(algorithm, arguments)

        self._algorithm = algorithm
        self._arguments = arguments
        self._wrapper = wrapper

    def wrap(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[int] | None,
        optimizers: Sequence[torch.optim.Optimizer],
        grad_scaler: torch.amp.GradScaler | None,
        schedulers: int = 0,
    ) -> DistributedDataParallel:
        return DistributedDataParallel(
            module,
            device_ids,
            optimizers=optimizers,
            algorithm=self._reified(optimizers, schedulers),
            grad_scaler=grad_scaler,
            **self._wrapper,
        )

    def _reified(self, optimizers: Sequence[torch.optim.Optimizer], schedulers: int) -> Algorithm:
        if isinstance(self._algorithm, Algorithm):
            return self._algorithm
        if self._algorithm != _NEEDS_OPTIMIZER:
            return _init(self._algorithm, self._arguments)
        if len(optimizers) != 1 or not isinstance(optimizers[0], QAdamOptimizer):
            names = [type(optimizer).__name__ for optimizer in optimizers]
            raise ValueError(
                "BaguaStrategy(algorithm='qadam') needs exactly one optimizer, a QAdamOptimizer "
                f"(bagua.torch_api.algorithms.q_adam), not {names}"
            )
        if schedulers > 1:
            raise ValueError(
                "BaguaStrategy(algorithm='qadam') takes one learning rate scheduler, not "
                f"{schedulers}"
            )
        return _init(self._algorithm, {"q_adam_optimizer": optimizers[0], **self._arguments})


def _check_name(name: str, arguments: Mapping[str, Any]) -> None:
    try:
        GlobalAlgorithmRegistry.get(name)
    except KeyError as error:
        raise ValueError(f"BaguaStrategy: {error.args[0]}") from None
    if name != _NEEDS_OPTIMIZER:
        _init(name, arguments)


def _init(name: str, arguments: Mapping[str, Any]) -> Algorithm:
    try:
        return Algorithm.init(name, **arguments)
    except TypeError as error:
        raise TypeError(f"BaguaStrategy(algorithm={name!r}): {error}") from error


def _packages_in_use() -> list[str]:
    """The packages that have been imported; if none has, the first that is installed."""
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


def _register(package: str) -> tuple[Any, Any]:
    """Register ``"bagua"`` with a package, for Trainer and Fabric; returns the two strategies."""
    trainers, fabrics = map(importlib.import_module, _MODULES[package])
    strategy = _subclass(trainers, "DDPStrategy", _TrainerMethods, "BaguaStrategy")
    strategy.launcher_class = _subclass(
        trainers.launchers,
        "_MultiProcessingLauncher",
        _LauncherMethods,
        "BaguaStrategy.launcher_class",
    )
    fabric = _subclass(fabrics, "DDPStrategy", _FabricMethods, "BaguaFabricStrategy")
    for registry, made in (
        (trainers.StrategyRegistry, strategy),
        (fabrics.STRATEGY_REGISTRY, fabric),
    ):
        registry.register("bagua", made, description="algorithms of bagua", override=True)
    return strategy, fabric


def _subclass(module: Any, base: str, methods: Any, name: str) -> Any:
    """A class that pickles find here as ``name``; its methods go before those of ``base``."""
    theirs: Any = getattr(module, base, None)
    missing = [method for method in methods.NEEDED if not hasattr(theirs, method)]
    if missing:
        raise ImportError(
            f"bagua.lightning: {base} of {module.__name__} has no {' and no '.join(missing)}; "
            f"lightning {TESTED} is known to work"
        )
    attributes: dict[str, Any] = {
        "__module__": __name__,
        "__qualname__": name,
        "__doc__": methods.__doc__,
    }
    own = module.__name__.removesuffix(".strategies")
    if own in _OTHER:
        # Lightning shows it where it refuses a strategy of the other package.
        text = f"<{name} of {own}; that of {_OTHER[own]} is "
        text += f"bagua.lightning.strategies[{_OTHER[own]!r}]>"
        attributes["__repr__"] = lambda _: text
    return type(name.rpartition(".")[2], (methods, theirs), attributes)


class _Strategies(dict[str, Any]):
    """``BaguaStrategy`` and ``BaguaFabricStrategy`` by the name of their package."""

    def __missing__(self, package: str) -> Any:
        tree = "lightning" if package.split(".")[0] == "lightning" else "pytorch_lightning"
        if package != tree and package not in _OTHER:
            raise KeyError(package)
        self.add(tree, _register(tree))
        return self[package]

    def add(self, tree: str, made: tuple[Any, Any]) -> None:
        trainers, fabrics = (name.removesuffix(".strategies") for name in _MODULES[tree])
        self[tree] = self[trainers] = made[0]
        self[fabrics] = made[1]


#: ``BaguaStrategy`` of each package, by the name of the package, which is imported on demand;
#: ``BaguaFabricStrategy`` by ``"lightning.fabric"`` and ``"lightning_fabric"``.
strategies = _Strategies()
_in_use = _packages_in_use()
for _package in _in_use:
    strategies.add(_package, _register(_package))

BaguaStrategy = strategies[_in_use[0]]
BaguaFabricStrategy = strategies[_MODULES[_in_use[0]][1].removesuffix(".strategies")]
