"""Samplers that give all ranks samples of about the same cost at the same step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, Sampler

__all__ = ["LoadBalancingDistributedBatchSampler", "LoadBalancingDistributedSampler"]


class LoadBalancingDistributedSampler(Sampler[int]):
    """Deals out samples so that those of one step have about the same complexity on all ranks.

    1. The samples are sorted by complexity; with ``shuffle``, by complexity and some noise.
    2. They are cut into groups of one sample per rank, the last of which begins again at the front.
    3. With ``shuffle`` the groups change places. Each rank takes its own place in every group.

    Args:
        dataset: of fixed length.
        complexity_fn: the cost of a sample, an integer; called once per sample, here.
        num_replicas, rank: default: those of torch.distributed's default group.
        shuffle: call :meth:`set_epoch` before each epoch.
        seed: equal on all ranks.
        drop_last: drop samples that do not fill a group, instead of giving some twice.
        random_level: from 0 to 1, the noise as a share of the range of complexities: 0 balances
            best, 1 shuffles most.

    Raises:
        ValueError: the dataset is empty or leaves no sample for each rank, ``rank`` or
            ``random_level`` is out of range.
        RuntimeError: ``num_replicas`` or ``rank`` is not given, and there is no process group.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        complexity_fn: Callable[..., int],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        random_level: float = 0,
    ) -> None:
        self.num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        self.rank = dist.get_rank() if rank is None else rank
        if not 0 <= self.rank < self.num_replicas:
            raise ValueError(f"rank {self.rank} must be from 0 to {self.num_replicas - 1}")
        if not 0.0 <= random_level <= 1.0:
            raise ValueError(f"random_level={random_level} must be from 0 to 1")
        if not isinstance(dataset, Sized) or len(dataset) == 0:
            raise ValueError("the dataset must have a length, and a sample")
        self.dataset = dataset
        self.epoch = 0
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        count, ranks = len(dataset), self.num_replicas
        self.num_samples = count // ranks if drop_last else math.ceil(count / ranks)
        if self.num_samples == 0:
            raise ValueError(
                f"drop_last=True leaves none of {count} sample(s) for each of {ranks} ranks"
            )
        self.total_size = self.num_samples * ranks
        self._complexities = [complexity_fn(dataset[i]) for i in range(count)]
        span = max(self._complexities) - min(self._complexities)
        self._noise = int(span * random_level + 1)  # below which it is drawn

    def shuffle_chunks(self) -> tuple[list[list[int]], list[int]]:
        """The groups of this epoch, one sample per rank in each, and the order of the groups."""
        count = len(self._complexities)
        costs, order = self._complexities, torch.arange(self.num_samples)
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            noise = torch.randint(self._noise, (count,), generator=generator).tolist()
            costs = [cost + more for cost, more in zip(costs, noise, strict=True)]
            order = torch.randperm(self.num_samples, generator=generator)
        by_cost = sorted(range(count), key=costs.__getitem__)
        dealt = [by_cost[i % count] for i in range(self.total_size)]
        ranks = self.num_replicas
        chunks = [dealt[start : start + ranks] for start in range(0, self.total_size, ranks)]
        return chunks, order.tolist()

    def indices_of(self, rank: int) -> list[int]:
        """The samples of a rank in this epoch, in order."""
        chunks, order = self.shuffle_chunks()
        return [chunks[chunk][rank] for chunk in order]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices_of(self.rank))

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Order the samples anew from the next iteration on; equal on all ranks."""
        self.epoch = epoch


class LoadBalancingDistributedBatchSampler(Sampler[list[int]]):
    """Batches of varying size, equally many on every rank.

    Args:
        sampler: with ``drop_last=False``.
        batch_fn: makes batches from the samples of a rank, in order; called for every rank, so that
            all know how many batches each has.
        drop_last: drop batches that not every rank has; else ranks with fewer begin again.

    Raises:
        ValueError: the sampler is another one or drops samples, or ``batch_fn`` makes no batch.
    """

    def __init__(
        self,
        sampler: LoadBalancingDistributedSampler,
        batch_fn: Callable[[list[int]], list[list[int]]],
        drop_last: bool = False,
    ) -> None:
        if not isinstance(sampler, LoadBalancingDistributedSampler):
            raise ValueError(
                f"sampler must be a LoadBalancingDistributedSampler, not {type(sampler).__name__}"
            )
        if sampler.drop_last:
            raise ValueError("the sampler must have drop_last=False")
        self.sampler = sampler
        self.batch_fn = batch_fn
        self.drop_last = drop_last
        self._make_batches()

    def _make_batches(self) -> None:
        ranks = range(self.sampler.num_replicas)
        of_ranks = [self.batch_fn(self.sampler.indices_of(rank)) for rank in ranks]
        if not all(of_ranks):
            raise ValueError("batch_fn must make at least one batch of the samples of a rank")
        counts = [len(batches) for batches in of_ranks]
        self.total_batch = min(counts) if self.drop_last else max(counts)
        own = of_ranks[self.sampler.rank]
        self._batches = [own[i % len(own)] for i in range(self.total_batch)]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches)

    def __len__(self) -> int:
        return self.total_batch

    def set_epoch(self, epoch: int) -> None:
        """Order the samples anew, and make new batches; equal on all ranks."""
        self.sampler.set_epoch(epoch)
        self._make_batches()
