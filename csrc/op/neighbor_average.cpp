#include "op/neighbor_average.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/check.h"
#include "comm/tensor_checks.h"
#include "op/tensors/arithmetic_dtype.h"
#include "op/tensors/numel_at_once.h"
#include "op/wire/part_layout.h"

namespace bagua {
namespace {

constexpr int64_t kSegmentNumel = kSegmentTiles * kTileNumel;
constexpr double kSumTolerance = 1e-6;

void check_terms(const std::vector<MixingTerm>& terms, int size) {
  double sum = 0;
  for (size_t i = 0; i < terms.size(); ++i) {
    const auto [rank, weight] = terms[i];
    BAGUA_CHECK_ARG(rank >= 0 && rank < size, "NeighborAverage: neighbour ", rank,
                    " is outside a group of size ", size, ".");
    BAGUA_CHECK_ARG(i == 0 || terms[i - 1].rank != rank, "NeighborAverage: rank ", rank,
                    " comes twice; neighbours are other ranks, each once.");
    BAGUA_CHECK_ARG(std::isfinite(weight), "NeighborAverage: the weight of rank ", rank, " is ",
                    weight, ".");
    sum += weight;
  }
  BAGUA_CHECK_ARG(std::abs(sum - 1) <= kSumTolerance,
                  "NeighborAverage: weights must add up to 1, they make ", sum, ".");
}

}  // namespace

NeighborAverage::NeighborAverage(std::shared_ptr<Communicator> communicator, double own_weight,
                                 std::vector<MixingTerm> neighbors,
                                 std::shared_ptr<Scratch> scratch)
    : communicator_(std::move(communicator)),
      terms_(std::move(neighbors)),
      scratch_(std::move(scratch)) {
  const auto [rank, size] = communicator_->group();
  terms_.push_back({rank, own_weight});
  std::sort(terms_.begin(), terms_.end(),
            [](const MixingTerm& a, const MixingTerm& b) { return a.rank < b.rank; });
  check_terms(terms_, size);
}

void NeighborAverage::run(at::Tensor& flat, const Round& round) {
  BAGUA_CHECK_ARG(flat.is_floating_point(), "bucket '", round.bucket,
                  "': NeighborAverage needs floating-point numbers, not ",
                  dtype_text(flat.scalar_type()), ".");
  if (terms_.size() == 1) return;
  const int64_t most = numel_at_once(flat, kSegmentNumel);
  for (int64_t first = 0; first < flat.numel(); first += most) {
    at::Tensor segment = flat.narrow(0, first, std::min(most, flat.numel() - first));
    const int64_t neighbors = static_cast<int64_t>(terms_.size()) - 1;
    at::Tensor received =
        scratch_
            ->get(Scratch::kReceive, neighbors * segment.numel(), flat.scalar_type(), flat.device())
            .view({neighbors, segment.numel()});
    // 1.
    std::vector<Send> sends;
    std::vector<Recv> recvs;
    for (const MixingTerm& term : terms_) {
      if (term.rank == communicator_->group().rank) continue;
      recvs.push_back({received.select(0, static_cast<int64_t>(recvs.size())), term.rank});
      sends.push_back({segment, term.rank});
    }
    communicator_->exchange(sends, recvs);
    // 2.
    mix(segment, received);
  }
}

// Tile by tile on CPU, so that the products stay in cache. Product by product: whether a fused
// multiply-add is used depends on where a thread's share begins, which ranks need not have in
// common.
void NeighborAverage::mix(at::Tensor& segment, const at::Tensor& received) {
  const at::ScalarType dtype = arithmetic_dtype(segment.scalar_type());
  const int64_t most = numel_at_once(segment, kTileNumel);
  for (int64_t first = 0; first < segment.numel(); first += most) {
    const int64_t numel = std::min(most, segment.numel() - first);
    at::Tensor own = segment.narrow(0, first, numel);
    at::Tensor sum = scratch_->get(Scratch::kSum, numel, dtype, segment.device());
    at::Tensor product = scratch_->get(Scratch::kScaled, numel, dtype, segment.device());
    int64_t neighbor = 0;
    for (size_t i = 0; i < terms_.size(); ++i) {
      const bool is_own = terms_[i].rank == communicator_->group().rank;
      at::Tensor& target = i == 0 ? sum : product;
      target.copy_(is_own ? own : received.select(0, neighbor++).narrow(0, first, numel));
      target.mul_(terms_[i].weight);
      if (i > 0) sum.add_(product);
    }
    own.copy_(sum);
  }
}

std::string NeighborAverage::describe() const {
  return concat("NeighborAverage(neighbours ", terms_.size() - 1, ", ranks ",
                communicator_->group().size, ")");
}

}  // namespace bagua
