"""Messages of the build and of the import where CUDA's parts do not fit together."""

import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import bagua
import pytest
import torch

REPOSITORY = Path(__file__).parents[2]

# Enough of a torch for the configuration of the build.
TORCH = """
__version__ = "2.13.0"
class _C:
    _GLIBCXX_USE_CXX11_ABI = 1
class version:
    cuda = "{cuda}"
"""


def configure(folder, cuda):
    """Configure with a torch of this CUDA version: (exit status, text of the errors)."""
    (folder / "torch").mkdir()
    (folder / "torch/__init__.py").write_text(TORCH.format(cuda=cuda))
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    done = subprocess.run(
        [
            *["cmake", "-S", str(REPOSITORY), "-B", str(folder / "build"), "-G", "Ninja"],
            *["-DBAGUA_CUDA=ON", f"-DPython_EXECUTABLE={python}"],
        ],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return done.returncode, " ".join(done.stderr.split())


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
def test_an_nvcc_newer_than_torchs_cuda_is_refused(tmp_path):
    status, text = configure(tmp_path, "11.8")
    assert status != 0
    assert "torch of CUDA 11.8: kernels of a newer major version may not start" in text
    assert "Set CUDACXX to the nvcc of a toolkit 11.x" in text


def test_a_build_without_kernels_warns_where_there_is_a_gpu(monkeypatch):
    monkeypatch.setattr(bagua, "has_cuda_codecs", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.warns(RuntimeWarning, match=r"without CUDA kernels.* Install .* toolkit 13.x"):
        bagua._warn_without_kernels()


@pytest.mark.parametrize(
    ("kernels", "cuda", "gpus"), [(True, "13.0", 1), (False, None, 1), (False, "13.0", 0)]
)
def test_other_builds_say_nothing(monkeypatch, kernels, cuda, gpus):
    monkeypatch.setattr(bagua, "has_cuda_codecs", lambda: kernels)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bagua._warn_without_kernels()
