"""Statistics at an endpoint that Prometheus reads."""

from __future__ import annotations

import socket
import socketserver
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from bagua._core.group import environment as env
from bagua._core.group.process_group import close_at_exit
from bagua._watch.per_round import source_of

_NANO = 1e-9
# Name of the metric -> its text, the key of the statistics and the factor to the metric's unit.
_OF_COMMUNICATORS = {
    "bagua_sent_bytes": ("Payload sent, without packet headers.", "bytes_sent", 1.0),
    "bagua_received_bytes": ("Payload received.", "bytes_received", 1.0),
    "bagua_sent_messages": ("Messages sent.", "messages_sent", 1.0),
    "bagua_received_messages": ("Messages received.", "messages_received", 1.0),
    "bagua_wire_seconds": ("Time inside communicators, waiting included.", "wire_ns", _NANO),
}
_OF_BUCKETS = {
    "bagua_encode_seconds": ("Time in operations, but not on the wire.", "encode_ns", _NANO),
    "bagua_waiting_seconds": ("Time of ready buckets before they began.", "waiting_ns", _NANO),
    "bagua_nonfinite_rounds": ("Buckets' rounds with NaN or infinity.", "nonfinite_rounds", 1.0),
}
_BY_THE_CLOCK = {
    "bagua_rounds": ("Steps that communicated.", "rounds", 1.0),
    "bagua_busy_seconds": ("Time in which a lane was busy.", "busy_ns", _NANO),
    "bagua_hidden_seconds": ("Busy time in which training went on.", "hidden_ns", _NANO),
    "bagua_exposed_seconds": ("Time in which training was blocked.", "exposed_ns", _NANO),
}


#: Clients at a time, above which the oldest is disconnected; seconds that each has for its request.
_MOST_CLIENTS, _PATIENCE_S = 8, 10.0


class _Endpoint(socketserver.ThreadingTCPServer):
    """Answers few clients at a time, whatever they send or omit; says nothing of them.

    Each has a thread and a descriptor of the training process.
    """

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, address: str, port: int, handler: Any) -> None:
        self._clients: dict[Any, float] = {}
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, *_, where = found[0]
        super().__init__((str(where[0]), port), handler)

    def get_request(self) -> Any:
        try:
            return super().get_request()
        except OSError:
            time.sleep(0.1)  # no descriptor is left: the client waits, and so does this loop
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        for client in list(self._clients)[: 1 - _MOST_CLIENTS]:
            _disconnect(client)
        deadline = time.monotonic() + 1.0
        while len(self._clients) >= _MOST_CLIENTS and time.monotonic() < deadline:
            time.sleep(0.001)  # its thread ends
        if len(self._clients) >= _MOST_CLIENTS:
            self.shutdown_request(request)
            return
        self._clients[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._clients.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        late = time.monotonic() - _PATIENCE_S
        for client, begun in list(self._clients.items()):
            if begun < late:
                _disconnect(client)

    def server_close(self) -> None:
        super().server_close()
        for client in list(self._clients):
            _disconnect(client)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """What a client has sent or has not received is not of interest to the training."""


def _disconnect(client: Any) -> None:
    with suppress(OSError):
        client.shutdown(socket.SHUT_RDWR)


class MetricsServer:
    """An endpoint at work; made by :func:`serve_metrics`.

    Attributes:
        address, port: where it listens.
    """

    def __init__(self, address: str, port: int, server: Any, thread: Any) -> None:
        self.address = address
        self.port = port
        self._server = server
        self._thread = thread

    def close(self) -> None:
        """Stop listening. Idempotent; the end of the process group does it too."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None


def serve_metrics(model: Any, port: int, address: str = "127.0.0.1") -> MetricsServer:
    """Serve this rank's statistics to Prometheus, at ``http://address:port/metrics``.

    Nothing is served without this call. Each rank that calls it has its own endpoint, so
    ranks of one machine need different ports: ``port=9400 + bagua.get_local_rank()``. It has few
    clients at a time, and each for ten seconds: the oldest is disconnected.

    Args:
        model: a module after ``bagua.wrap``, bagua's ``DistributedDataParallel``, or the handle of
            ``bagua.comm_hooks.register``. It is not kept alive.
        port: 0: any free one, see ``port`` of the result.
        address: at which to listen. Other machines reach the endpoint only if it is told here, for
            example ``"0.0.0.0"``; who reaches it can read the statistics.

    Raises:
        ImportError: the package ``prometheus_client`` is not installed.
        TypeError: the model has no statistics.
        OSError: the port is taken.

    Example::

        model = bagua.wrap(model, [optimizer])
        server = bagua.serve_metrics(model, port=9400 + bagua.get_local_rank())
        server.close()
    """
    try:
        import prometheus_client
    except ImportError as error:
        raise ImportError(
            "serve_metrics needs the package prometheus_client: pip install prometheus_client"
        ) from error
    registry = prometheus_client.CollectorRegistry()
    registry.register(_Collector(source_of(model), type(model).__name__))
    server = _Endpoint(address, port, prometheus_client.MetricsHandler.factory(registry))
    thread = threading.Thread(target=server.serve_forever, name="bagua metrics", daemon=True)
    thread.start()
    result = MetricsServer(address, int(server.server_address[1]), server, thread)
    close_at_exit(result)
    _open.append(result)
    return result


# Kept, since the list of what is closed at the end is weak.
_open: list[MetricsServer] = []


class _Collector:
    def __init__(self, source: Any, module: str) -> None:
        self._source = weakref.ref(source)
        name = getattr(source, "bagua_module_name", module)
        self._labels = {"rank": str(env.get_rank()), "module": str(name)}

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        source = self._source()
        if source is None:
            return
        stats = source.stats()
        traffic = {**stats["communicators"], "control": stats["control"]}
        labels, values = list(self._labels), list(self._labels.values())
        for name, (text, key, factor) in _OF_COMMUNICATORS.items():
            family = CounterMetricFamily(name, text, labels=[*labels, "purpose"])
            for purpose, table in traffic.items():
                family.add_metric([*values, purpose], table[key] * factor)
            yield family
        for metrics, table in ((_OF_BUCKETS, stats["total"]), (_BY_THE_CLOCK, stats)):
            for name, (text, key, factor) in metrics.items():
                if table.get(key) is not None:
                    family = CounterMetricFamily(name, text, labels=labels)
                    family.add_metric(values, table[key] * factor)
                    yield family
        if "longest_wait_ns" in stats:
            text = "Longest time for which training was blocked."
            gauge = GaugeMetricFamily("bagua_longest_wait_seconds", text, labels=labels)
            gauge.add_metric(values, stats["longest_wait_ns"] * _NANO)
            yield gauge
