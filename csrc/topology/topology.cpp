#include "topology/topology.h"

#include <unordered_set>

#include "base/check.h"

namespace bagua {
namespace {

void check_rank(int rank, int size) {
  BAGUA_CHECK_ARG(size >= 1, "a group needs at least one rank, got size ", size);
  BAGUA_CHECK_ARG(rank >= 0 && rank < size, "rank ", rank, " is outside a group of size ", size);
}

// The mathematical, non-negative modulo.
int modulo(int64_t value, int64_t divisor) {
  const int64_t remainder = value % divisor;
  return static_cast<int>(remainder < 0 ? remainder + divisor : remainder);
}

}  // namespace

int ring_left(int rank, int size) {
  check_rank(rank, size);
  return modulo(rank - 1, size);
}

int ring_right(int rank, int size) {
  check_rank(rank, size);
  return modulo(rank + 1, size);
}

int shift_one_peer(int rank, int size, int64_t step) {
  check_rank(rank, size);
  BAGUA_CHECK_ARG(step >= 0, "a step is not negative, got ", step);
  if (size % 2 == 1) return modulo(step % size - rank, size);
  const int half = size / 2;
  const int64_t shift = step % half;
  return rank < half ? modulo(shift + rank, half) + half : modulo(rank - half - shift, half);
}

std::vector<int> node_members(const std::vector<int>& nodes, int rank) {
  check_rank(rank, static_cast<int>(nodes.size()));
  std::vector<int> members;
  for (int other = 0; other < static_cast<int>(nodes.size()); ++other) {
    if (nodes[other] == nodes[rank]) members.push_back(other);
  }
  return members;
}

std::vector<int> leaders(const std::vector<int>& nodes) {
  std::unordered_set<int> seen;
  std::vector<int> result;
  for (int rank = 0; rank < static_cast<int>(nodes.size()); ++rank) {
    if (seen.insert(nodes[rank]).second) result.push_back(rank);
  }
  return result;
}

}  // namespace bagua
