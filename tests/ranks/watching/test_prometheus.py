"""The endpoint of `serve_metrics`, scraped, and parsed by prometheus_client."""

import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import bagua.torch_api as bagua
import pytest
import torch
import torch.distributed as dist
from bagua._watch import prometheus
from bagua.torch_api.algorithms import GradientAllReduceAlgorithm
from prometheus_client.parser import text_string_to_metric_families
from support import training
from support.processes.sockets import listening


def scrape(server):
    with urllib.request.urlopen(
        f"http://{server.address}:{server.port}/metrics", timeout=10
    ) as end:
        text = end.read().decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


@training.with_group
def serve_and_scrape():
    model = training.network()
    optimizer = training.sgd(model)
    before = set(listening().values())
    model.with_bagua([optimizer], GradientAllReduceAlgorithm())
    training.train_on_ranks(model, optimizer, 3)
    off = set(listening().values()) - before
    server = bagua.serve_metrics(model, 0)
    added = set(listening().values()) - before - off
    stats = model.bagua_stats()
    dist.barrier()
    families = scrape(server)
    samples = {
        sample.name + sample.labels.get("purpose", ""): (sample.labels, sample.value)
        for family in families.values()
        for sample in family.samples
    }
    kinds = {name: (family.type, family.documentation) for name, family in families.items()}
    port = server.port
    bagua.destroy_process_group()
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)
        refused = False
    except urllib.error.URLError:
        refused = True
    return stats, samples, kinds, added, port, refused


def test_a_scrape_has_the_statistics_in_base_units(ranks):
    for rank, result in enumerate(ranks(2, serve_and_scrape)):
        stats, samples, kinds, added, port, refused = result
        labels, rounds = samples["bagua_rounds_total"]
        assert labels == {"rank": str(rank), "module": "Sequential"}
        assert rounds == stats["rounds"] == 3
        sent = stats["communicators"]["all"]["bytes_sent"]
        assert samples["bagua_sent_bytes_totalall"][1] == sent
        assert samples["bagua_sent_bytes_totalcontrol"][1] == stats["control"]["bytes_sent"]
        for name, value in (
            ("bagua_exposed_seconds_total", stats["exposed_ns"]),
            ("bagua_hidden_seconds_total", stats["hidden_ns"]),
            ("bagua_encode_seconds_total", stats["total"]["encode_ns"]),
            ("bagua_longest_wait_seconds", stats["longest_wait_ns"]),
        ):
            assert samples[name][1] == pytest.approx(value / 1e9)
        assert all(kind in ("counter", "gauge") and text for kind, text in kinds.values())
        assert len(kinds) == 13
        assert added == {("127.0.0.1", port)}, "loopback unless told, and nothing else"
        assert refused, "the end of the group closes it"


@training.with_group
def outlive_the_model():
    model = training.network()
    model.with_bagua([training.sgd(model)], GradientAllReduceAlgorithm())
    server = bagua.serve_metrics(model, 0)
    full = len(scrape(server))
    del model
    empty = len(scrape(server))
    with pytest.raises(OSError, match="in use"):
        bagua.serve_metrics(DUMMY, server.port)
    server.close()
    server.close()
    return full, empty


class Dummy:
    """A source of no statistics."""

    def stats(self):
        return {}


DUMMY = Dummy()


def test_the_endpoint_keeps_no_model_alive(ranks):
    (result,) = ranks(1, outlive_the_model)
    assert result == (13, 0)


def test_without_the_package_the_remedy_is_told():
    source = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "import bagua.torch_api as bagua, torch\nbagua.serve_metrics(torch.nn.Linear(1, 1), 0)"
    )
    end = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60)
    assert end.returncode == 1
    assert "pip install prometheus_client" in end.stderr


def test_a_model_without_statistics_is_refused():
    with pytest.raises(TypeError, match="not of Linear"):
        bagua.serve_metrics(torch.nn.Linear(1, 1), 0)


GARBAGE = [
    b"",
    b"GET /metr",
    b"\x16\x03\x01\x02\x00",
    b"GET //[ HTTP/1.1\r\n\r\n",
    b"GET / HTTP/9.9\r\nA\r\n\r\n",
    b"\xff" * 70000 + b"\r\n",
    b"POST / HTTP/1.1\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\n" + b"A: b\r\n" * 200,
]


def threads_and_files():
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def test_clients_that_say_nothing_or_nonsense_hold_little_and_keep_nobody_away(capfd, monkeypatch):
    monkeypatch.setattr(prometheus, "_PATIENCE_S", 1.0)
    before = threads_and_files()
    server = bagua.serve_metrics(Dummy(), 0)  # which ends: no statistics
    held = []
    for number in range(100):
        held.append(socket.create_connection((server.address, server.port), timeout=20))
        held[-1].sendall(GARBAGE[number % len(GARBAGE)])
    threads, files = threads_and_files()
    most = prometheus._MOST_CLIENTS + 1  # one that is accepted
    assert threads - before[0] <= most + 1
    assert files - before[1] - len(held) <= most + 3  # and the listening socket's
    assert scrape(server) == {}, "a true client is served beside them"
    assert held[-4].recv(1) == b"", "a client that does not end its request is disconnected"
    for client in held:
        client.close()
    server.close()
    assert capfd.readouterr() == ("", "")
