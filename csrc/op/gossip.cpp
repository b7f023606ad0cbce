#include "op/gossip.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "ledger/communications.h"
#include "op/tensors/numel_at_once.h"
#include "op/wire/part_layout.h"

namespace bagua {

int shift_one_peer(int rank, int size, int64_t step) {
  BAGUA_CHECK_ARG(rank >= 0 && rank < size, "rank ", rank, " is outside a group of size ", size);
  BAGUA_CHECK_ARG(step >= 0, "a step is not negative, got ", step);
  if (size % 2 == 1) return static_cast<int>((step % size + size - rank) % size);
  const int half = size / 2;
  const int shift = static_cast<int>(step % half);
  return rank < half ? (rank + shift) % half + half : (rank - shift) % half;
}

Gossip::Gossip(std::shared_ptr<Communicator> communicator, at::Tensor communications,
               std::vector<int> weights, std::shared_ptr<Scratch> scratch)
    : communicator_(std::move(communicator)),
      communications_(std::move(communications)),
      weights_(std::move(weights)),
      scratch_(std::move(scratch)) {
  check_communications(communications_, "Gossip");
  BAGUA_CHECK_ARG(static_cast<int>(weights_.size()) == communicator_->group().size &&
                      std::all_of(weights_.begin(), weights_.end(), [](int w) { return w > 0; }),
                  "Gossip needs a weight above 0 for each of its ", communicator_->group().size,
                  " members.");
}

void Gossip::run(at::Tensor& flat, const Round&) {
  const auto [rank, size] = communicator_->group();
  // 1.
  const int peer = shift_one_peer(rank, size, *communications_.data_ptr<int64_t>());
  if (peer == rank) return;
  // 2.
  at::Tensor received =
      scratch_->get(Scratch::kReceive, flat.numel(), flat.scalar_type(), flat.device());
  communicator_->exchange({Send{flat, peer}}, {Recv{received, peer}});
  // 3. Product by product: a fused multiply-add would round the two sides of a pair differently.
  //    Tile by tile on CPU, so that memory is read once and the rest happens in cache.
  const double total = static_cast<double>(weights_[rank]) + weights_[peer];
  const int64_t most = numel_at_once(flat, kTileNumel);
  for (int64_t first = 0; first < flat.numel(); first += most) {
    const int64_t numel = std::min(most, flat.numel() - first);
    at::Tensor own = flat.narrow(0, first, numel);
    at::Tensor theirs = received.narrow(0, first, numel);
    own.mul_(weights_[rank] / total).add_(theirs.mul_(weights_[peer] / total));
  }
}

std::string Gossip::describe() const {
  return concat("Gossip(shift_one, ranks ", communicator_->group().size, ")");
}

}  // namespace bagua
