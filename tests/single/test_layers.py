"""The floors of docs/design.md: a folder is a floor; includes and imports point downwards only.

A file may use what is on its own floor and on those below it. A folder that is not listed belongs
to the floor of the folder that holds it. Imports inside functions count like any other; those for
the type checker, in the body of `if TYPE_CHECKING:`, do not run and may point anywhere.
"""

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

# From the ground up.
CPP_FLOORS = (
    *("base", "math", "codec", "health", "comm", "op/contract", "op/tensors"),
    *("ledger", "engine", "op/wire", "op", "binding"),
)
PYTHON_FLOORS = (
    *("bagua", "bagua/_core/group", "bagua/_core/eager", "bagua/_core/state"),
    *("bagua/_core/compression", "bagua/_ops", "bagua/_sync", "bagua/_outer"),
    "bagua/_watch",
    "bagua/torch_api",
    *("bagua/comm_hooks", "bagua/fsdp", "bagua/lightning", "bagua/integrations", "bagua/_tools"),
)
# Started, never imported: on the top floor, whatever the folder.
PYTHON_PROGRAM = "__main__.py"

# Floors that know nothing of each other, whichever is higher.
CPP_STRANGERS = {("op", "engine"), ("comm", "codec"), ("comm", "math")}
# The second door stands on these floors, and has no room in the others.
SECOND_DOOR = "mlbench_core"
BELOW_SECOND_DOOR = PYTHON_FLOORS[:5]

PYTHON_HEADERS = (
    r"pybind11/.*|Python\.h|torch/extension\.h|torch/python\.h"
    r"|torch/csrc/(Exceptions|DynamicTypes|THP|utils/(py|object_ptr)).*|torch/csrc/.*python_.*"
)

# Headers of others -> the folders that may include them; the first line that matches decides.
FOREIGN_MAY_BE_INCLUDED_BY = (
    (PYTHON_HEADERS, ("binding",)),
    (r"(ATen|c10|caffe2|torch)/.*", ("health", "comm", "op", "ledger", "engine", "binding")),
)

PACKAGES = ("bagua", "mlbench_core")
TYPE_CHECKING = {"TYPE_CHECKING", "typing.TYPE_CHECKING"}
CPP_SUFFIXES = {".h", ".cpp", ".cu", ".cuh"}


def cpp_files(root):
    return sorted(path for path in (root / "csrc").rglob("*") if path.suffix in CPP_SUFFIXES)


def python_files(root):
    return sorted((root / "python").rglob("*.py"))


def includes_of(path):
    pattern = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
    return pattern.findall(path.read_text())


def floor_of(path, floors):
    """The number of the floor of a file, by its path; None if it is on none."""
    if path.endswith(f"/{PYTHON_PROGRAM}"):
        return len(floors) - 1
    folders = [path.rsplit("/", n)[0] for n in range(1, path.count("/") + 1)]
    return next((floors.index(folder) for folder in folders if folder in floors), None)


def find_upward_includes(root):
    findings = []
    for path in cpp_files(root):
        name = path.relative_to(root / "csrc").as_posix()
        if floor_of(name, CPP_FLOORS) is None:
            findings.append(f"{name}: its folder is not a floor")
            continue
        findings += [
            f"{name} includes {header}"
            for header in includes_of(path)
            if not may_include(root, name, header)
        ]
    return findings


def may_include(root, name, header):
    own = floor_of(name, CPP_FLOORS)
    room = name.split("/")[0]
    if header.split("/")[0] in {floor.split("/")[0] for floor in CPP_FLOORS}:
        floor = floor_of(header, CPP_FLOORS)
        strange = (room, header.split("/")[0]) in CPP_STRANGERS
        return floor is not None and floor <= own and not strange
    for pattern, rooms in FOREIGN_MAY_BE_INCLUDED_BY:
        if re.fullmatch(pattern, header):
            return room in rooms
    return True


def module_name(root, path):
    parts = path.relative_to(root / "python").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def may_import(root, module, imported):
    own, other = (floor_of(path_of(root, name), PYTHON_FLOORS) for name in (module, imported))
    if module.split(".")[0] == SECOND_DOOR:
        same_house = imported.split(".")[0] == SECOND_DOOR
        return same_house or (other is not None and other < len(BELOW_SECOND_DOOR))
    return own is not None and other is not None and other <= own


