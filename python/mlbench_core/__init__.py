"""The documented classes of mlbench-core over bagua's core; users import from the leaf modules."""

import warnings
from importlib.metadata import PackageNotFoundError, version

__all__: list[str] = []


def _warn_of_the_original() -> None:
    """Both packages have a module of this name; pip keeps the files that came last."""
    try:
        theirs = version("mlbench-core")
    except PackageNotFoundError:
        return
    warnings.warn(
        f"mlbench-core {theirs} is installed beside bagua, and both contain the module "
        "'mlbench_core': files of one have overwritten files of the other. Remove both and install "
        "the one that you want: pip uninstall bagua mlbench-core",
        RuntimeWarning,
        stacklevel=3,
    )


_warn_of_the_original()
