"""Values and samples that are made once."""

import multiprocessing
import sqlite3
import threading
import warnings

import pytest
import torch
from bagua.torch_api.contrib import CachedDataset, CacheLoader
from bagua.torch_api.contrib.cache_store import SqliteStore
from torch.utils.data import DataLoader, Dataset

VALUES = {
    "tensor": torch.arange(5, dtype=torch.float16),
    "none": None,
    "nested": {"a": [1, 2.5, "text"], "b": (torch.ones(2, 2), True)},
}


class Counting(Dataset):
    """Samples (index, its square), and how often they were made."""

    def __init__(self, size=10):
        self.size = size
        self.made = []

    def __len__(self):
        return self.size

    def __getitem__(self, item):
        self.made.append(item)
        return item, torch.tensor([item * item])


def never(key):
    raise AssertionError(f"{key} was made again")


@pytest.mark.parametrize("buffer", [1, 2, 100])
@pytest.mark.parametrize("name", VALUES)
def test_a_value_is_made_once(name, buffer):
    loader = CacheLoader(dataset_name="d", writer_buffer_size=buffer)
    loader.get(name, lambda key: VALUES[key])
    again = loader.get(name, never)
    assert again is not VALUES[name] or again is None
    assert repr(again) == repr(VALUES[name])
    assert loader.num_keys() == 1


def test_datasets_in_one_store_are_distinguished(tmp_path):
    path = tmp_path / "cache"
    first, second = (CacheLoader(dataset_name=name, path=path) for name in "ab")
    assert first.get(1, lambda _: "one") == "one"
    assert second.get(1, lambda _: "other") == "other"
    assert (first.get(1, never), second.get(1, never)) == ("one", "other")


def test_a_file_outlives_its_process_and_a_temporary_one_does_not(tmp_path):
    CacheLoader(path=tmp_path / "kept").get(1, lambda _: 5)
    assert CacheLoader(path=tmp_path / "kept").get(1, never) == 5
    loader = CacheLoader()
    place = loader.store.path
    assert place.exists()
    del loader
    assert not place.parent.exists()


def test_what_is_buffered_is_written_by_flush(tmp_path):
    loader = CacheLoader(path=tmp_path / "c", writer_buffer_size=3)
    loader.get(1, lambda _: 1)
    assert len(SqliteStore(tmp_path / "c")) == 0
    loader.flush()
    assert len(SqliteStore(tmp_path / "c")) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_is_read_from_the_cache_in_the_second_epoch(tmp_path, workers):
    dataset = Counting()
    cached = CachedDataset(dataset, path=tmp_path / "c", writer_buffer_size=1)
    assert len(cached) == 10
    for epoch in range(2):
        seen = [(int(i), int(square)) for i, square in DataLoader(cached, num_workers=workers)]
        assert seen == [(i, i * i) for i in range(10)], epoch
    assert cached.cache_loader.num_keys() == 10
    if workers == 0:
        assert dataset.made == list(range(10))


def fill(path, start):
    store = SqliteStore(path)
    for number in range(start, start + 50):
        store[str(number)] = bytes([number % 256]) * 1000


def test_processes_and_threads_write_to_one_file(tmp_path):
    path = tmp_path / "c"
    SqliteStore(path)
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=fill, args=(path, 50 * i)) for i in range(3)]
    workers += [threading.Thread(target=fill, args=(path, 50 * i)) for i in range(3, 5)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    store = SqliteStore(path)
    assert len(store) == 250
    assert all(store[str(n)] == bytes([n % 256]) * 1000 for n in range(250))


def test_a_forked_process_and_a_thread_open_the_file_for_themselves():
    store = SqliteStore()
    connection = store._connection()
    assert store._connection() is connection
    found = multiprocessing.SimpleQueue()
    fork = multiprocessing.get_context("fork").Process(
        target=lambda: found.put(store._connection() is connection)
    )
    thread = threading.Thread(target=lambda: found.put(store._connection() is connection))
    for worker in (fork, thread):
        worker.start()
        worker.join(60)
    assert [found.get(), found.get()] == [False, False]


def test_the_store_is_a_mapping():
    store = SqliteStore()
    store["a"], store["b"] = b"1", b"2"
    store["a"] = b"3"
    assert dict(store) == {"a": b"3", "b": b"2"}
    del store["a"]
    assert "a" not in store
    with pytest.raises(KeyError):
        del store["a"]
    with pytest.raises(TypeError, match="give it a path"):
        store.__getstate__()


def test_any_mapping_may_be_the_store():
    store = {}
    assert CacheLoader(store, "x").get("k", lambda _: 4) == 4
    assert list(store) == ["x_k"]
    assert CacheLoader(store, "x").get("k", never) == 4


class Broken(dict):
    """A store whose server has gone."""

    def get(self, key):
        raise ConnectionError("gone")


def test_a_store_that_fails_is_named_once_and_does_without():
    loader = CacheLoader(Broken())
    with pytest.warns(RuntimeWarning, match=r"no longer used: ConnectionError\('gone'\)"):
        assert loader.get(1, lambda _: 2) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loader.get(1, lambda _: 3) == 3


def test_values_that_are_not_safe_to_load_are_refused():
    with pytest.raises(TypeError, match=r"a Counting cannot be cached.*add_safe_globals"):
        CacheLoader().get(1, lambda _: Counting())


def test_wrong_arguments_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no cache backend 'redis': use 'sqlite'"):
        CacheLoader("redis")
    with pytest.raises(ValueError, match="hosts: arguments are for the backend 'sqlite' only"):
        CacheLoader({}, hosts=[])
    with pytest.raises(ValueError, match="writer_buffer_size=0"):
        CacheLoader(writer_buffer_size=0)
    (tmp_path / "text").write_text("no database" * 100)
    with pytest.raises(sqlite3.DatabaseError):
        CacheLoader(path=tmp_path / "text")
