"""An algorithm with its arguments, whose step is to be predicted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Candidate"]


@dataclass(frozen=True)
class Candidate:
    """An algorithm with its arguments.

    Two candidates of equal names, arguments, lanes and bucket sizes are equal, and hash alike.

    Attributes:
        algorithm: name as in ``Algorithm.init``.
        arguments: keyword arguments of ``Algorithm.init``; what is missing has its default there.
        lanes: communication threads.
        bucket_bytes: size of the buckets; None: those of the profile.
    """

    algorithm: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    lanes: int = 1
    bucket_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.lanes < 1:
            raise ValueError(f"Candidate: lanes={self.lanes} must be at least 1")
        if self.bucket_bytes is not None and self.bucket_bytes < 1:
            raise ValueError(f"Candidate: bucket_bytes={self.bucket_bytes} must be at least 1")

    def __hash__(self) -> int:
        return hash(self.label())

    def label(self) -> str:
        """The candidate as a call, such as ``bytegrad(codec='int4_block')``."""
        words = [f"{name}={value!r}" for name, value in sorted(self.arguments.items())]
        if self.lanes != 1:
            words.append(f"lanes={self.lanes}")
        if self.bucket_bytes is not None:
            words.append(f"bucket_bytes={self.bucket_bytes}")
        return f"{self.algorithm}({', '.join(words)})" if words else self.algorithm
