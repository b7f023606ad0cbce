#include "engine/bucket.h"

#include <algorithm>

#include <ATen/ops/as_strided.h>
#include <c10/util/accumulate.h>

#include "base/check.h"

namespace bagua {

at::Tensor Slot::view(const at::Tensor& flat) const {
  return at::as_strided(flat, sizes, strides, offset);
}

void Bucket::check() const {
  BAGUA_CHECK_ARG(flat.defined() && flat.dim() == 1 && flat.is_contiguous(), "bucket '", name,
                  "': the memory must be a contiguous one-dimensional tensor.");
  BAGUA_CHECK_ARG(!slots.empty(), "bucket '", name, "' has no slots.");
  BAGUA_CHECK_ARG(part >= 0 && part < kMostParts, "bucket '", name, "': part ", part,
                  " must be from 0 to ", kMostParts - 1, ".");
  int64_t end = 0;
  for (const Slot& slot : slots) {
    int64_t numel = 1, last = 0;
    for (size_t i = 0; i < slot.sizes.size(); ++i) {
      numel *= slot.sizes[i];
      last += (slot.sizes[i] - 1) * slot.strides.at(i);
    }
    BAGUA_CHECK_ARG(numel == 0 || last + 1 == numel, "bucket '", name, "': slot '", slot.name,
                    "' is not dense in memory (strides leave gaps or overlap).");
    BAGUA_CHECK_ARG(slot.offset >= end && slot.offset + numel <= flat.numel(), "bucket '", name,
                    "': slot '", slot.name, "' at ", slot.offset, " with ", numel,
                    " elements overlaps its neighbour or the end at ", flat.numel(), ".");
    BAGUA_CHECK_ARG(slot.adopt == Adopt::kNone || slot.parameter.defined(), "bucket '", name,
                    "': slot '", slot.name, "' carries a gradient but names no parameter.");
    BAGUA_CHECK_ARG((slot.adopt == Adopt::kSparse) == (slot.sparse != nullptr), "bucket '", name,
                    "': slot '", slot.name,
                    "' needs a SparseGradient where its gradient is sparse, and only there.");
    BAGUA_CHECK_ARG(!slot.sparse || slots.size() == 1, "bucket '", name, "': slot '", slot.name,
                    "' is sparse and must have the bucket for itself.");
    end = slot.offset + numel;
  }
}

at::Tensor Bucket::padding() const {
  int64_t end = 0;
  for (const Slot& slot : slots) {
    end = std::max(end, slot.offset + c10::multiply_integers(slot.sizes));
  }
  return flat.narrow(0, end, flat.numel() - end);
}

}  // namespace bagua
