"""Counts what the ranks of a job ask its store: a proxy before a TCPStore that reads requests.

    with StoreProxy() as store:  # before this process starts threads
        ...  # MASTER_ADDR, MASTER_PORT = store.address, TORCHELASTIC_USE_AGENT_STORE=True
        print(store.counts())

Needs torch's libuv store, whose requests carry no length: their layout is that of torch 2.11 to
2.13. Another one is an error of `counts()`, never a wrong number.
"""

import asyncio
import collections
import json
import multiprocessing
import struct

#: Requests in the order of torch's QueryType, with what follows the byte of the type: m a number of
#: 4 bytes, n of 8, s bytes behind their count, * a count and that many of the rest.
REQUESTS = (
    ("validate", "m"),
    ("set", "ss"),
    ("compare_set", "sss"),
    ("get", "s"),
    ("add", "sn"),
    ("check", "*s"),
    ("wait", "*s"),
    ("num_keys", ""),
    ("delete", "s"),
    ("append", "ss"),
    ("multi_get", "*s"),
    ("multi_set", "*ss"),
    ("cancel_wait", ""),
    ("ping", "m"),
    *(("queue_push", None), ("queue_pop", None), ("queue_len", None)),  # nobody here asks them
    ("list_keys", ""),
)
#: Requests by which torch opens and keeps a connection, which are not questions of ours.
OF_TORCH = ("validate", "ping")
MOST_BYTES = 1 << 28  # of one part of a request


class StoreProxy:
    """A TCPStore and its proxy in another process; made before this one starts threads.

    Attributes:
        address: host and port of the proxy.
        behind: host and port of the store, for those that are not to be counted.
    """

    def __init__(self, host="127.0.0.1"):
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, host), daemon=True)

    def __enter__(self):
        self._process.start()
        self.address, self.behind = self._pipe.recv()
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.join()

    def counts(self):
        """Since the start: "keys", "connections", "longest", and by kind "requests" and "bytes"."""
        self._pipe.send("counts")
        answer = self._pipe.recv()
        if answer["unknown"]:
            raise RuntimeError(f"requests of an unknown layout: {answer['unknown']}")
        return answer


class _Counts:
    def __init__(self):
        self.requests = collections.Counter()
        self.bytes = collections.Counter()
        self.connections = 0
        self.longest = 0
        self.unknown = []

    def table(self, keys):
        return {
            "keys": keys,
            "connections": self.connections,
            "longest": self.longest,
            "requests": dict(self.requests),
            "bytes": dict(self.bytes),
            "unknown": self.unknown,
        }


def _serve(pipe, host):
    import torch.distributed as dist

    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    asyncio.run(_run(pipe, host, store))


async def _run(pipe, host, store):
    counts = _Counts()

    async def connected(reader, writer):
        counts.connections += 1
        upstream = await asyncio.open_connection(host, store.port)
        await asyncio.gather(_requests(reader, upstream[1], counts), _answers(upstream[0], writer))

    server = await asyncio.start_server(connected, host, 0, backlog=1024)
    pipe.send(((host, server.sockets[0].getsockname()[1]), (host, store.port)))
    told = asyncio.Event()
    asyncio.get_running_loop().add_reader(pipe.fileno(), told.set)
    while True:
        await told.wait()
        told.clear()
        if not pipe.poll():  # told twice of one message
            continue
        pipe.recv()
        keys = await asyncio.get_running_loop().run_in_executor(None, store.num_keys)
        pipe.send(counts.table(keys))


async def _answers(reader, writer):
    while data := await reader.read(1 << 16):
        writer.write(data)
    writer.close()


async def _requests(reader, writer, counts):
    """Pass on whole requests, counting them; without counting after one of an unknown layout."""
    try:
        while kind := await reader.read(1):
            name, layout = REQUESTS[kind[0]] if kind[0] < len(REQUESTS) else ("", None)
            if layout is None:
                counts.unknown.append(kind[0])
                writer.write(kind)
                return await _answers(reader, writer)
            request = kind + await _parts(reader, layout)
            counts.requests[name] += 1
            counts.bytes[name] += len(request)
            counts.longest = max(counts.longest, len(request))
            writer.write(request)
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    writer.close()


async def _parts(reader, layout):
    if layout.startswith("*"):
        count = await reader.readexactly(8)
        return count + b"".join([await _parts(reader, layout[1:]) for _ in range(_bounded(count))])
    found = b""
    for part in layout:
        if part == "s":
            count = await reader.readexactly(8)
            found += count + await reader.readexactly(_bounded(count))
        else:
            found += await reader.readexactly(4 if part == "m" else 8)
    return found


def _bounded(count):
    (number,) = struct.unpack("<Q", count)
    if number > MOST_BYTES:
        raise ConnectionError(f"a request with {number} bytes or keys")
    return number


if __name__ == "__main__":  # checks the layouts against the torch that is installed
    from datetime import timedelta

    import torch.distributed as dist

    with StoreProxy() as proxy:
        client = dist.TCPStore(*proxy.address, is_master=False, timeout=timedelta(seconds=5))
        client.set("a", "1")
        client.get("a")
        client.add("n", 1)
        client.check(["a", "b"])
        client.wait(["a", "n"])
        client.compare_set("a", "1", "2")
        client.append("a", "3")
        client.multi_get(["a", "n"])
        client.multi_set(["c", "d"], ["1", "2"])
        client.delete_key("c")
        client.num_keys()
        client.list_keys()
        print(json.dumps(proxy.counts(), indent=2))
