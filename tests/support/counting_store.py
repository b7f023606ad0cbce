"""A store that counts the requests of one rank."""

import collections

import torch.distributed as dist


class CountingStore(dist.Store):
    """Passes requests on to ``inner``, which ranks that are threads share.

    apart: how keys begin whose requests are not counted.
    """

    def __init__(self, inner, apart=()):
        super().__init__()
        self.inner = inner
        self.requests = collections.Counter()
        self.longest = 0  # bytes of a request
        self._apart = tuple(apart)
        self._waited = None
        self._clones = []

    def clone(self):
        """Over a separate connection, if ``inner`` is connected; counts here."""
        if not isinstance(self.inner, dist.TCPStore):
            return self
        other = CountingStore(self.inner.clone(), self._apart)
        other.requests = self.requests
        self._clones.append(other)  # C++ keeps only its part of the object
        return other

    def _count(self, kind, *texts):
        if self._apart and texts[0].startswith(self._apart):
            return
        self.requests[kind] += 1
        self.longest = max(self.longest, sum(map(len, texts)))

    def total(self):
        """Requests on the wire: torch's get() is two; a wait that goes on counts once."""
        return self.requests.total() + self.requests["get"]

    def set(self, key, value):
        self._count("set", key, value)
        self.inner.set(key, value)

    def get(self, key):
        self._count("get", key)
        return self.inner.get(key)

    def add(self, key, value):
        self._count("add", key)
        return self.inner.add(key, value)

    def append(self, key, value):
        self._count("append", key, value)
        self.inner.append(key, value)

    def has_extended_api(self):
        return True

    def multi_get(self, keys):
        self._count("multi_get", *keys)
        return self.inner.multi_get(keys)

    def compare_set(self, key, expected, desired):
        self._count("compare_set", key, expected, desired)
        words = (word if isinstance(word, str) else word.decode() for word in (expected, desired))
        return self.inner.compare_set(key, *words)

    def check(self, keys):
        self._count("check", *keys)
        return self.inner.check(keys)

    def wait(self, keys, timeout=None):
        if keys != self._waited:
            self._count("wait", *keys)
        self._waited = keys
        self.inner.wait(keys, timeout)

    def deleteKey(self, key):
        self._count("delete_key", key)
        return self.inner.delete_key(key)

    def num_keys(self):
        return self.inner.num_keys()
