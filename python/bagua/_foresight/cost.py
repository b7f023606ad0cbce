"""Predicts what a step costs with a candidate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from bagua._foresight.candidate import Candidate
from bagua._foresight.model import steps
from bagua._foresight.model.network import Cluster, Members, Stage
from bagua._foresight.model.operations import Arithmetic, Operations
from bagua._foresight.model.plan import buckets_of, share_of
from bagua._foresight.model.steps import Setting, Work
from bagua._foresight.prediction import Prediction
from bagua._foresight.profile import BucketProfile, Link, Profile

__all__ = ["KNOWN", "predict"]

_OUTER = {"fragments": 1, "overlap_steps": 0}
#: By algorithm: the arguments that its cost depends on, and their defaults.
KNOWN: Mapping[str, Mapping[str, Any]] = {
    "gradient_allreduce": {"hierarchical": False},
    "bytegrad": {"hierarchical": True, "codec": "block_uint8", "error_feedback": False},
    "qadam": {"hierarchical": True, "codec": "block_uint8", "error_feedback": False},
    "power_sgd": {"rank": 1, "hierarchical": False, "min_compression_rate": 2.0},
    "sparse": {"ratio": 0.01, "hierarchical": False, "random_sparse": False, "codec": None},
    "decentralized": {
        "hierarchical": True,
        "peer_selection_mode": "all",
        "communication_interval": 1,
    },
    "low_precision_decentralized": {
        "hierarchical": True,
        "communication_interval": 1,
        "codec": "block_uint8",
    },
    "async": {"sync_interval_ms": 500},
    "diloco": {
        **_OUTER,
        "interval": 100,
        "codec": None,
        "error_feedback": None,
        "hierarchical": False,
    },
    "sparse_loco": {**_OUTER, "interval": 30, "ratio": 1 / 64},
}

Make = Callable[[Members, BucketProfile], list[Stage]]


def predict(
    profile: Profile,
    candidate: Candidate,
    *,
    ranks: int | None = None,
    between: Link | None = None,
    inside: Link | None = None,
) -> Prediction:
    """The cost of a step with a candidate, after its warm-up; takes milliseconds.

    Args:
        profile: of a training.
        candidate: an algorithm and its arguments, of which many have no part in the cost.
        ranks: predict for so many; nodes are as large as the profile's largest. None: the
            profile's.
        between: another link between nodes than the profile's.
        inside: another link inside nodes than the profile's.

    Raises:
        ValueError: an algorithm that the model does not know, or a number of ranks below 1.
    """
    arguments = _arguments(candidate)
    cluster = Cluster.of(profile, ranks, between, inside)
    model = _Model(profile, cluster, arguments)
    setting = Setting(profile, candidate.lanes, cluster.ranks)
    if cluster.ranks == 1:
        return Prediction(profile.compute, 0.0, 0, 0.0)
    buckets = buckets_of(profile, candidate.bucket_bytes)
    if candidate.algorithm == "async":
        whole = BucketProfile(profile.numel, profile.bytes, 0.0)
        average = model.operations.exact(cluster.everyone(), whole)
        return steps.async_step(
            replace(setting, waits_for=1), average, arguments["sync_interval_ms"] / 1000
        )
    if candidate.algorithm in ("decentralized", "low_precision_decentralized"):
        return model.weights(setting, candidate.algorithm, buckets)
    if candidate.algorithm in ("diloco", "sparse_loco"):
        return model.outer(setting, candidate.algorithm, buckets)
    make = model.gradient_operation(candidate.algorithm)
    work = [Work(bucket, model.hierarchical(make, bucket)) for bucket in buckets]
    return steps.gradients(setting, work)


def _arguments(candidate: Candidate) -> dict[str, Any]:
    """Those of the candidate, and the defaults of the others."""
    known = KNOWN.get(candidate.algorithm)
    if known is None:
        raise ValueError(
            f"the cost model does not know algorithm '{candidate.algorithm}'; it knows "
            f"{', '.join(sorted(KNOWN))}"
        )
    return {**known, **candidate.arguments}


class _Model:
    """The operations of one algorithm in one cluster."""

    def __init__(self, profile: Profile, cluster: Cluster, arguments: Mapping[str, Any]) -> None:
        self.arithmetic = Arithmetic(profile)
        self.operations = Operations(self.arithmetic)
        self._cluster = cluster
        self._arguments = arguments

    def hierarchical(self, make: Make, bucket: BucketProfile) -> list[Stage]:
        """An operation among all ranks or, as the arguments say, between the nodes."""
        hierarchical, cluster = self._arguments.get("hierarchical", False), self._cluster
        if not hierarchical:
            return make(cluster.everyone(), bucket)
        node = cluster.node()
        if cluster.nodes == 1:
            return self.operations.exact(node, bucket)
        if hierarchical != "sharded":
            inner = make(cluster.leaders(), bucket)
            return [node.all_reduce(bucket.bytes), *inner, node.broadcast(bucket.bytes)]
        share = share_of(bucket, cluster.per_node)
        others = bucket.bytes - share.bytes
        if cluster.per_node == 1:
            return make(cluster.shares(), share)
        joined = self.arithmetic.passes(bucket.bytes, 2.0)
        return [
            node.exchange(others, cluster.per_node - 1, during=joined),
            *make(cluster.shares(), share),
            node.exchange((cluster.per_node - 1) * share.bytes, cluster.per_node - 1),
        ]

    def gradient_operation(self, algorithm: str) -> Make:
        """The operation that averages a bucket of gradients, or of momentum."""
        own, operations = self._arguments, self.operations
        if algorithm == "gradient_allreduce":
            return operations.exact
        if algorithm == "power_sgd":
            return lambda members, bucket: operations.low_rank(
                members, bucket, own["rank"], own["min_compression_rate"]
            )
        if algorithm == "sparse" and own["random_sparse"]:
            return lambda members, bucket: operations.random_sparse(members, bucket, own["ratio"])
        if algorithm == "sparse":
            return lambda members, bucket: operations.sparse(
                members, bucket, own["ratio"], codec=own["codec"]
            )
        momentum = algorithm == "qadam"

        def compressed(members: Members, bucket: BucketProfile) -> list[Stage]:
            stages = operations.compressed(
                members, bucket, own["codec"], error_feedback=bool(own["error_feedback"])
            )
            update = Stage(before=self.arithmetic.passes(bucket.bytes, 1.5))
            return [update, *stages] if momentum else stages

        return compressed

    def weights(
        self, setting: Setting, algorithm: str, buckets: tuple[BucketProfile, ...]
    ) -> Prediction:
        """Weights that are averaged or mixed every ``communication_interval`` steps."""
        own, operations, cluster = self._arguments, self.operations, self._cluster
        interval = own["communication_interval"]
        if algorithm == "low_precision_decentralized":

            def ring(members: Members, bucket: BucketProfile) -> list[Stage]:
                if members == cluster.everyone():
                    members = cluster.neighbours()
                return operations.compressed_gossip(members, bucket, own["codec"])

            work = [Work(bucket, self.hierarchical(ring, bucket)) for bucket in buckets]
            return steps.weights_after(_among(setting, 3), work, interval)
        everyone = own["peer_selection_mode"] == "all"
        make = operations.exact if everyone else operations.gossip
        work = [
            Work(bucket, [operations.copy(bucket), *self.hierarchical(make, bucket)])
            for bucket in buckets
        ]
        return steps.weights_before(setting if everyone else _among(setting, 2), work, interval)

    def outer(
        self, setting: Setting, algorithm: str, buckets: tuple[BucketProfile, ...]
    ) -> Prediction:
        """Rounds of local training."""
        own, operations = self._arguments, self.operations
        codec = own.get("codec")
        feedback = own.get("error_feedback")
        if feedback is None:
            feedback = codec not in (None, "fp16", "bf16")

        def make(members: Members, bucket: BucketProfile) -> list[Stage]:
            if algorithm == "sparse_loco":
                return operations.chunked_sparse(members, bucket, own["ratio"])
            if codec is None:
                return operations.exact(members, bucket)
            return operations.compressed(members, bucket, codec, error_feedback=feedback)

        fragments = own.get("fragments", 1)
        count = fragments if isinstance(fragments, int) else len(fragments)
        parts = [share_of(bucket, count) for bucket in buckets]
        work = [Work(part, self.hierarchical(make, part)) for part in parts]
        return steps.rounds(setting, [work] * count, own["interval"], own.get("overlap_steps", 0))


def _among(setting: Setting, ranks: int) -> Setting:
    return replace(setting, waits_for=min(ranks, setting.waits_for))
