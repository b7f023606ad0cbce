"""The floors of docs/design.md: includes and imports point downwards only.

The tables below are the law. A file that no table names fails too: give it a room first. Imports
inside functions and those for the type checker count like any other.
"""

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

# Folder of csrc -> what its files may include of ours (prefixes of the path after csrc/).
CPP_MAY_INCLUDE = {
    "base": ("base/",),
    "codec": ("base/", "codec/"),
    "topology": ("base/", "topology/"),
    "comm": ("base/", "comm/"),
    "op": ("base/", "codec/", "topology/", "comm/", "op/"),
    "engine": ("base/", "comm/", "op/bucket_op.h", "op/periodic_op.h", "engine/"),
    "binding": ("base/", "codec/", "topology/", "comm/", "op/", "engine/", "binding/"),
}

PYTHON_HEADERS = (
    r"pybind11/.*|Python\.h|torch/extension\.h|torch/python\.h"
    r"|torch/csrc/(Exceptions|DynamicTypes|THP|utils/(py|object_ptr)).*|torch/csrc/.*python_.*"
)

# Headers of others -> the folders that may include them; the first line that matches decides.
FOREIGN_MAY_BE_INCLUDED_BY = (
    (PYTHON_HEADERS, ("binding",)),
    (r"(ATen|c10|caffe2|torch)/.*", ("comm", "op", "engine", "binding")),
)

CORE = ("bagua", "bagua._C", "bagua._build")
GROUP_FILES = """
    env communication _all_to_all _bucketing _collective_checks _collectives _communicator
    _checkpoint_file _checkpoint_folder _checkpoint_tree
    _error_state _implicit_group _incarnation _initial_state _low_rank _nccl_library _objects
    _outputs
    _optimizer_format _outside_graphs _process_group _reductions _rendezvous _sparse_choice
    _saved_values _shared_state _snapshot _statistics _store_values _transport _weights_check
"""
BUILDER_FILES = "tensor _bucket_ops _bucket_appends bucket _sparse_bucket _lane_builder _plan"
GROUPS = tuple(f"bagua.torch_api.{name}" for name in GROUP_FILES.split())

# Stacks of floors from the ground up. A room may import what is on its own floor or below it in one
# stack. A room that ends in ".*" is a package with all that is in it; any other is one file.
PYTHON_STACKS = (
    (
        CORE,
        GROUPS,
        tuple(f"bagua.torch_api.{name}" for name in BUILDER_FILES.split()),
        ("bagua.torch_api.algorithms.*",),
        (
            "bagua.torch_api.distributed",
            "bagua.torch_api._averaging_plan",
            "bagua.torch_api._module_class",
            "bagua.torch_api._owners",
            "bagua.torch_api._running_plan",
            "bagua.torch_api._steps_in_backward",
            "bagua.torch_api._user_hooks",
            "bagua.torch_api._wrap_arguments",
        ),
        ("bagua.torch_api.data_parallel.*",),
        ("bagua.torch_api._patch", "bagua.torch_api._per_rank"),
        ("bagua.torch_api.averaging", "bagua.torch_api.checkpoint"),
        ("bagua.torch_api",),
    ),
    (CORE, GROUPS, ("mlbench_core.*",)),
)

PACKAGES = ("bagua", "mlbench_core")
CPP_SUFFIXES = {".h", ".cpp", ".cu", ".cuh"}
SOURCE_FOLDERS = ("csrc", "python", "tests", "benchmarks", "docs")
MAX_LINES = 500
MAX_STUB_LINES = 500  # an extension module has one stub, however much is in it
MAX_CUDA_CONDITIONALS = 2


def cpp_files(root):
    return sorted(path for path in (root / "csrc").rglob("*") if path.suffix in CPP_SUFFIXES)


def python_files(root):
    return sorted((root / "python").rglob("*.py"))


def includes_of(path):
    pattern = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
    return pattern.findall(path.read_text())


def find_upward_includes(root):
    findings = []
    for path in cpp_files(root):
        name = path.relative_to(root / "csrc").as_posix()
        folder = name.split("/")[0]
        if folder not in CPP_MAY_INCLUDE:
            findings.append(f"{name}: its folder has no floor")
            continue
        findings += [
            f"{name} includes {header}"
            for header in includes_of(path)
            if not may_include(root, folder, header)
        ]
    return findings


def may_include(root, folder, header):
    if header.split("/")[0] in CPP_MAY_INCLUDE or (root / "csrc" / folder / header).exists():
        return header.startswith(CPP_MAY_INCLUDE[folder])
    for pattern, folders in FOREIGN_MAY_BE_INCLUDED_BY:
        if re.fullmatch(pattern, header):
            return folder in folders
    return True


def module_name(root, path):
    parts = path.relative_to(root / "python").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module):
    """The room of a module, or None where no table names it."""
    rooms = [room for stack in PYTHON_STACKS for floor in stack for room in floor]
    packages = [
        room for room in rooms if room.endswith(".*") and f"{module}.".startswith(room[:-1])
    ]
    return module if module in rooms else next(iter(packages), None)


def may_import(module, imported):
    for stack in PYTHON_STACKS:
        height = {room: number for number, floor in enumerate(stack) for room in floor}
        room, target = height.get(room_of(module)), height.get(room_of(imported))
        if room is not None and target is not None and target <= room:
            return True
    return False


