"""``CachedDataset``: a dataset whose samples are made once."""

from __future__ import annotations

from collections.abc import MutableMapping, Sized
from typing import Any

from torch.utils.data import Dataset

from bagua.torch_api.contrib.cache_loader import CacheLoader

__all__ = ["CachedDataset"]


class CachedDataset(Dataset[Any]):
    """The samples of ``dataset``, each made when it is first asked for, and then read from a cache.

    Random transforms inside the dataset would be cached too: apply them to the samples of this one.

    Args:
        dataset: with a length, and samples that :class:`CacheLoader` can keep.
        backend, dataset_name, writer_buffer_size: see :class:`CacheLoader`.

    Attributes:
        cache_loader: the :class:`CacheLoader`.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        backend: str | MutableMapping[str, bytes] = "sqlite",
        dataset_name: str = "",
        writer_buffer_size: int = 20,
        **kwargs: Any,
    ) -> None:
        self.dataset = dataset
        self.cache_loader = CacheLoader(backend, dataset_name, writer_buffer_size, **kwargs)

    def __getitem__(self, item: int) -> Any:
        return self.cache_loader.get(item, self.dataset.__getitem__)

    def __len__(self) -> int:
        assert isinstance(self.dataset, Sized)
        return len(self.dataset)
