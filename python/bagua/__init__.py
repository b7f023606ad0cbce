"""Data-parallel PyTorch training for networks that are slower than the processor.

Start with ``import bagua.torch_api as bagua``.
"""

import itertools
import logging
import os
import sys
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from bagua._build import TORCH_VERSION

try:
    __version__ = version("bagua")
except PackageNotFoundError:  # a source tree on PYTHONPATH
    __version__ = "0+source"


def _release(torch_version: str) -> str:
    """Major and minor number: torch's C++ interface is stable within them."""
    return ".".join(torch_version.split("+")[0].split(".")[:2])


def _check_torch(running: str, built: str) -> None:
    if _release(running) != _release(built):
        raise ImportError(
            f"bagua was built for torch {built}, but torch {running} is installed. "
            "Install the torch it was built for, or rebuild bagua for this one, in the folder of "
            "its source: pip install --force-reinstall --no-deps --no-build-isolation ."
        )


def _runs_the_command() -> bool:
    """Whether this import is that of ``python -m bagua`` or of the script ``bagua``.

    Python names "-m" as the running script as long as it looks for the module.
    """
    if sys.argv[:1] == ["-m"]:
        options = itertools.pairwise(sys.orig_argv)
        modules = [module for option, module in options if option[:1] == "-" and option[-1] == "m"]
        return modules[:1] == ["bagua"]
    return [Path(script).name for script in sys.argv[:1]] == ["bagua"]


#: The reason for which the command reports only: nothing else of the package can be imported then.
_import_error: ImportError | None = None

try:
    _check_torch(torch.__version__, TORCH_VERSION)
    from bagua._C import (
        BaguaError,
        BaguaMismatchError,
        BaguaTimeoutError,
        has_cuda_codecs,
    )
except ImportError as error:
    if not _runs_the_command():
        raise
    _import_error = error


def _warn_without_kernels() -> None:
    """The build takes no CUDA kernels where it finds no nvcc, and pip hides what it says."""
    speaks = os.environ.get("LOCAL_RANK", "0") == "0"  # each machine has a build
    if speaks and torch.version.cuda and not has_cuda_codecs() and torch.cuda.device_count() > 0:
        warnings.warn(
            f"bagua was built without CUDA kernels, and torch {torch.__version__} sees a GPU: "
            "algorithms that compress will refuse CUDA tensors. Install the CUDA toolkit "
            f"{torch.version.cuda.split('.')[0]}.x (nvcc), then, in the folder of bagua's source: "
            "pip install --force-reinstall --no-deps --no-build-isolation "
            "-C cmake.define.BAGUA_CUDA=ON .",
            RuntimeWarning,
            stacklevel=3,
        )


if _import_error is None:
    _warn_without_kernels()

# Silent unless the application configures logging.
logging.getLogger("bagua").addHandler(logging.NullHandler())

__all__ = ["BaguaError", "BaguaMismatchError", "BaguaTimeoutError", "__version__"]