def imports_of(root, path):
    """Full names of our own modules that a file imports, wherever in the file."""
    modules = {*CORE, *(module_name(root, file) for file in python_files(root))}
    package = path.relative_to(root / "python").parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*parents, *filter(None, [node.module])])
            members = [f"{base}.{alias.name}" for alias in node.names]
            names = [member if member in modules else base for member in members]
        yield from (name for name in names if name.split(".")[0] in PACKAGES)


def find_upward_imports(root):
    findings = []
    for path in python_files(root):
        module = module_name(root, path)
        if room_of(module) is None:
            findings.append(f"{module} has no floor")
            continue
        findings += [
            f"{module} imports {imported}"
            for imported in sorted(set(imports_of(root, path)))
            if imported != module and not may_import(module, imported)
        ]
    return findings


def find_monkey_patching(root):
    """Places outside _patch.py that set an attribute on something imported from elsewhere."""
    findings = []
    for path in python_files(root):
        tree = ast.parse(path.read_text())
        foreign = set(foreign_names(tree))
        targets = [target for node in ast.walk(tree) for target in attributes_set_by(node)]
        if path.name != "_patch.py":
            findings += [
                f"{module_name(root, path)} sets {ast.unparse(target)}"
                for target in targets
                if root_name(target) in foreign
            ]
    return findings


def foreign_names(tree):
    """Names that a file binds by importing something that is not ours."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = {alias.name: alias for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = {f"{node.module}.{alias.name}": alias for alias in node.names}
        else:
            continue
        for name, alias in names.items():
            if name.split(".")[0] not in PACKAGES:
                yield (alias.asname or alias.name).split(".")[0]


def attributes_set_by(node):
    if isinstance(node, ast.Assign):
        return [target for target in node.targets if isinstance(target, ast.Attribute)]
    if isinstance(node, ast.AnnAssign | ast.AugAssign):
        return [node.target] if isinstance(node.target, ast.Attribute) else []
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
        return node.args[:1]
    return []


def root_name(node):
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def find_cuda_conditionals(root):
    pattern = re.compile(r"^\s*#\s*(?:if|ifdef|ifndef|elif)\b.*BAGUA_WITH_CUDA", re.MULTILINE)
    return [str(path) for path in cpp_files(root) for _ in pattern.findall(path.read_text())]


def find_long_files(root):
    files = [path for folder in SOURCE_FOLDERS for path in sorted((root / folder).rglob("*"))]
    lengths = {
        path: len(path.read_text().splitlines())
        for path in files
        if path.suffix in CPP_SUFFIXES | {".py", ".pyi"}
    }
    return [
        f"{path.relative_to(root)} has {lines} lines"
        for path, lines in lengths.items()
        if lines > (MAX_STUB_LINES if path.suffix == ".pyi" else MAX_LINES)
    ]


def test_there_are_sources_to_read():
    assert len(cpp_files(REPOSITORY)) > 0
    assert len(python_files(REPOSITORY)) > 0


def test_includes_point_downwards():
    assert find_upward_includes(REPOSITORY) == []


def test_imports_point_downwards():
    assert find_upward_imports(REPOSITORY) == []


def test_only_patch_patches():
    assert find_monkey_patching(REPOSITORY) == []


def test_at_most_two_conditionals_ask_for_cuda():
    assert len(find_cuda_conditionals(REPOSITORY)) <= MAX_CUDA_CONDITIONALS


def test_no_source_file_is_too_long():
    assert find_long_files(REPOSITORY) == []


SURFACE = "python/bagua/torch_api"
SYNTHETIC = {
    "codec_includes_comm": (find_upward_includes, "csrc/codec/a.h", '#include "comm/a.h"'),
    "codec_includes_torch": (find_upward_includes, "csrc/codec/a.h", "#include <ATen/ATen.h>"),
    "engine_includes_an_op": (find_upward_includes, "csrc/engine/a.h", '#include "op/frame.h"'),
    "op_includes_pybind": (find_upward_includes, "csrc/op/a.h", "# include <pybind11/stl.h>"),
    "comm_includes_all": (find_upward_includes, "csrc/comm/a.h", "#include <torch/extension.h>"),
    "folder_without_floor": (find_upward_includes, "csrc/misc/a.h", ""),
    "algorithm_imports_patch": (
        find_upward_imports,
        f"{SURFACE}/algorithms/a.py",
        "def f():\n  from .. import _patch",
    ),
    "env_imports_surface": (find_upward_imports, f"{SURFACE}/env.py", "import bagua.torch_api"),
    "mlbench_imports_tensor": (
        find_upward_imports,
        "python/mlbench_core/a.py",
        "from bagua.torch_api.tensor import A",
    ),
    "module_without_floor": (find_upward_imports, f"{SURFACE}/misc.py", ""),
    "patch_elsewhere": (
        find_monkey_patching,
        f"{SURFACE}/tensor.py",
        "from torch import nn\nnn.Module.a = 1",
    ),
    "long_file": (find_long_files, "csrc/op/a.h", "\n" * (MAX_LINES + 1)),
}


@pytest.mark.parametrize(("find", "path", "text"), SYNTHETIC.values(), ids=SYNTHETIC.keys())
def test_a_violation_is_found(tmp_path, find, path, text):
    for name in ("bagua/__init__.py", "bagua/torch_api/__init__.py", "bagua/torch_api/_patch.py"):
        (tmp_path / "python" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "python" / name).touch()
    assert find(tmp_path) == []
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(text)
    assert len(find(tmp_path)) == 1
