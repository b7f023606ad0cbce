"""The choice as a text in checkpoints."""

from __future__ import annotations

import json
from typing import Any

from bagua._foresight.candidate import Candidate
from bagua._foresight.profile import Profile
from bagua._foresight.profile_file import profile_from, values_of
from bagua.torch_api.algorithms.auto.candidates import algorithm_of

__all__ = ["choice_text", "read_choice"]


def choice_text(candidate: Candidate, profile: Profile | None) -> str:
    """The candidate, and the profile that it was chosen by, as JSON."""
    return json.dumps(
        {
            "algorithm": candidate.algorithm,
            "arguments": dict(candidate.arguments),
            "lanes": candidate.lanes,
            "bucket_bytes": candidate.bucket_bytes,
            "profile": None if profile is None else values_of(profile),
        },
        sort_keys=True,
    )


def read_choice(text: Any) -> tuple[Candidate, Profile | None] | None:
    """The arguments of :func:`choice_text`; None: the text is empty, nothing was chosen yet.

    Raises:
        ValueError: the text is something else.
    """
    if text == "":
        return None
    try:
        values = json.loads(text)
        profile = values.pop("profile")
        candidate = Candidate(**values)
        algorithm_of(candidate)
        return candidate, None if profile is None else profile_from(profile, "choice")
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ValueError(
            f"AutoAlgorithm: 'choice' is {str(text)[:80]!r} in the state, which names no algorithm "
            f"({error}); the checkpoint is damaged or of another version"
        ) from error
