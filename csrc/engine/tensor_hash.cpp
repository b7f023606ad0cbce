#include "engine/tensor_hash.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <type_traits>
#include <vector>

#include "base/check.h"
#include "base/host_device.h"
#include "base/per_instruction_set.h"

namespace bagua {
namespace {

// Half of each is odd, so that all factors of a period of 2^31, or 2^63, places are different.
constexpr uint32_t kStep = 0x3C6EF372;
constexpr uint64_t kWideStep = 0x9E3779B97F4A7C16;

// A product of 32 by 32 bits loses nothing and is one instruction for a whole vector.
BAGUA_HD uint64_t hashed(uint32_t value, uint64_t place) {
  const uint64_t product = uint64_t{value} * (static_cast<uint32_t>(place) * kStep + 1);
  return product ^ (product >> 32);
}

// Doubles often differ in their upper bits only, which a product moves out at the top.
BAGUA_HD uint64_t hashed(uint64_t value, uint64_t place) {
  const uint64_t product = (value ^ (value >> 32)) * (place * kWideStep + 1);
  return product ^ (product >> 32);
}

template <typename Element>
BAGUA_HD uint64_t sum(const std::byte* elements, int64_t stride, int64_t count, uint64_t first) {
  using Wide = std::conditional_t<sizeof(Element) == 8, uint64_t, uint32_t>;
  const int64_t apart = stride * static_cast<int64_t>(sizeof(Element));
  uint64_t result = 0;
  for (int64_t i = 0; i < count; ++i) {
    Element element;
    std::memcpy(&element, elements + i * apart, sizeof element);
    result += hashed(Wide{element}, first + i);
  }
  return result;
}

// The stride is a constant in the loops that matter.
template <typename Element>
BAGUA_HD uint64_t sum_of_run(const std::byte* elements, int64_t stride, int64_t count,
                             uint64_t first) {
  return stride == 1 ? sum<Element>(elements, 1, count, first)
                     : sum<Element>(elements, stride, count, first);
}

// Hash of a run of elements that lie `stride` elements apart and are numbers first, first + 1, ...
BAGUA_PER_INSTRUCTION_SET
uint64_t run_hash(const std::byte* elements, int64_t bytes, int64_t stride, int64_t count,
                  uint64_t first) {
  switch (bytes) {
    case 1:
      return sum_of_run<uint8_t>(elements, stride, count, first);
    case 2:
      return sum_of_run<uint16_t>(elements, stride, count, first);
    case 4:
      return sum_of_run<uint32_t>(elements, stride, count, first);
    case 8:
      return sum_of_run<uint64_t>(elements, stride, count, first);
    default:
      throw Error(concat("no hash for elements of ", bytes, " bytes."));
  }
}

// Dimensions as few as they can be, so that the last one is long. Elements of 16 bytes are two.
struct Layout {
  std::vector<int64_t> sizes, strides;
  int64_t bytes;  // of an element
  int64_t per;    // elements that one of the tensor's became
};

Layout layout_of(const at::Tensor& tensor) {
  const auto bytes = static_cast<int64_t>(tensor.element_size());
  const int64_t per = bytes == 16 ? 2 : 1;
  Layout layout{.sizes = {}, .strides = {}, .bytes = bytes / per, .per = per};
  const auto add = [&](int64_t size, int64_t stride) {
    if (size == 1) return;
    if (!layout.sizes.empty() && layout.strides.back() == stride * size) {
      layout.sizes.back() *= size;
      layout.strides.back() = stride;
      return;
    }
    layout.sizes.push_back(size);
    layout.strides.push_back(stride);
  };
  for (int64_t i = 0; i < tensor.dim(); ++i) add(tensor.size(i), tensor.stride(i) * per);
  if (per > 1) add(per, 1);
  if (layout.sizes.empty()) {
    layout.sizes.push_back(1);
    layout.strides.push_back(1);
  }
  return layout;
}

}  // namespace

uint64_t tensor_hash(const at::Tensor& tensor, int64_t from, int64_t count) {
  const Layout layout = layout_of(tensor);
  const auto* memory = static_cast<const std::byte*>(tensor.const_data_ptr());
  const int64_t inner = layout.sizes.back();
  uint64_t result = 0;
  int64_t place = from * layout.per;
  for (const int64_t end = place + count * layout.per; place < end;) {
    int64_t offset = place % inner * layout.strides.back();
    int64_t row = place / inner;
    for (auto i = static_cast<int64_t>(layout.sizes.size()) - 2; i >= 0; --i) {
      offset += row % layout.sizes[i] * layout.strides[i];
      row /= layout.sizes[i];
    }
    const int64_t run = std::min(inner - place % inner, end - place);
    result += run_hash(memory + offset * layout.bytes, layout.bytes, layout.strides.back(), run,
                       static_cast<uint64_t>(place));
    place += run;
  }
  return result;
}

}  // namespace bagua
