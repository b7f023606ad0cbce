"""Budgets of the work that each op gives to a device in a round, counted on the fake device."""

import math

import pytest
from support.programs.device_work import device_work

RANKS = (2, 8)

# Most launches, transfers and waits in a round of a 10 MiB bucket with any number of RANKS, and
# most bytes read and written per element. "own part": per element of the rank's own part.
BUDGETS = {
    "all_reduce": (0, 1, 0, 0),
    "compressed_all_reduce minmax_uint8": (8, 2, 0, 18),
    "compressed_all_reduce minmax_uint8, own part": (3, 0, 0, 28),
    "compressed_all_reduce block_uint8": (5, 2, 0, 11),
    "compressed_all_reduce block_uint8, own part": (1, 0, 0, 16),
    "compressed_all_reduce fp16": (5, 2, 0, 14),
    "compressed_all_reduce fp16, own part": (1, 0, 0, 24),
    "compressed_all_reduce bf16": (5, 2, 0, 14),
    "compressed_all_reduce bf16, own part": (1, 0, 0, 24),
    "compressed_all_reduce int4_block": (5, 2, 0, 10),
    "compressed_all_reduce int4_block, own part": (1, 0, 0, 13),
    "compressed_all_reduce bit2_block": (5, 2, 0, 9),
    "compressed_all_reduce bit2_block, own part": (1, 0, 0, 11),
    "compressed_all_reduce minmax_uint8 with residuals": (15, 2, 0, 48),
    "compressed_all_reduce minmax_uint8 with residuals, own part": (2, 0, 0, 29),
    "compressed_all_reduce int4_block with residuals": (12, 2, 0, 34),
    "compressed_all_reduce int4_block with residuals, own part": (1, 0, 0, 17),
    "compressed_reduce_scatter minmax_uint8": (5, 1, 0, 10),
    "compressed_reduce_scatter minmax_uint8, own part": (1, 0, 0, 15),
    "compressed_reduce_scatter block_uint8": (4, 1, 0, 7),
    "compressed_reduce_scatter block_uint8, own part": (1, 0, 0, 15),
    "compressed_reduce_scatter fp16": (4, 1, 0, 8),
    "compressed_reduce_scatter fp16, own part": (1, 0, 0, 22),
    "compressed_reduce_scatter bf16": (4, 1, 0, 8),
    "compressed_reduce_scatter bf16, own part": (1, 0, 0, 22),
    "compressed_reduce_scatter int4_block": (4, 1, 0, 7),
    "compressed_reduce_scatter int4_block, own part": (1, 0, 0, 12),
    "compressed_reduce_scatter bit2_block": (4, 1, 0, 7),
    "compressed_reduce_scatter bit2_block, own part": (1, 0, 0, 10),
    # Its own part is an eighth or half of the bucket: 36 or 12 bytes of each of its elements.
    "sharded_hierarchical": (1, 3, 0, 6),
    "compressed_gossip minmax_uint8": (5, 1, 0, 56),
    "compressed_gossip block_uint8": (4, 1, 0, 48),
    "compressed_gossip fp16": (4, 1, 0, 52),
    "compressed_gossip bf16": (4, 1, 0, 52),
    "compressed_gossip int4_block": (4, 1, 0, 47),
    "compressed_gossip bit2_block": (4, 1, 0, 46),
    "gossip": (3, 1, 0, 28),
    "neighbor_average": (24, 1, 0, 220),
    # The waits are for the ranks, outside the gate.
    "async_average": (6, 2, 2, 40),
    "update_momentum": (2, 0, 0, 20),
    "low_rank": (7, 2, 0, 30),
    "sparse": (22, 1, 0, 50),
}


@pytest.mark.timeout(400)  # the first run builds the program
def test_every_op_costs_its_budget_of_launches_transfers_waits_and_bytes():
    """Neither more nor less: where an op has become cheaper, its budget shall follow."""
    most = {}
    for row in device_work(RANKS):
        counts = tuple(row[key] for key in ("launches", "transfers", "waits"))
        counts = (*counts, math.ceil(round(row["read"] + row["written"], 1)))
        most[row["op"]] = tuple(map(max, counts, most.get(row["op"], counts)))
    assert most == BUDGETS
