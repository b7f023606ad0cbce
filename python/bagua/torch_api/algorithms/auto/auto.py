"""``AutoAlgorithm``: measures a training as it begins, and takes the fastest algorithm."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bagua._core.group.connections import fingerprint
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._core.state.saved_values import check_state
from bagua._core.state.snapshot import sparse_parameters
from bagua._foresight.candidate import Candidate
from bagua._foresight.profile import Profile
from bagua._foresight.profile_file import read_profile, values_of
from bagua._guard.guard import Guard
from bagua._sync.synchronizer import Synchronizer
from bagua._sync.wrapper import Wrapper as SynchronizedModule
from bagua.torch_api.algorithms.auto.candidates import (
    algorithm_of,
    as_candidates,
    default_candidates,
    exact,
)
from bagua.torch_api.algorithms.auto.choice import Limits
from bagua.torch_api.algorithms.auto.course import Course, Settings
from bagua.torch_api.algorithms.auto.probe.links import node_sizes
from bagua.torch_api.algorithms.auto.saved import choice_text, read_choice
from bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl, WrappedModule
from bagua.torch_api.bucket import BaguaBucket

__all__ = ["AutoAlgorithm", "AutoAlgorithmImpl"]

#: Attributes of an implementation that permit something: all candidates must permit it.
_PERMISSIONS = (
    *("takes_uneven_inputs", "takes_unfrozen", "shares_parameters", "steps_in_backward"),
)
#: Attributes that demand something: any candidate may demand it.
_DEMANDS = ("remembers_gradients", "sends_own_steps")
#: Attributes of the algorithm at work: what it cannot communicate is not chosen.
_OF_THE_INNER = ("reads_grad_scale", "complex_parameters", "sparse_gradients")


class AutoAlgorithm(Algorithm):
    """Takes the fastest algorithm whose error is allowed, by measuring the training as it begins.

    The first steps average exactly. In them the ranks measure a step without communication, when
    gradients are ready, links between and inside nodes, the speed of codecs on this device, and
    what each candidate loses of the real gradients. A model of a step
    (``bagua simulate``) predicts every candidate; close ones are tried for some steps each. The
    winner trains from then on: within 20 steps or 5 seconds, where one exact step takes no longer.
    All ranks choose the same. Exact gradients stay if nothing is faster by 3 %. A guard watches
    what the choice loses (:class:`~bagua.torch_api.Guard`); ``with_bagua(guard=...)`` replaces it.

    ``module.bagua_stats()["choice"]`` has the table of all candidates, which the first rank logs.

    Ranks hold the same bits after every step. All candidates communicate gradients. Algorithms that
    change the training in other ways (``decentralized``, ``async``, ``diloco``, ``qadam``) are not
    candidates, since time alone cannot decide for them.

    Args:
        candidates: names or :class:`Candidate` objects to choose from, of ``gradient_allreduce``,
            ``bytegrad``, ``power_sgd`` and ``sparse``. None: exact gradients, ``bytegrad`` with
            8 bits, and with 4 bits and error feedback, each also hierarchical where nodes have
            several ranks.
        max_error: relative L2 error of a gradient that is allowed without error feedback. 0.05 lies
            between the error of 8 bits (0.01 to 0.02), which trains as exact gradients do, and that
            of 4 bits (0.1 to 0.2), which costs an adaptive optimizer a little.
        max_error_with_feedback: the same with error feedback. 0.3 admits 4 bits (0.1 to 0.2), which
            end within 0.01 of the loss of exact gradients under AdamW, and keeps out 2 bits
            (0.34 and more), which end 0.07 above it.
        most_steps: steps until the choice, those of trials included: of up to four trials of 17
            steps where a step takes at most 30 ms, of 13 up to 70 ms, of 4 and fewer for longer
            ones. Where too few are left for trials, the predictions decide.
        most_seconds: of steps that are measured before trials. At least one step is exact.
        replan: measure the links again, and choose anew, when the wire has been twice as fast or
            slow for several seconds. Costs an all-reduce of one number every two seconds.
        profile: choose from this :class:`~bagua._foresight.profile.Profile`, or its file, which
            a training with ``BAGUA_PROFILE`` writes, instead of measuring: the choice is the same
            in every run. A codec whose error it does not have counts with that of cubes of normal
            numbers.

    Raises:
        TypeError, ValueError: an argument of another kind or out of range, by name.
        OSError: the profile cannot be read.
    """

    def __init__(
        self,
        candidates: Sequence[str | Candidate] | None = None,
        *,
        max_error: float = 0.05,
        max_error_with_feedback: float = 0.3,
        most_steps: int = 100,
        most_seconds: float = 5.0,
        replan: bool = True,
        profile: Profile | str | os.PathLike[str] | None = None,
    ) -> None:
        if isinstance(candidates, str):
            raise TypeError(f"AutoAlgorithm: candidates is a list of names: ['{candidates}']")
        for name, value in (
            ("max_error", max_error),
            ("max_error_with_feedback", max_error_with_feedback),
        ):
            if not 0 <= value < float("inf"):
                raise ValueError(f"AutoAlgorithm: {name}={value} must be 0 or a positive number")
        if most_steps < 1 or not most_seconds >= 0:
            raise ValueError(
                f"AutoAlgorithm: most_steps={most_steps} must be at least 1, and "
                f"most_seconds={most_seconds} must not be negative"
            )
        self.candidates = None if candidates is None else as_candidates(candidates)
        self.max_error = max_error
        self.max_error_with_feedback = max_error_with_feedback
        self.most_steps = most_steps
        self.most_seconds = most_seconds
        self.replan = replan
        self.profile = (
            profile if profile is None or isinstance(profile, Profile) else read_profile(profile)
        )

    def describe(self) -> str:
        given = None if self.candidates is None else [one.label() for one in self.candidates]
        profile = None
        if self.profile is not None:
            text = json.dumps(values_of(self.profile), sort_keys=True)
            profile = f"{fingerprint([text]):x}"
        return f"{super().describe()} candidates {given} profile {profile}"

    def reify(self, process_group: BaguaProcessGroup) -> AutoAlgorithmImpl:
        return AutoAlgorithmImpl(process_group, self)


class AutoAlgorithmImpl(AlgorithmImpl):
    """Implementation of :class:`AutoAlgorithm`: an inner one at work, and the course of the choice.

    Attributes:
        inner: the implementation that communicates.
        at_work: its candidate.
    """

    ranks_agree = True
    reset_gives_state = False
    default_guard = Guard()

    def __init__(self, process_group: BaguaProcessGroup, arguments: AutoAlgorithm) -> None:
        super().__init__(process_group)
        self._arguments = arguments
        self._ddp: weakref.ref[WrappedModule] | None = None
        self._refused: dict[Candidate, str] = {}
        if arguments.candidates is not None:
            self._candidates = arguments.candidates
        else:
            self._candidates, self._refused = default_candidates(_nodes_of(process_group))
        self._course: Course | None = None
        self._next: tuple[Candidate, AlgorithmImpl] | None = None
        self.at_work = exact()
        self.inner = algorithm_of(self.at_work).reify(process_group)
        self._take_attributes()

    def _take_attributes(self) -> None:
        """While the choice is open, attributes are right for every candidate."""
        open_ = self._course is None or self._course.open
        impls = [self.inner]
        if open_:
            possible = [one for one in self._candidates if one not in self._refused]
            impls += [algorithm_of(one).reify(self.process_group) for one in possible]
        for name in _PERMISSIONS:
            setattr(self, name, all(getattr(impl, name) for impl in impls))
        for name in _DEMANDS:
            setattr(self, name, any(getattr(impl, name) for impl in impls))
        for name in _OF_THE_INNER:
            setattr(self, name, getattr(self.inner, name))

    # Buckets.

    def need_reset(self) -> bool:
        return self._next is not None or self.inner.need_reset()

    def init_tensors(self, bagua_ddp: WrappedModule) -> list[torch.Tensor]:
        if self._course is None:
            self._ddp = weakref.ref(bagua_ddp)
            self._course, chosen = self._begin_course(bagua_ddp)
            self._go_to(chosen)
        if self._next is not None:
            self.inner.close()
            (self.at_work, self.inner), self._next = self._next, None
            self._take_attributes()
        return self.inner.init_tensors(bagua_ddp)

    def tensors_to_buckets(
        self, tensors: Sequence[Sequence[torch.Tensor]], do_flatten: bool
    ) -> list[BaguaBucket]:
        assert self._course is not None
        groups = self._course.arrange(tensors, self.at_work)
        return self.inner.tensors_to_buckets(groups, do_flatten)

    def init_operations(self, bagua_ddp: WrappedModule, bucket: BaguaBucket) -> None:
        self.inner.init_operations(bagua_ddp, bucket)

    def make_synchronizer(self, bagua_ddp: SynchronizedModule) -> Synchronizer:
        return self.inner.make_synchronizer(bagua_ddp)

    # Hooks.

    def overrides(self, method: str) -> bool:
        return method == "init_post_backward_hook" or self.inner.overrides(method)

    def init_forward_pre_hook(self, bagua_ddp: WrappedModule) -> Callable[[Any], None]:
        if self._course is not None and not bagua_ddp.joining:
            self._course.forward_begins(bagua_ddp)
        return self.inner.init_forward_pre_hook(bagua_ddp)

    def init_backward_hook(
        self, bagua_ddp: WrappedModule
    ) -> Callable[[str, torch.nn.Parameter], None]:
        return self.inner.init_backward_hook(bagua_ddp)

    def init_pre_backward_hook(self, bagua_ddp: WrappedModule) -> Callable[[], None]:
        return self.inner.init_pre_backward_hook(bagua_ddp)

    def init_post_backward_hook(self, bagua_ddp: WrappedModule) -> Callable[[], None]:
        def finish() -> None:
            self.inner.init_post_backward_hook(bagua_ddp)()
            # Inside join() ranks without inputs are in no step: nothing is measured there.
            if self._course is not None and self._next is None and not bagua_ddp.joining:
                was_open = self._course.open
                self._go_to(self._course.round_ended(bagua_ddp))
                if was_open and not self._course.open:
                    self._take_attributes()

        return finish

    def init_post_optimizer_step_hook(
        self, bagua_ddp: WrappedModule
    ) -> Callable[[torch.optim.Optimizer], None]:
        return self.inner.init_post_optimizer_step_hook(bagua_ddp)

    def mark_pending(self, bagua_ddp: WrappedModule) -> bool:
        return self.inner.mark_pending(bagua_ddp)

    def close(self) -> None:
        if self._course is not None:
            self._course.close()
        self.inner.close()

    # The choice.

    def statistics(self) -> dict[str, Any]:
        """``{"choice": ...}``, see ``BaguaModule.bagua_stats``."""
        return {} if self._course is None else {"choice": self._course.values()}

    def _begin_course(self, bagua_ddp: WrappedModule) -> tuple[Course, Candidate | None]:
        own, named = self._arguments, bagua_ddp.bagua_build_params()
        limits = Limits(own.max_error, own.max_error_with_feedback)
        course = Course(
            Settings(limits, own.most_steps, own.most_seconds, own.replan),
            self.process_group.connections,
            named[0][1].device if named else torch.device("cpu"),
            bagua_ddp.bagua_module_name,
            self._candidates,
            self._refused | self._unsupported(bagua_ddp),
        )
        return course, course.begin(own.profile, sum(p.numel() for _, p in named))

    def _go_to(self, candidate: Candidate | None) -> None:
        """Communicate by ``candidate`` from the next buckets on; None: go on as it is."""
        if candidate is not None:
            self._next = candidate, algorithm_of(candidate).reify(self.process_group)

    def _unsupported(self, bagua_ddp: WrappedModule) -> dict[Candidate, str]:
        """Candidates that cannot communicate this module's gradients, with the reason."""
        named = bagua_ddp.bagua_build_params()
        sparse = any(id(p) in sparse_parameters(bagua_ddp.module) for _, p in named)
        complex_ = any(parameter.is_complex() for _, parameter in named)
        found = {}
        for candidate in self._candidates:
            impl = algorithm_of(candidate).reify(self.process_group)
            if sparse and not impl.sparse_gradients:
                found[candidate] = "the model has sparse gradients"
            elif complex_ and not impl.complex_parameters:
                found[candidate] = "the model has complex parameters"
        return found

    # State for checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """The choice and the state of the algorithm that was chosen.

        Returns:
            ``choice``, a text, empty until the choice is made; then also the entries of the inner
            algorithm, if its buckets are made.
        """
        course = self._course
        if course is None or course.chosen is None:
            return {"choice": ""}
        inner = self.inner.state_dict() if self._next is None else {}
        return {"choice": choice_text(course.chosen, course.profile)} | inner

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict` on every rank, after ``with_bagua``: nothing is measured then.

        The buckets of the choice are built at once. A state that was saved before the choice
        changes nothing.

        Raises:
            ValueError: the state is of another algorithm or model; names the entry.
        """
        check_state(state, type(self).__name__)
        if "choice" not in state:
            raise ValueError(
                "AutoAlgorithm: the state has no 'choice': it is of another algorithm. Wrap with "
                "that algorithm, or leave its state out"
            )
        inner = _without_choice(state)
        saved = read_choice(state["choice"])
        bagua_ddp = None if self._ddp is None else self._ddp()
        if saved is None or self._course is None or bagua_ddp is None:
            return
        candidate, profile = saved
        built = self._next is None and self._course.chosen == self.at_work == candidate
        if not built:
            fresh = algorithm_of(candidate).reify(self.process_group)
            self._course.restore(candidate, profile)
            self._next = candidate, fresh
            bagua_ddp.rebuild()
        if inner or not self.inner.state_dict():
            self.inner.load_state_dict(inner)

    def carry_over(self, state: dict[str, Any], fresh: dict[str, Any]) -> dict[str, Any]:
        carried = self.inner.carry_over(_without_choice(state), _without_choice(fresh))
        return {"choice": fresh["choice"]} | carried


def _without_choice(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key != "choice"}


def _nodes_of(group: BaguaProcessGroup) -> tuple[int, ...]:
    return (1,) if group.size == 1 else node_sizes(group.connections)
