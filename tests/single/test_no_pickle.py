"""Nothing that comes over the network is unpickled: no source file can, by reading all of them."""

import ast
from pathlib import Path

import pytest

PYTHON = Path(__file__).resolve().parents[2] / "python"
#: Modules that make objects, or run code, as the bytes they read say.
RUN_WHAT_THEY_READ = {
    *("pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"),
    *("copyreg", "multiprocessing", "torch.multiprocessing"),
}
RUN_TEXT = {"eval", "exec", "compile", "__import__"}
#: torch.distributed's collectives of objects pickle them.
OBJECT_COLLECTIVES = {
    *("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list"),
    *("send_object_list", "recv_object_list", "allgather_object", "_object_to_tensor"),
    *("_tensor_to_object",),
}


def find_unpickling(source):
    """(line, what) of everything in a source text that could make objects of foreign bytes."""
    findings = []
    for node in ast.walk(ast.parse(source)):
        findings += [(getattr(node, "lineno", 0), what) for what in _of(node)]
    return findings


def _of(node):
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{name}" for name in names), *names]
        for name in names:
            if name in RUN_WHAT_THEY_READ or name in OBJECT_COLLECTIVES:
                yield f"imports {name}"
    elif isinstance(node, ast.Attribute) and node.attr in OBJECT_COLLECTIVES:
        yield f"uses {node.attr}"
    elif isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        if called in RUN_TEXT:
            yield f"calls {called}"
        if called.split(".")[-1] in ("load", "loads") and not called.startswith("json."):
            weights_only = {k.arg: ast.unparse(k.value) for k in node.keywords}.get("weights_only")
            if weights_only != "True":
                yield f"calls {called} without weights_only=True"


def test_no_source_file_can_unpickle():
    files = sorted(PYTHON.rglob("*.py"))
    assert len(files) > 50
    found = {str(file): find_unpickling(file.read_text()) for file in files}
    assert {file: lines for file, lines in found.items() if lines} == {}


BAD = {
    "module": "import pickle",
    "inside_a_function": "def f():\n  from pickle import loads",
    "torch_load": "import torch\ntorch.load(file)",
    "torch_load_variable": "torch.load(file, weights_only=flag)",
    "loads": "loads(data)",
    "collective": "dist.all_gather_object(a, b)",
    "imported_collective": "from torch.distributed import broadcast_object_list",
    "eval": "eval(text)",
}


@pytest.mark.parametrize("source", BAD.values(), ids=BAD.keys())
def test_code_that_unpickles_is_found(source):
    assert len(find_unpickling(source)) >= 1


@pytest.mark.parametrize("source", ["json.loads(text)", "torch.load(file, weights_only=True)"])
def test_code_that_does_not_unpickle_passes(source):
    assert find_unpickling(source) == []
