"""`python -m bagua` tells versions, processors, network and settings."""

import importlib
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import bagua
import pytest
import tomllib
import torch
from bagua import _C, _build
from bagua.__main__ import main
from bagua._core.group import connections
from bagua._tools import report

PACKAGE = Path(bagua.__file__).parent
REPOSITORY = Path(__file__).parents[2]


def fields():
    """{label: text} of the report."""
    found, label = {}, ""
    for line in report.report_text().splitlines():
        label = line[:16].strip() or label
        found[label] = f"{found.get(label, '')} {line[17:]}".strip()
    return found


def test_the_module_prints_it_in_80_columns():
    env = os.environ | {"BAGUA_LANES": "1", "BAGUA_COMM": "gloo", "PYTHONPATH": str(PACKAGE.parent)}
    command = [sys.executable, "-m", "bagua"]
    end = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    assert (end.returncode, end.stderr) == (0, "")
    assert "BAGUA_LANES=1\n" in end.stdout
    assert "BAGUA_COMM=gloo\n" in end.stdout
    assert all(len(line) <= 80 or " " not in line[17:] for line in end.stdout.splitlines())


OTHER_TORCH = """
import torch
torch.__version__ = "2.99.0+cpu"
"""
SCRIPT = "#!{python}\nimport sys\nfrom bagua.__main__ import main\nsys.exit(main())\n"
WAYS = {
    "module": ["-m", "bagua"],
    "doctor": ["-u", "-m", "bagua", "doctor"],
    "script": ["{folder}/bagua", "top"],
}


def under_another_torch(folder, *command):
    """The end of a Python that runs `command` with a torch that bagua was not built for."""
    (folder / "sitecustomize.py").write_text(OTHER_TORCH)
    (folder / "bagua").write_text(SCRIPT.format(python=sys.executable))
    env = os.environ | {"PYTHONPATH": f"{folder}:{PACKAGE.parent}"}
    command = [sys.executable, *(word.format(folder=folder) for word in command)]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, check=False)


@pytest.mark.parametrize("way", WAYS)
def test_under_another_torch_it_tells_what_it_can_and_fails(tmp_path, way):
    end = under_another_torch(tmp_path, *WAYS[way])
    assert (end.returncode, end.stderr) == (1, "")
    text = " ".join(end.stdout.split())
    assert f"built for torch {_build.TORCH_VERSION}" in text
    assert "torch 2.99.0+cpu, CUDA" in text
    assert "lo: 127.0.0.1" in text
    assert f"does not work bagua was built for torch {_build.TORCH_VERSION}, but torch 2.99" in text
    assert "pip install --force-reinstall" in text
    assert "CPU loops" not in text


@pytest.mark.parametrize("command", [["-c", "import bagua"], ["-m", "bagua._tools.top"]])
def test_under_another_torch_every_other_import_raises(tmp_path, command):
    end = under_another_torch(tmp_path, *command)
    assert end.returncode == 1
    versions = f"torch {_build.TORCH_VERSION}, but torch 2.99.0+cpu is installed"
    assert f"ImportError: bagua was built for {versions}" in end.stderr
    assert "BaguaError" not in end.stderr


def test_it_tells_what_is_there():
    told = fields()
    assert told["bagua"] == (
        f"{bagua.__version__}, built for torch {_build.TORCH_VERSION} {PACKAGE}"
    )
    assert told["torch"].startswith(f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}")
    assert told["CPU loops"] == f"instruction set {_C.instruction_set()}"
    assert told["codecs"].split(", ") == _C.codec_names()
    assert "lo: 127.0.0.1" in told["network"]


def test_the_instruction_set_is_one_that_the_processor_has():
    flags = set(re.findall(r"\w+", Path("/proc/cpuinfo").read_text().split("flags")[1]))
    wide, middle = "avx512bw" in flags, "avx2" in flags
    expected = "x86-64-v4" if wide else "x86-64-v3" if middle else "x86-64"
    assert _C.instruction_set() == expected


def test_a_variable_that_nothing_reads_is_marked(monkeypatch):
    monkeypatch.setenv("BAGUA_LANE", "2")
    monkeypatch.setenv("BAGUA_LANES", "2")
    told = fields()["variables"]
    assert "BAGUA_LANE=2 (not read by this version)" in told
    assert re.search(r"BAGUA_LANES=2(?! \()", told)


def test_a_secret_is_not_printed(monkeypatch):
    monkeypatch.setenv("BAGUA_MAILBOX_SECRET", "hush-hush")
    monkeypatch.setenv("BAGUA_MAILBOX_SECRETS", "hush-hush")
    told = fields()["variables"]
    assert "BAGUA_MAILBOX_SECRET=(hidden)" in told
    assert "hush" not in told


def test_all_variables_that_the_package_reads_are_known():
    read = set()
    for path in [*PACKAGE.rglob("*.py"), *(PACKAGE.parent / "mlbench_core").rglob("*.py")]:
        read |= set(re.findall(r'"(BAGUA_[A-Z_]+)"', path.read_text()))
    assert read == set(report.VARIABLES)


def test_architectures_are_told_as_nvidia_names_them():
    assert report.architectures("") == "none in this build"
    assert report.architectures("80-real 90-real 100") == "sm_80, sm_90, sm_100, PTX 100"
    assert report.architectures("90a-real 90-virtual") == "sm_90a, PTX 90"


@pytest.mark.parametrize("arguments", [["--help"], ["doctor", "--help"], ["report", "--help"]])
def test_every_command_has_help_of_80_columns(arguments, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert "usage: bagua" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_the_installed_command_is_the_module(capsys):
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["bagua"].partition(":")
    assert getattr(importlib.import_module(module), function)(["report"]) == 0
    assert capsys.readouterr().out == report.report_text()


def test_the_interface_that_a_variable_names_is_gloos():
    address, reason = report.gloo_address({"GLOO_SOCKET_IFNAME": "lo"})
    assert (address, reason) == ("127.0.0.1", "GLOO_SOCKET_IFNAME=lo")
    assert report.gloo_address({"GLOO_SOCKET_IFNAME": "none0"})[0] is None


def test_without_the_variable_it_is_the_host_names_address(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert report.gloo_address({})[0] in ("127.0.0.1", "::1")
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert report.gloo_address({})[0] == "127.0.0.1"


def test_interfaces_are_those_of_the_system():
    found = {one.name: one for one in report.interfaces()}
    assert found.keys() == set(os.listdir("/sys/class/net"))
    assert found["lo"].mtu == int(Path("/sys/class/net/lo/mtu").read_text())
    assert found["lo"].up


def test_a_library_that_does_not_load_is_told_in_lines_and_where_there_is_a_gpu(monkeypatch):
    def find():
        raise bagua.BaguaError("no libnccl, and tried:\n  libnccl.so.2: no such file\nInstall it")

    monkeypatch.setattr(connections, "nccl_library", find)
    monkeypatch.setattr(_C, "has_nccl", True)
    for gpus, expected in (
        (0, "in this build; this machine has no GPU, and needs no libnccl"),
        (1, "in this build, but not on this machine: no libnccl, and tried: libnccl.so.2: no such "
            "file Install it"),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        monkeypatch.setattr(report, "_gpus", list)
        assert fields()["NCCL"] == expected
        assert "?" not in report.report_text()
