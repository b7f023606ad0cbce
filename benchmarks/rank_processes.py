"""Starts the ranks of a benchmark, on loopback or on a shaped network."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path


def figures_of(rate, program, options, ranks, **network):
    """The figures that rank 0 of a program writes when it runs on all ranks with `--rank-output`.

    rate, network: as for `run_on`. options: of the program.
    """
    return _figures(program, options, lambda argv: run_on(rate, argv, ranks, **network))


def figures_over(link, program, options):
    """Those when it runs on every rank of ``link``, a `Network` or a `WideArea`."""

    def run(argv):
        enter = ["ip", "netns", "exec"]
        _wait_for(
            [
                subprocess.Popen(
                    [*enter, link.namespace(rank), *argv], env=os.environ | link.environment(rank)
                )
                for rank in range(link.ranks)
            ]
        )

    return _figures(program, options, run)


def _figures(program, options, run):
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "figures.json"
        run([sys.executable, program, "--rank-output", str(output), *map(str, options)])
        return json.loads(output.read_text())


def run_on(rate, argv, ranks, mtu=1500, ranks_per_link=1, inside=None):
    """Run one process per rank, all with `argv`, and wait until they have ended well.

    rate: Mbit/s each way, or "none": the loopback device, unshaped. mtu: of shaped networks.
    ranks_per_link: neighbours that share a link, as one node. inside: Mbit/s between these.
    Ends this program where a rank fails.
    """
    local = ranks if ranks_per_link == 1 else ranks_per_link
    places = [_place(rank, ranks, local) for rank in range(ranks)]
    if rate == "none":
        here = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
        return _wait_for([subprocess.Popen(argv, env=here | place) for place in places])
    from network import Network

    with Network(ranks=ranks // ranks_per_link, rate_mbit=int(rate), mtu=mtu) as network:
        if inside is not None:
            for link in range(network.ranks):
                network.shape_inside(link, inside)
        _wait_for(
            [
                network.popen(rank // ranks_per_link, argv, place)
                for rank, place in enumerate(places)
            ]
        )


def _place(rank, ranks, local):
    """Variables of one rank, of which `local` count as one node. network.py has the addresses."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank % local),
        "LOCAL_WORLD_SIZE": str(local),
        "OMP_NUM_THREADS": "1",
    }


def _free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def _wait_for(processes):
    """All ranks end well, or none is left running and their failure is ours."""
    program = Path(sys.argv[0]).stem
    try:
        for process in processes:
            if process.wait() != 0:
                sys.exit(f"{program}: a rank ended with status {process.returncode}")
    finally:
        for process in processes:
            process.kill()
