"""Data-parallel PyTorch training for networks that are slower than the processor.

Start with ``import bagua.torch_api as bagua``.
"""

import logging
import warnings
from importlib.metadata import PackageNotFoundError, version

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
            "Install the torch it was built for, or rebuild bagua for this one: "
            "pip install --force-reinstall --no-deps --no-build-isolation bagua"
        )


_check_torch(torch.__version__, TORCH_VERSION)

from bagua._C import (  # noqa: E402
    BaguaError,
    BaguaMismatchError,
    BaguaTimeoutError,
    has_cuda_codecs,
)


def _warn_without_kernels() -> None:
    """The build takes no CUDA kernels where it finds no nvcc, and pip hides what it says."""
    if torch.version.cuda and not has_cuda_codecs() and torch.cuda.device_count() > 0:
        warnings.warn(
            f"bagua was built without CUDA kernels, and torch {torch.__version__} sees a GPU: "
            "algorithms that compress will refuse CUDA tensors. Install the CUDA toolkit "
            f"{torch.version.cuda.split('.')[0]}.x (nvcc), then: pip install --force-reinstall "
            "--no-deps --no-build-isolation -C cmake.define.BAGUA_CUDA=ON bagua",
            RuntimeWarning,
            stacklevel=3,
        )


_warn_without_kernels()

# Silent unless the application configures logging.
logging.getLogger("bagua").addHandler(logging.NullHandler())

__all__ = ["BaguaError", "BaguaMismatchError", "BaguaTimeoutError", "__version__"]
