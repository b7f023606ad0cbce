"""Running jobs on this machine that publish their statistics."""

from __future__ import annotations

from pathlib import Path

__all__ = ["stores_here"]


def stores_here(processes: Path = Path("/proc")) -> list[str]:
    """``host:port`` of the stores of jobs that publish, sorted.

    Read from the environments of this user's processes, among which a job's ranks must be.
    """
    found = set()
    for path in processes.glob("[0-9]*/environ"):
        try:
            entries = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # another user's, or gone
            continue
        variables = dict(entry.split("=", 1) for entry in entries if "=" in entry)
        host, port = variables.get("MASTER_ADDR"), variables.get("MASTER_PORT")
        if variables.get("BAGUA_TOP", "0") != "0" and host and port:
            found.add(f"{host}:{port}")
    return sorted(found)
