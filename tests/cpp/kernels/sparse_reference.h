// Sparse messages on the CPU, behind the interface of a device's codec.
#pragma once

#include <cstring>
#include <exception>
#include <limits>
#include <utility>
#include <vector>

#include "codec/index_code.h"
#include "codec/sparse_codec.h"
#include "kernels/frame_reference.h"
#include "math/top_k.h"

namespace bagua {

class SparseReference final : public SparseCodec {
 public:
  int64_t scratch_bytes(const SparseShape&, int64_t) const override { return 0; }

  void take(const SparseShape& shape, void* x, std::byte* message, std::byte*,
            StreamHandle) const override {
    std::memset(message, 0, shape.values_bytes);
    visit(shape, [&]<typename T>(T) {
      T* const from = static_cast<T*>(x);
      T* const values = reinterpret_cast<T*>(message);
      std::vector<uint32_t> chosen(shape.k);
      top_k(from, shape.numel, shape.k, chosen.data());
      for (int64_t i = 0; i < shape.k; ++i) values[i] = std::exchange(from[chosen[i]], T{0});
      pack_indices(chosen.data(), shape.k, shape.numel, message + shape.values_bytes);
    });
  }

  void add(const SparseShape& shape, const SparseMessages& messages, void* sum, int32_t* faults,
           std::byte*, StreamHandle) const override {
    visit(shape, [&]<typename T>(T) {
      T* const to = static_cast<T*>(sum);
      for (int64_t i = 0; i < shape.numel; ++i) to[i] = 0;
      std::vector<uint32_t> chosen(shape.k);
      for (int64_t rank = 0; rank < messages.ranks; ++rank) {
        const std::byte* const message = messages.first + rank * messages.stride;
        const T* const values = reinterpret_cast<const T*>(message);
        faults[rank] = 0;
        try {
          unpack_indices(message + shape.values_bytes, shape.k, shape.numel, chosen.data());
        } catch (const std::exception&) {
          faults[rank] = 1;
          for (int64_t i = 0; i < shape.numel; ++i) to[i] = std::numeric_limits<T>::quiet_NaN();
          continue;
        }
        for (int64_t i = 0; i < shape.k; ++i) to[chosen[i]] += values[i];
      }
    });
  }

  const FrameKernels& frames() const override { return frames_; }

 private:
  template <typename Visit>
  static void visit(const SparseShape& shape, Visit function) {
    shape.element_bytes == 4 ? function(float{}) : function(double{});
  }

  const FrameReference frames_;
};

}  // namespace bagua
