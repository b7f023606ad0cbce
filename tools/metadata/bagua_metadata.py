"""Metadata that depends on the build: which torch a wheel needs, and a README without dead links.

scikit-build-core asks for both (pyproject.toml). A wheel works with the minor release of torch that
it was built against, and says so, or pip would install another one; a source distribution is built
against whatever torch there is.
"""

import os
import re
from importlib.metadata import version
from pathlib import Path

ANY_TORCH = "torch>=2.11"
#: `[text](target)` and `![text](target)` with a target inside the project.
RELATIVE_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)")


def dynamic_metadata(field, settings=None, *_):
    """The value of `dependencies` or `readme`; settings: {"pinned": bool} for the former."""
    if field == "dependencies":
        return [pinned_torch(version("torch")) if (settings or {}).get("pinned") else ANY_TORCH]
    if field == "readme":
        text = Path("README.md").read_text(encoding="utf-8")
        return {
            "content-type": "text/markdown",
            "text": readable_elsewhere(text, os.environ.get("BAGUA_PROJECT_URL")),
        }
    raise ValueError(f"there is no provider for the field {field!r}")


def get_requires_for_dynamic_metadata(_settings=None):
    return []


def pinned_torch(installed):
    """The requirement that admits the minor release of an installed torch: "2.13.0+cpu"."""
    major, minor = installed.split("+")[0].split(".")[:2]
    return f"torch=={major}.{minor}.*"


def readable_elsewhere(text, url=None):
    """The README for a page that has no other files of the project.

    Links into the project become links below `url`, the address of its files; without one they
    become their text, and pictures go.
    """

    def replace(link):
        picture, words, target = link.groups()
        if url:
            return f"{picture}[{words}]({url.rstrip('/')}/{target})"
        return "" if picture else words

    return RELATIVE_LINK.sub(replace, text)
