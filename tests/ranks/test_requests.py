"""What a wrap asks the job's store: as much with many ranks as with few, whatever the algorithm."""

import math
import statistics
import warnings

import torch
import torch.distributed as dist
from bagua._core.group.process_group import BaguaProcessGroup
from bagua.torch_api.algorithms import Algorithm
from support import every_algorithm, training
from support.counting_store import CountingStore

#: Heartbeats and looks at the news have a budget of requests per second, in test_failure_board.py.
OF_TIME = ("board/beat/", "board/news")


HIERARCHICAL = {
    "bytegrad on nodes": lambda: Algorithm.init("bytegrad", hierarchical=True),
    "decentralized on nodes": lambda: Algorithm.init("decentralized", hierarchical=True),
}


def wrapped(name, group):
    model = torch.nn.Linear(4, 2)
    if name in HIERARCHICAL:
        algorithm = HIERARCHICAL[name]()
        return model.with_bagua([training.sgd(model)], algorithm, process_group=group)
    return every_algorithm.wrapped(name, model, process_group=group)[0]


@training.with_group
def wrap_all():
    """By algorithm: requests of this rank and bytes of the longest one."""
    found = {}
    for name in (*every_algorithm.ALGORITHMS, *HIERARCHICAL):
        keys = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        store = CountingStore(keys, apart=OF_TIME)
        group = BaguaProcessGroup(range(dist.get_world_size()), name, store, training.TIMEOUT)
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # async is not aborted
            model = wrapped(name, group)
        found[name] = (store.total(), store.longest)
        del model, group
    return found


def environments(size, comm, per_node):
    return [
        {
            "BAGUA_COMM": comm,
            "GROUP_RANK": str(rank // per_node),
            "LOCAL_RANK": str(rank % per_node),
            "LOCAL_WORLD_SIZE": str(per_node),
        }
        for rank in range(size)
    ]


def test_a_wrap_asks_for_as_much_with_each_algorithm_and_number_of_ranks(ranks):
    for size, comm, per_node in ((2, "gloo", 2), (2, "auto", 2), (8, "gloo", 1), (8, "auto", 4)):
        by_rank = ranks(size, wrap_all, env=environments(size, comm, per_node))
        asked = {name: [found[name][0] for found in by_rank] for name in by_rank[0]}
        means = {name: statistics.mean(each) for name, each in asked.items()}
        assert max(means.values()) <= 40 + 4 * math.log2(size), (comm, per_node, asked)
        assert max(means.values()) - min(means.values()) <= 10, (comm, per_node, asked)
        # The last one of a meeting deletes its keys, which is chance.
        assert max(map(max, asked.values())) <= 80, (comm, per_node, asked)
        assert max(longest for found in by_rank for _, longest in found.values()) < 1000
