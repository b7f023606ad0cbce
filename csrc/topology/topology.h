// Peers of a rank: pure functions of integers.
//
// Thread safety: all are pure. Ownership: values. May fail: std::invalid_argument for a rank
// outside [0, size), a size below 1 or a negative step.
#pragma once

#include <cstdint>
#include <vector>

namespace bagua {

// Neighbours on a ring of `size` ranks; with one rank both are the rank itself, with two both are
// the other one.
int ring_left(int rank, int size);
int ring_right(int rank, int size);

// The partner of `rank` in pairwise averaging at `step` (0, 1, 2, ...). Partners are mutual.
//
// Even size, h = size / 2: ranks below h meet ranks from h on, shifted by one each step (Bagua's
// "shift_one"; period h):
//   rank <  h: (step + rank) mod h + h
//   rank >= h: (rank - h - step) mod h
// Odd size: (step - rank) mod size. Exactly one rank is its own partner and sits this step out:
// the one with 2 * rank = step (mod size). In `size` steps every rank sits out once and meets every
// other rank once.
int shift_one_peer(int rank, int size, int64_t step);

// Nodes. `nodes[r]` is the id of the node that rank r runs on (any integers, in any order). The
// leader of a node is its lowest rank.
std::vector<int> node_members(const std::vector<int>& nodes, int rank);

// The leaders of all nodes, ascending.
std::vector<int> leaders(const std::vector<int>& nodes);

}  // namespace bagua
