#include "engine/overwrite_watch.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <map>
#include <string_view>
#include <utility>

#include <ATen/core/function_schema.h>
#include <ATen/record_function.h>

namespace bagua {
namespace {

// Addresses of the elements of a tensor, from the first to the last.
struct Bytes {
  uintptr_t begin = 0;
  uintptr_t end = 0;   // as begin: there are none
  bool dense = false;  // nothing lies between them
};

// None for subclasses in Python, whose own operators are seen, and for tensors without memory.
Bytes bytes_of(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.unsafeGetTensorImpl()->is_python_dispatch() ||
      tensor.layout() != at::kStrided || !tensor.has_storage() || tensor.numel() == 0 ||
      tensor.storage().data() == nullptr) {
    return {};
  }
  int64_t extent = 1;
  for (int64_t d = 0; d < tensor.dim(); ++d) extent += (tensor.size(d) - 1) * tensor.stride(d);
  const auto size = static_cast<uintptr_t>(tensor.element_size());
  const uintptr_t begin = reinterpret_cast<uintptr_t>(tensor.storage().data()) +
                          static_cast<uintptr_t>(tensor.storage_offset()) * size;
  return {begin, begin + static_cast<uintptr_t>(extent) * size, extent == tensor.numel()};
}

// Disjoint ranges of addresses.
class Ranges {
 public:
  bool meet(const Bytes& bytes) const {
    auto next = ranges_.lower_bound(bytes.end);
    return next != ranges_.begin() && std::prev(next)->second > bytes.begin;
  }

  void add(Bytes bytes) {
    if (bytes.begin == bytes.end) return;
    remove(bytes);
    ranges_[bytes.begin] = bytes.end;
  }

  void remove(const Bytes& bytes) {
    if (bytes.begin == bytes.end) return;
    auto next = ranges_.lower_bound(bytes.begin);
    if (next != ranges_.begin()) {
      const auto before = std::prev(next);
      const uintptr_t end = before->second;
      before->second = std::min(end, bytes.begin);
      if (end > bytes.end) ranges_[bytes.end] = end;
    }
    while (next != ranges_.end() && next->first < bytes.end) {
      if (next->second > bytes.end) ranges_[bytes.end] = next->second;
      next = ranges_.erase(next);
    }
  }

 private:
  std::map<uintptr_t, uintptr_t> ranges_;  // begin, end
};

bool overwrites(std::string_view op) {
  constexpr std::array<std::string_view, 5> kOps = {"aten::copy_", "aten::fill_", "aten::zero_",
                                                    "aten::_foreach_copy_", "aten::_foreach_zero_"};
  return std::find(kOps.begin(), kOps.end(), op) != kOps.end();
}

// Operators that look at the shape, dtype and device of an argument only, or at nothing.
bool reads_no_elements(std::string_view op, std::string_view argument) {
  constexpr std::array<std::string_view, 5> kOther = {"aten::to", "aten::type_as", "aten::view_as",
                                                      "aten::expand_as", "aten::reshape_as"};
  const bool other = std::find(kOther.begin(), kOther.end(), op) != kOther.end();
  return op.ends_with("_like") || op.starts_with("aten::new_") || op == "aten::set_" ||
         (other && argument == "other");
}

template <typename Body>
void each_tensor(const c10::IValue& value, Body body) {
  if (value.isTensor()) {
    body(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) body(tensor);
  }
}

struct Call final : at::ObserverContext {
  bool depends = false;
};

}  // namespace

struct OverwriteWatch::State {
  std::vector<at::Tensor> weights;
  Ranges dependent;
  at::CallbackHandle callback = 0;

  bool begin(const at::RecordFunction& function);
  void end(const at::RecordFunction& function, bool depends);
};

namespace {

thread_local std::shared_ptr<OverwriteWatch::State> watching;  // this thread's

std::unique_ptr<at::ObserverContext> operator_begins(const at::RecordFunction& function) {
  auto call = std::make_unique<Call>();
  if (watching) call->depends = watching->begin(function);
  return call;
}

void operator_ends(const at::RecordFunction& function, at::ObserverContext* call) {
  if (watching && call) watching->end(function, static_cast<Call*>(call)->depends);
}

void end_watch() {
  if (watching) at::removeCallback(watching->callback);
  watching = nullptr;
}

}  // namespace

// Whether the results will depend on the weights. Writes into arguments are noted at once.
bool OverwriteWatch::State::begin(const at::RecordFunction& function) {
  const auto schema = function.operator_schema();
  if (!schema) return false;
  const std::string_view op = function.name();
  const c10::ArrayRef<const c10::IValue> inputs = function.inputs();
  const size_t count = std::min(inputs.size(), schema->arguments().size());
  bool depends = false;
  std::vector<std::pair<Bytes, bool>> written;  // and whether it is overwritten
  for (size_t i = 0; i < count; ++i) {
    const c10::Argument& argument = schema->arguments()[i];
    if (reads_no_elements(op, argument.name())) continue;
    const c10::AliasInfo* alias = argument.alias_info();
    const bool writes = alias != nullptr && alias->isWrite();
    const bool whole = writes && (argument.is_out() || overwrites(op));
    each_tensor(inputs[i], [&](const at::Tensor& tensor) {
      const Bytes bytes = bytes_of(tensor);
      if (!whole && dependent.meet(bytes)) depends = true;
      if (writes) written.emplace_back(bytes, whole && bytes.dense);
    });
  }
  for (const auto& [bytes, whole] : written) {
    if (depends) {
      dependent.add(bytes);
    } else if (whole) {
      dependent.remove(bytes);
    }
  }
  return depends;
}

void OverwriteWatch::State::end(const at::RecordFunction& function, bool depends) {
  const auto schema = function.operator_schema();
  if (!schema) return;
  const std::vector<c10::IValue>& outputs = function.outputs();
  const size_t count = std::min(outputs.size(), schema->returns().size());
  for (size_t i = 0; i < count; ++i) {
    if (schema->returns()[i].alias_info() != nullptr) continue;  // memory of an argument
    each_tensor(outputs[i], [&](const at::Tensor& tensor) {
      const Bytes bytes = bytes_of(tensor);
      depends ? dependent.add(bytes) : dependent.remove(bytes);
    });
  }
}

OverwriteWatch::OverwriteWatch(std::vector<at::Tensor> weights)
    : state_(std::make_shared<State>()) {
  state_->weights = std::move(weights);
  for (const at::Tensor& weight : state_->weights) state_->dependent.add(bytes_of(weight));
  end_watch();
  watching = state_;
  state_->callback =
      at::addThreadLocalCallback(at::RecordFunctionCallback(operator_begins, operator_ends)
                                     .needsInputs(true)
                                     .needsOutputs(true)
                                     .scopes({at::RecordScope::FUNCTION}));
}

OverwriteWatch::~OverwriteWatch() {
  if (watching == state_) end_watch();
}

std::vector<size_t> OverwriteWatch::end() {
  const bool whole = watching == state_;
  if (whole) end_watch();
  std::vector<size_t> found;
  for (size_t i = 0; whole && i < state_->weights.size(); ++i) {
    const Bytes bytes = bytes_of(state_->weights[i]);
    if (bytes.begin != bytes.end && !state_->dependent.meet(bytes)) found.push_back(i);
  }
  return found;
}

}  // namespace bagua
