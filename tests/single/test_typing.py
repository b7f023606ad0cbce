"""What type checkers know of a script."""

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import torch
import bagua.torch_api as bagua
layer = torch.nn.Linear(2, 2)
model = bagua.wrap(layer, [torch.optim.SGD(layer.parameters())])
with model.no_sync():
    reveal_type(model(torch.ones(1, 2)))
reveal_type(model)
reveal_type(model.bagua_stats())
"""


def test_mypy_knows_a_wrapped_module(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    root = Path(__file__).parents[2]
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        "",
        "--follow-imports=silent",
        "--strict",
    ]
    checked = subprocess.run(
        [*command, "--cache-dir", str(root / ".mypy_cache/script"), str(script)],
        capture_output=True,
        text=True,
        cwd=root / "python",
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    found = [line.split('"')[1] for line in checked.stdout.splitlines() if "Revealed" in line]
    assert found == [
        "Any",
        "bagua.torch_api.distributed.BaguaModule",
        "dict[str, Any]",
    ] or found == [
        "Any",
        "bagua.torch_api.distributed.BaguaModule",
        "builtins.dict[builtins.str, Any]",
    ]
