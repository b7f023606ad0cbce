// The steps of FusedCodec one by one, with a codec of the CPU: a slow reference for its kernels.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "codec/codec.h"
#include "codec/fused_codec.h"
#include "codec/plain_sum.h"

namespace bagua {

class FusedReference final : public FusedCodec {
 public:
  explicit FusedReference(std::shared_ptr<const Codec> cpu) : cpu_(std::move(cpu)) {}

  int64_t scratch_bytes(std::span<const Chunk>, DType) const override { return 0; }

  void encode_sum(std::span<const Chunk> chunks, const PayloadVersions& versions, float divisor,
                  DType dtype, std::byte*, StreamHandle) const override {
    for (const Chunk& chunk : chunks) {
      encode(chunk, dtype);
      const std::vector<float> sum = sum_of(chunk, versions, dtype);
      visit_dtype(dtype, [&]<typename T>(T) {
        T* const x = static_cast<T*>(chunk.x);
        for (int64_t i = 0; i < chunk.numel; ++i) x[i] = narrow<T>(sum[i] / divisor);
      });
      encode(chunk, dtype);
      cpu_->decode({&chunk, 1}, dtype, nullptr);
    }
  }

  void sum(std::span<const Chunk> chunks, const PayloadVersions& versions, const SumScale& scale,
           DType dtype, StreamHandle) const override {
    for (const Chunk& chunk : chunks) {
      visit_dtype(dtype, [&]<typename T>(T) {
        T* const x = static_cast<T*>(chunk.x);
        std::vector<float> sum(chunk.numel);
        for (int row = 0; row < versions.rows; ++row) {
          if (row == versions.own) {
            for (int64_t i = 0; i < chunk.numel; ++i) sum[i] += widen(x[i]);
            continue;
          }
          const Chunk version{sum.data(), payload_in_row(versions, row, chunk), chunk.numel};
          cpu_->decode_add({&version, 1}, dtype, 1.0f, nullptr);
        }
        for (int64_t i = 0; i < chunk.numel; ++i) {
          x[i] = narrow<T>(sum[i] / scale.divisor * scale.factor);
        }
      });
    }
  }

  void encode_sum_residual(std::span<const Chunk> chunks, const PayloadVersions& versions,
                           float divisor, const ResidualArrays& arrays, std::byte*,
                           StreamHandle) const override {
    for (const Chunk& chunk : chunks) {
      const std::vector<float> sum = sum_of(chunk, versions, DType::kFloat32);
      float* const x = static_cast<float*>(chunk.x);
      const int64_t first = x - arrays.x;
      for (int64_t i = 0; i < chunk.numel; ++i) x[i] = sum[i] / divisor + arrays.before[first + i];
      cpu_->encode_residual({&chunk, 1}, nullptr, nullptr);
      const Chunk result{arrays.result + first, chunk.payload, chunk.numel};
      cpu_->decode({&result, 1}, DType::kFloat32, nullptr);
    }
  }

  void encode_combined(std::span<const Chunk> chunks, const ThreeArrays& arrays,
                       const ThreeWeights& weights, DType dtype, std::byte*,
                       StreamHandle) const override {
    for (const Chunk& chunk : chunks) {
      std::vector<float> difference(chunk.numel);
      const int64_t first = offset_of(chunk, arrays, dtype);
      visit_dtype(dtype, [&]<typename T>(T) {
        for (int64_t i = 0; i < chunk.numel; ++i) {
          float sum = widen(static_cast<const T*>(chunk.x)[i]);
          sum += weights.left * arrays.left[first + i];
          sum += weights.right * arrays.right[first + i];
          difference[i] = sum - weights.own * arrays.own[first + i];
        }
      });
      encode({difference.data(), chunk.payload, chunk.numel}, DType::kFloat32);
    }
  }

  void decode_add_three(std::span<const Chunk> chunks, const ThreeArrays& arrays,
                        const ThreeRows& rows, DType dtype, StreamHandle) const override {
    for (const Chunk& chunk : chunks) {
      const int64_t first = offset_of(chunk, arrays, dtype);
      float* const replicas[3] = {arrays.own + first, arrays.left + first, arrays.right + first};
      const std::byte* const from[3] = {rows.own, rows.left, rows.right};
      for (int a = 0; a < 3; ++a) {
        std::vector<float> sum(chunk.numel);
        const Chunk payload{sum.data(), payload_in(from[a], chunk, rows.own), chunk.numel};
        cpu_->decode({&payload, 1}, DType::kFloat32, nullptr);
        for (int64_t i = 0; i < chunk.numel; ++i) {
          sum[i] += replicas[a][i];
          if (std::isfinite(sum[i])) replicas[a][i] = sum[i];
          const bool poisoned = a > 0 && !std::isfinite(sum[i]);
          visit_dtype(dtype, [&]<typename T>(T) {
            T& x = static_cast<T*>(chunk.x)[i];
            if (a == 0) x = narrow<T>(sum[i]);
            if (poisoned) x = narrow<T>(std::numeric_limits<float>::quiet_NaN());
          });
        }
      }
    }
  }

 private:
  // The sum of the decoded payloads of all rows. The payload of row `own` is the chunk's.
  std::vector<float> sum_of(const Chunk& chunk, const PayloadVersions& versions,
                            DType dtype) const {
    std::vector<float> sum(chunk.numel);
    for (int row = 0; row < versions.rows; ++row) {
      std::byte* const payload =
          row == versions.own ? chunk.payload : payload_in_row(versions, row, chunk);
      const Chunk version{sum.data(), payload, chunk.numel};
      cpu_->decode_add({&version, 1}, dtype, 1.0f, nullptr);
    }
    return sum;
  }
  void encode(const Chunk& chunk, DType dtype) const {
    cpu_->encode({&chunk, 1}, dtype, nullptr, nullptr);
  }
  static std::byte* payload_in(const std::byte* row, const Chunk& chunk, const std::byte* own_row) {
    return const_cast<std::byte*>(row) + (chunk.payload - own_row);
  }
  static std::byte* payload_in_row(const PayloadVersions& versions, int row, const Chunk& chunk) {
    return payload_in(versions.first + row * versions.stride, chunk, versions.results);
  }
  static int64_t offset_of(const Chunk& chunk, const ThreeArrays& arrays, DType dtype) {
    return (static_cast<const char*>(chunk.x) - static_cast<const char*>(arrays.x)) /
           dtype_bytes(dtype);
  }

  const std::shared_ptr<const Codec> cpu_;
};

// The steps of PlainSum, one by one.
class PlainSumReference final : public PlainSum {
 public:
  void sum(std::span<const Chunk> chunks, const PayloadVersions& versions, const SumScale& scale,
           DType dtype, StreamHandle) const override {
    for (const Chunk& chunk : chunks) {
      visit_dtype(dtype, [&]<typename T>(T) {
        T* const x = static_cast<T*>(chunk.x);
        for (int64_t i = 0; i < chunk.numel; ++i) {
          float sum = 0;
          for (int row = 0; row < versions.rows; ++row) {
            const std::byte* const version =
                versions.first + row * versions.stride + (chunk.payload - versions.results);
            sum += widen(row == versions.own ? x[i] : reinterpret_cast<const T*>(version)[i]);
          }
          x[i] = narrow<T>(sum / scale.divisor * scale.factor);
        }
      });
    }
  }
};

}  // namespace bagua
