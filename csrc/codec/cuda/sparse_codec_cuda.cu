#include <algorithm>

#include "base/launch.h"
#include "codec/cuda/frame_kernels_cuda.h"
#include "codec/cuda/sparse_kernels.cuh"
#include "codec/sparse_codec.h"

namespace bagua {

namespace {

// Enough to fill a GPU; more would write more histograms.
constexpr int64_t kMostCtas = 1024;

int64_t ceil_div(int64_t numel, int64_t each) { return (numel + each - 1) / each; }

int64_t tiles_of_top_k(int64_t numel) { return ceil_div(numel, kTopKTileNumel); }

template <typename Visit>
auto visit_elements(const SparseShape& shape, Visit visit) {
  return shape.element_bytes == 4 ? visit(float{}) : visit(double{});
}

// Sections of the memory that take() works in, in bytes from its begin.
struct TakeLayout {
  int64_t ranges, tiles, indices, end;
};

TakeLayout take_layout(const SparseShape& shape) {
  const int64_t passes = visit_elements(shape, []<typename T>(T) { return kPasses<T>; });
  TakeLayout layout{};
  layout.ranges = passes * kDigits * int64_t{sizeof(uint32_t)};
  layout.tiles = layout.ranges + (passes + 1) * int64_t{sizeof(KeyRange)};
  layout.indices = layout.tiles + tiles_of_top_k(shape.numel) * int64_t{sizeof(uint64_t)};
  layout.end = layout.indices + shape.k * int64_t{sizeof(uint32_t)};
  return layout;
}

int64_t tiles_of_bitmap(int64_t numel) { return ceil_div(numel, kBitmapTileBits); }

// Sections of the memory that add() works in, in bytes from its begin: indices, counts of tiles.
struct AddLayout {
  int64_t counts, end;
};

AddLayout add_layout(const SparseShape& shape, int64_t ranks) {
  AddLayout layout{};
  layout.counts = ceil_div(ranks * shape.k * int64_t{sizeof(uint32_t)}, 8) * 8;
  layout.end = layout.counts;
  if (shape.coding == IndexCoding::kBitmap) {
    layout.end += ranks * tiles_of_bitmap(shape.numel) * int64_t{sizeof(uint64_t)};
  }
  return layout;
}

void set_to_zero(void* memory, int64_t bytes, void* stream) {
  const int64_t words = bytes / int64_t{sizeof(uint32_t)};
  launch("zero_words", zero_words, std::min(ceil_div(words, kTopKThreads), kMostCtas), kTopKThreads,
         stream, static_cast<uint32_t*>(memory), words);
}

class SparseCodecCuda final : public SparseCodec {
 public:
  int64_t scratch_bytes(const SparseShape& shape, int64_t ranks) const override {
    return std::max(take_layout(shape).end, add_layout(shape, ranks).end);
  }

  // See Note [Largest elements on a device].
  void take(const SparseShape& shape, void* elements, std::byte* message, std::byte* scratch,
            StreamHandle stream) const override {
    const TakeLayout layout = take_layout(shape);
    const TopKScratch top_k{reinterpret_cast<uint32_t*>(scratch),
                            reinterpret_cast<KeyRange*>(scratch + layout.ranges),
                            reinterpret_cast<uint64_t*>(scratch + layout.tiles)};
    auto* const indices = reinterpret_cast<uint32_t*>(scratch + layout.indices);
    const int64_t n = shape.numel, tiles = tiles_of_top_k(n);
    set_to_zero(scratch, layout.ranges, stream);
    visit_elements(shape, [&]<typename T>(T) {
      T* const x = static_cast<T*>(elements);
      for (int pass = 0; pass < kPasses<T>; ++pass) {
        launch("count_digits", count_digits<T>, std::min(tiles, kMostCtas), kTopKThreads, stream, x,
               n, shape.k, pass, top_k);
      }
      launch("count_chosen", count_chosen<T>, tiles, kTopKThreads, stream, x, n, shape.k, top_k);
      launch("sum_tiles", sum_tiles, 1, kTopKThreads, stream, top_k.tiles, tiles);
      launch("move_chosen", move_chosen<T>, tiles, kTopKThreads, stream, x, n,
             reinterpret_cast<T*>(message), indices, top_k);
    });
    const int64_t words = std::max<int64_t>(shape.indices_bytes / 4, 1);
    launch("code_indices", code_indices, ceil_div(words, kTopKThreads), kTopKThreads, stream,
           indices, shape, reinterpret_cast<uint32_t*>(message),
           reinterpret_cast<uint32_t*>(message + shape.values_bytes));
  }

  void add(const SparseShape& shape, const SparseMessages& messages, void* sum, int32_t* faults,
           std::byte* scratch, StreamHandle stream) const override {
    auto* const indices = reinterpret_cast<uint32_t*>(scratch);
    const SparseSource source{messages, shape.values_bytes};
    set_to_zero(faults, messages.ranks * int64_t{sizeof(int32_t)}, stream);
    if (shape.coding == IndexCoding::kBitmap) {
      auto* const counts =
          reinterpret_cast<uint64_t*>(scratch + add_layout(shape, messages.ranks).counts);
      const int64_t tiles = tiles_of_bitmap(shape.numel), ctas = messages.ranks * tiles;
      launch("count_bits", count_bits, ctas, kTopKThreads, stream, source, shape, tiles, counts);
      launch("sum_tiles", sum_tiles, messages.ranks, kTopKThreads, stream, counts, tiles);
      launch("read_bitmap", read_bitmap, ctas, kTopKThreads, stream, source, shape, tiles, counts,
             indices, faults);
    } else {
      const int64_t tiles = tiles_of_top_k(shape.k);
      launch("read_packed", read_packed, messages.ranks * tiles, kTopKThreads, stream, source,
             shape, tiles, indices, faults);
    }
    visit_elements(shape, [&]<typename T>(T) {
      launch("sum_values", sum_values<T>, tiles_of_top_k(shape.numel), kTopKThreads, stream, source,
             shape.numel, shape.k, indices, faults, static_cast<T*>(sum));
    });
  }

  const FrameKernels& frames() const override { return cuda_frame_kernels(); }
};

}  // namespace

std::shared_ptr<const SparseCodec> make_cuda_sparse_codec() {
  auto codec = std::make_shared<const SparseCodecCuda>();
  const LoadsKernels here;
  for (const int64_t element_bytes : {4, 8}) {
    for (const IndexCoding coding : {IndexCoding::kPacked, IndexCoding::kBitmap}) {
      const SparseShape shape{.numel = 1,
                              .k = 1,
                              .element_bytes = element_bytes,
                              .coding = coding,
                              .bits = 1,
                              .values_bytes = 32,
                              .indices_bytes = 32};
      codec->take(shape, nullptr, nullptr, nullptr, nullptr);
      codec->add(shape, {.first = nullptr, .stride = 64, .ranks = 1}, nullptr, nullptr, nullptr,
                 nullptr);
    }
  }
  load_kernels(codec->frames());
  return codec;
}

}  // namespace bagua
