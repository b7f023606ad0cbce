"""Loads Python files that are in no package: of benchmarks/, and of the build in tools/."""

import importlib.util
import sys
from pathlib import Path

__all__ = ["BENCHMARKS", "load", "load_file"]

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def load(name):
    """The module of benchmarks/<name>.py, also under that name for the others that import it."""
    return load_file(BENCHMARKS / f"{name}.py", shared=True)


def load_file(path, shared=False):
    """The module of a file; shared: others may import it by the file's name."""
    name = Path(path).stem
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    if shared:
        sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
