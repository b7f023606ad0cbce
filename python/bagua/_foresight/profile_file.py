"""Profiles in files."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bagua._foresight.profile import BucketProfile, CodecSpeed, Link, Profile

__all__ = ["VERSION", "profile_from", "read_profile", "values_of", "write_profile"]

#: Of the format; raised when a field changes its meaning.
VERSION = 1


def values_of(profile: Profile) -> dict[str, Any]:
    """The profile as values of JSON, with the version of the format."""
    return {"bagua_profile": VERSION, **dataclasses.asdict(profile)}


def profile_from(values: Any, where: str = "profile") -> Profile:
    """The profile of what :func:`values_of` returned, and JSON may have carried.

    Raises:
        ValueError: naming ``where``: values of another format or version, a missing or unknown
            field, or figures that make no profile.
    """
    if not isinstance(values, Mapping) or "bagua_profile" not in values:
        raise ValueError(f"{where}: no profile of bagua: it has no 'bagua_profile'")
    fields = dict(values)
    version = fields.pop("bagua_profile")
    if version != VERSION:
        raise ValueError(
            f"{where}: a profile of version {version!r}, and this bagua reads version {VERSION}: "
            "measure it again"
        )
    try:
        fields["nodes"] = tuple(int(ranks) for ranks in fields["nodes"])
        fields["buckets"] = tuple(_bucket(one) for one in fields["buckets"])
        fields["between"] = Link(**fields["between"])
        if fields.get("inside") is not None:
            fields["inside"] = Link(**fields["inside"])
        codecs = fields.get("codecs", {})
        fields["codecs"] = {name: CodecSpeed(**speed) for name, speed in codecs.items()}
        return Profile(**fields)
    except KeyError as error:
        raise ValueError(f"{where}: the profile has no {error}") from error
    except (TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error


def write_profile(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write a profile as JSON, in place of a file that is there."""
    Path(path).write_text(json.dumps(values_of(profile), indent=2) + "\n")


def read_profile(path: str | os.PathLike[str]) -> Profile:
    """Read a profile that :func:`write_profile` wrote.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds no profile of this version.
    """
    try:
        values = json.loads(Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"{path}: no JSON: {error}") from error
    return profile_from(values, str(path))


def _bucket(values: Mapping[str, Any]) -> BucketProfile:
    shapes = tuple((int(rows), int(columns)) for rows, columns in values.get("shapes", ()))
    return BucketProfile(**{**values, "shapes": shapes})
