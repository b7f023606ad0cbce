#include "op/average_weights.h"

#include <utility>

#include "base/check.h"
#include "ledger/communications.h"

namespace bagua {

AverageWeights::AverageWeights(at::Tensor peer_weight, at::Tensor communications,
                               std::shared_ptr<BucketOp> inner)
    : peer_weight_(std::move(peer_weight)),
      communications_(std::move(communications)),
      inner_(std::move(inner)) {
  check_communications(communications_, "AverageWeights");
  BAGUA_CHECK_ARG(peer_weight_.dim() == 1 && peer_weight_.is_contiguous(),
                  "AverageWeights: peer_weight must be contiguous with one dimension.");
  BAGUA_CHECK_ARG(inner_, "AverageWeights needs the op that averages.");
}

void AverageWeights::run(at::Tensor& flat, const Round& round) {
  BAGUA_CHECK_ARG(peer_weight_.numel() == flat.numel() &&
                      peer_weight_.scalar_type() == flat.scalar_type() &&
                      peer_weight_.device() == flat.device() && !peer_weight_.is_alias_of(flat),
                  "bucket '", round.bucket, "': peer_weight (", peer_weight_.toString(), ", ",
                  peer_weight_.numel(), " elements) must be separate memory, like the bucket's (",
                  flat.toString(), ", ", flat.numel(), " elements).");
  // 1.
  peer_weight_.copy_(flat);
  // 2.
  inner_->run(peer_weight_, round);
  // 3.
  ++*communications_.data_ptr<int64_t>();
}

std::string AverageWeights::describe() const {
  return concat("AverageWeights(", inner_->describe(), ")");
}

}  // namespace bagua