def path_of(root, module):
    """The file of a module, from python/ on; of a package its __init__.py."""
    path = module.replace(".", "/")
    return f"{path}/__init__.py" if (root / "python" / path).is_dir() else f"{path}.py"


def nodes_that_run(tree):
    """All nodes of a syntax tree, without the bodies of `if TYPE_CHECKING:`."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for_types = isinstance(node, ast.If) and ast.unparse(node.test) in TYPE_CHECKING
        waiting += node.orelse if for_types else ast.iter_child_nodes(node)


def imports_of(root, path):
    """Full names of our own modules that a file imports at run time, wherever in the file."""
    modules = {"bagua._C", *(module_name(root, file) for file in python_files(root))}
    package = path.relative_to(root / "python").parent.parts
    for node in nodes_that_run(ast.parse(path.read_text())):
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
        findings += [
            f"{module} imports {imported}"
            for imported in sorted(set(imports_of(root, path)))
            if imported != module and not may_import(root, module, imported)
        ]
    return findings


def find_circles(root):
    """Modules that import each other, directly or through others."""
    graph = {module_name(root, path): set(imports_of(root, path)) for path in python_files(root)}
    reached = {module: set(graph[module]) for module in graph}
    for middle in graph:
        for module in graph:
            if middle in reached[module]:
                reached[module] |= reached[middle]
    return sorted(module for module in graph if module in reached[module])


def findings(root):
    return find_upward_includes(root) + find_upward_imports(root) + find_circles(root)


def test_includes_and_imports_point_downwards_and_no_modules_import_each_other():
    assert len(cpp_files(REPOSITORY)) > 0
    assert len(python_files(REPOSITORY)) > 0
    assert findings(REPOSITORY) == []


CORE = "python/bagua/_core/group"
SURFACE = "python/bagua/torch_api"
FOR_TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
VIOLATIONS = {
    "comm_includes_codec": ("csrc/comm/a.h", '#include "codec/a.h"'),
    "codec_includes_torch": ("csrc/codec/a.h", "#include <ATen/ATen.h>"),
    "engine_includes_an_op": ("csrc/engine/a.h", '#include "op/wire/frame.h"'),
    "op_includes_the_engine": ("csrc/op/a.h", '#include "engine/a.h"'),
    "wire_includes_an_op": ("csrc/op/wire/a.h", '#include "op/a.h"'),
    "op_includes_pybind": ("csrc/op/a.h", "# include <pybind11/stl.h>"),
    "folder_without_floor": ("csrc/misc/a.h", ""),
    "core_imports_surface": (f"{CORE}/a.py", "import bagua.torch_api"),
    "mlbench_imports_surface": (
        "python/mlbench_core/a.py",
        "from bagua.torch_api._patch import A",
    ),
    "circle": (f"{SURFACE}/_patch.py", "from bagua.torch_api import _patch"),
    "package_without_floor": ("python/misc/a.py", "import bagua"),
    "surface_imports_a_program": (f"{SURFACE}/tensor.py", "import bagua.__main__"),
    "else_of_type_checking": (
        f"{CORE}/a.py",
        f"{FOR_TYPES}    pass\nelse:\n    import bagua.torch_api",
    ),
}


@pytest.mark.parametrize(("path", "text"), VIOLATIONS.values(), ids=VIOLATIONS.keys())
def test_a_violation_is_found(tmp_path, path, text):
    write_small_house(tmp_path)
    assert findings(tmp_path) == []
    write(tmp_path / path, text)
    assert len(findings(tmp_path)) == 1


def test_an_import_for_the_type_checker_may_point_anywhere(tmp_path):
    write_small_house(tmp_path)
    upward = f"{FOR_TYPES}    import bagua.torch_api\n    from bagua import comm_hooks"
    write(tmp_path / CORE / "a.py", upward)
    write(tmp_path / SURFACE / "_patch.py", f"{FOR_TYPES}    from bagua.torch_api import _patch")
    assert findings(tmp_path) == []


def write_small_house(root):
    packages = ("bagua", "bagua/torch_api", "bagua/comm_hooks", "bagua/_tools")
    files = ("bagua/torch_api/_patch.py", "bagua/__main__.py")
    for name in (*(f"{package}/__init__.py" for package in packages), *files):
        write(root / "python" / name, "")
    write(root / "python/bagua/torch_api/__init__.py", "import bagua.torch_api._patch")


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
