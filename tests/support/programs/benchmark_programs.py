"""Loads programs of benchmarks/, which are no package."""

import importlib.util
import sys
from pathlib import Path

__all__ = ["BENCHMARKS", "load"]

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def load(name):
    """The module of benchmarks/<name>.py, also under that name for the others that import it."""
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
