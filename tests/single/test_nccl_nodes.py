"""Hierarchical operations on NCCL: groups of nodes are split off one communicator."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from bagua import _C
from bagua._core.group.connections import Connections, by_node
from bagua._ops.operations import Lane, all_reduce
from support.threads.thread_ranks import run_threads

SUM, AVG = _C.ReduceOp.SUM, _C.ReduceOp.AVG


def transports(nccl, nodes):
    """A transport per rank, over the fake NCCL, with the ranks on these nodes."""

    class OverFake(Connections):
        def _nccl(self, name, device, members):
            store = self._store_of(name, members)
            return nccl.connect(store, members.index(self.rank), len(members))

        def node_of_ranks(self):
            return nodes

    store, ranks = dist.HashStore(), list(range(len(nodes)))
    return [OverFake(store, rank, ranks, timedelta(seconds=20)) for rank in ranks]


@pytest.mark.parametrize("way", [True, "sharded"], ids=["leaders", "sharded"])
@pytest.mark.parametrize("reduce", [SUM, AVG], ids=["sum", "mean"])
@pytest.mark.parametrize("nodes", [[0, 0], [0, 1], [0, 0, 1], [0, 1, 1, 2], [1, 0, 1, 0]], ids=str)
def test_a_hierarchical_operation_splits_one_group(nccl, monkeypatch, nodes, reduce, way):
    monkeypatch.delenv("BAGUA_COMM", raising=False)
    values = [torch.randn(37, dtype=torch.float64).float() for _ in nodes]

    connections, results = transports(nccl, nodes), [None] * len(nodes)

    def run(rank):
        group = SimpleNamespace(connections=connections[rank])
        lane = Lane("lane", torch.device("cuda"), group)
        op = all_reduce(None, way, reduce is AVG).make(lane, None)
        flat = values[rank].clone()
        op.run(flat, 1, 1.0, "bucket")
        results[rank] = flat, sorted(purpose for purpose, _ in lane.by_purpose)

    connected = nccl.calls_of("ncclCommInitRankConfig")
    run_threads(len(nodes), run)
    assert nccl.calls_of("ncclCommInitRankConfig") == connected + len(nodes)
    wanted = torch.stack(values).double().sum(0) / (len(nodes) if reduce is AVG else 1)
    leaders = [node[0] for node in by_node(nodes)]
    for rank, (flat, purposes) in enumerate(results):
        assert torch.equal(flat, results[0][0])
        torch.testing.assert_close(flat.double(), wanted, rtol=1e-5, atol=1e-5)
        members = next(node for node in by_node(nodes) if rank in node)
        most = max(map(nodes.count, nodes)) if len(leaders) > 1 else 0
        of_shares = [f"leaders{share}" for share in range(members.index(rank), most, len(members))]
        of_leaders = ["leaders"] if rank in leaders and len(leaders) > 1 else []
        assert purposes == [*(of_leaders if way is True else of_shares), "node"]
