#include "engine/weights_sample.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sum.h>
#include <ATen/record_function.h>
#include <c10/core/Event.h>

#include "base/check.h"
#include "base/mixed_bits.h"
#include "comm/device_stream.h"
#include "comm/host_memory.h"
#include "engine/all_records.h"
#include "engine/tensor_hash.h"

namespace bagua {
namespace {

// Elements of a device that are hashed at once: bounds the memory to a few times eight bytes of it.
constexpr int64_t kChunk = 1 << 20;
constexpr int64_t kChunkFactor = 6364136223846793005;  // odd: multiplying by it loses nothing
constexpr uint64_t kUnreadable = 1;

at::ScalarType integer_of(int64_t bytes) {
  switch (bytes) {
    case 1:
      return at::kChar;
    case 2:
      return at::kShort;
    case 4:
      return at::kInt;
    default:
      return at::kLong;
  }
}

// "ranks 0, 2 against rank 1": who holds which version.
std::string camps(const std::vector<uint64_t>& versions) {
  std::vector<std::pair<uint64_t, std::vector<size_t>>> all;
  for (size_t rank = 0; rank < versions.size(); ++rank) {
    const auto known = std::find_if(all.begin(), all.end(),
                                    [&](const auto& c) { return c.first == versions[rank]; });
    if (known != all.end()) {
      known->second.push_back(rank);
    } else {
      all.push_back({versions[rank], {rank}});
    }
  }
  std::string text;
  for (const auto& [version, ranks] : all) {
    text += concat(text.empty() ? "" : " against ", ranks.size() > 1 ? "ranks " : "rank ");
    for (size_t i = 0; i < ranks.size(); ++i) text += concat(i ? ", " : "", ranks[i]);
  }
  return text;
}

}  // namespace

uint64_t combined(const std::vector<uint64_t>& parts) {
  uint64_t result = parts.size();
  for (const uint64_t part : parts) result = mixed_bits(result) + part;
  return result;
}

struct WeightsSample::InFlight {
  InFlight(at::Device device, int64_t most)
      : hashes(at::empty({2, most}, at::TensorOptions(at::kLong).device(device))),
        host(host_memory({2, most}, at::kLong, device)),
        copied(device.type()) {}
  int64_t round = 0;  // 0: none
  bool early = false;
  at::Tensor hashes;  // as the round began, and as take_early() found them
  at::Tensor host;
  c10::Event copied;
};

WeightsSample::WeightsSample(std::vector<std::pair<std::string, at::Tensor>> weights,
                             int64_t every) {
  BAGUA_CHECK_ARG(every > 0, "a sample of the weights needs a number of rounds above 0.");
  for (auto& [name, tensor] : weights) {
    if (total_ == 0) device_ = tensor.device();
    BAGUA_CHECK_ARG(tensor.device() == device_, "weight '", name, "' is on ", tensor.device().str(),
                    ", others are on ", device_.str(), ".");
    if (tensor.numel() == 0) continue;
    entries_.push_back({std::move(name), tensor, tensor.scalar_type(), total_, tensor.numel()});
    total_ += tensor.numel();
  }
  BAGUA_CHECK_ARG(total_ > 0, "a sample of the weights needs weights.");
  window_ = std::min(total_, std::max(kLeastElements, (total_ + every - 1) / every));
  if (device_.is_cpu()) return;
  std::vector<int64_t> factors(std::min(window_, kChunk));
  for (size_t i = 0; i < factors.size(); ++i) factors[i] = static_cast<int64_t>(mixed_bits(i) | 1);
  at::Tensor host = at::empty({static_cast<int64_t>(factors.size())}, at::kLong);
  std::memcpy(host.data_ptr(), factors.data(), factors.size() * sizeof(int64_t));
  factors_ = host.to(device_);
  size_t most = 0;
  for (int64_t i = 0; i < windows(); ++i) most = std::max(most, pieces_of(i).size());
  for (int i = 0; i < kDelay; ++i) {
    flight_.push_back(std::make_unique<InFlight>(device_, static_cast<int64_t>(most)));
  }
}

WeightsSample::~WeightsSample() = default;

size_t WeightsSample::first_of(int64_t round) const {
  const int64_t begin = round % windows() * window_;
  const auto after = std::upper_bound(entries_.begin(), entries_.end(), begin,
                                      [](int64_t at, const Entry& e) { return at < e.begin; });
  return static_cast<size_t>(after - entries_.begin()) - 1;
}

std::vector<WeightsSample::Piece> WeightsSample::pieces_of(int64_t round) const {
  const int64_t begin = round % windows() * window_;
  const int64_t end = std::min(total_, begin + window_);
  std::vector<Piece> pieces;
  for (size_t i = first_of(round); i < entries_.size() && entries_[i].begin < end; ++i) {
    const Entry& entry = entries_[i];
    const int64_t from = std::max<int64_t>(0, begin - entry.begin);
    pieces.push_back({entry, from, std::min(entry.numel, end - entry.begin) - from});
  }
  return pieces;
}

std::vector<std::string> WeightsSample::describe() const {
  std::vector<std::string> lines{concat("weights compared in windows of ", window_)};
  for (const Entry& entry : entries_) {
    lines.push_back(concat("weight ", entry.name, ": ", entry.numel, " elements"));
  }
  return lines;
}

bool WeightsSample::readable(const Entry& entry) const {
  const at::Tensor& tensor = entry.tensor;
  if (tensor.layout() != at::kStrided || !tensor.has_storage() ||
      tensor.unsafeGetTensorImpl()->is_python_dispatch() || tensor.device() != device_ ||
      tensor.scalar_type() != entry.dtype || tensor.numel() != entry.numel) {
    return false;
  }
  const size_t needed = at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), tensor.element_size(), tensor.storage_offset());
  return tensor.storage().nbytes() >= needed;
}

std::vector<uint64_t> WeightsSample::hash_now(int64_t round) const {
  std::vector<uint64_t> parts;
  for (const Piece& piece : pieces_of(round)) {
    parts.push_back(readable(piece.entry) ? tensor_hash(piece.entry.tensor, piece.from, piece.count)
                                          : kUnreadable);
  }
  return parts;
}

void WeightsSample::take_early(int64_t round) {
  if (early_round_ == round) return;
  RECORD_FUNCTION("bagua::sample_weights", {});
  early_round_ = round;
  if (device_.is_cpu()) {
    early_parts_ = hash_now(round);
  } else {
    enqueue_hashes(round, flight_[static_cast<size_t>(round % kDelay)]->hashes.select(0, 1));
  }
}

std::optional<WeightsDigest> WeightsSample::take(int64_t round) {
  RECORD_FUNCTION("bagua::sample_weights", {});
  if (!device_.is_cpu()) return on_device(round);
  WeightsDigest digest{
      .round = round, .first = first_of(round), .parts = hash_now(round), .early_parts = {}};
  if (early_round_ == round) digest.early_parts = std::move(early_parts_);
  return digest;
}

// The sum of all elements' bits, each times an odd number that depends on its place.
void WeightsSample::enqueue_hash(const Piece& piece, at::Tensor& result) const {
  const at::Tensor& tensor = piece.entry.tensor;
  if (!readable(piece.entry)) {
    result.fill_(static_cast<int64_t>(kUnreadable));
    return;
  }
  const at::Tensor part = tensor.detach().reshape({-1}).narrow(0, piece.from, piece.count);
  const at::Tensor bits = part.view(integer_of(static_cast<int64_t>(part.element_size())));
  const int64_t chunk = factors_.numel();
  for (int64_t done = 0; done < bits.numel(); done += chunk) {
    const int64_t count = std::min(chunk, bits.numel() - done);
    const at::Tensor products = at::mul(bits.narrow(0, done, count), factors_.narrow(0, 0, count));
    if (done == 0) {
      at::sum_out(result, products);
    } else {
      result.mul_(kChunkFactor).add_(at::sum(products));
    }
  }
}

void WeightsSample::enqueue_hashes(int64_t round, const at::Tensor& results) const {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  int64_t i = 0;
  for (const Piece& piece : pieces_of(round)) {
    at::Tensor result = results.select(0, i++);
    enqueue_hash(piece, result);
  }
}

std::optional<WeightsDigest> WeightsSample::on_device(int64_t round) {
  InFlight& flight = *flight_[static_cast<size_t>(round % kDelay)];
  std::optional<WeightsDigest> earlier;
  if (flight.round > 0 && flight.round == round - kDelay && flight.copied.query()) {
    const auto* hashes = static_cast<const int64_t*>(flight.host.const_data_ptr());
    const auto* early = hashes + flight.host.size(1);
    const size_t count = pieces_of(flight.round).size();
    earlier = {.round = flight.round,
               .first = first_of(flight.round),
               .parts = {hashes, hashes + count},
               .early_parts = {early, early + (flight.early ? count : 0)}};
  }
  enqueue_hashes(round, flight.hashes.select(0, 0));
  flight.host.copy_(flight.hashes, /*non_blocking=*/true);
  flight.copied.record(current_stream(device_));
  flight.round = round;
  flight.early = early_round_ == round;
  return earlier;
}

void WeightsSample::name_difference(Communicator& communicator, const WeightsDigest& mine) const {
  const size_t count = mine.parts.size();
  const int size = communicator.group().size;
  const std::vector<uint64_t> all = all_records<uint64_t>(communicator, mine.parts);
  std::string first;
  int others = 0;
  for (size_t i = 0; i < count; ++i) {
    std::vector<uint64_t> versions;
    for (int rank = 0; rank < size; ++rank) versions.push_back(all[rank * count + i]);
    if (std::count(versions.begin(), versions.end(), versions[0]) == size) continue;
    if (!first.empty()) {
      ++others;
      continue;
    }
    first =
        concat("First difference: '", entries_[mine.first + i].name, "' (", camps(versions), ")");
  }
  if (others > 0) first += concat("; ", others, " more of ", count, " differ too");
  const std::string since =
      mine.round > windows()
          ? concat("Since these were compared last, ", windows(), " round(s) before, ")
          : std::string("They differed at the wrap already (init_sync=False), or since then ");
  throw MismatchError(concat(
      "ranks hold different weights at the start of round ", mine.round, ". ", first, ". ", since,
      "something changed them on some ranks only: one backward more on a rank than on another (an "
      "extra forward, or the last backward before step() inside no_sync()), step() on some ranks "
      "only, another scale of a GradScaler, different learning rates, an assignment outside of the "
      "optimizer, or an optimizer that was not given to bagua.wrap or "
      "DistributedDataParallel(optimizers=...), so that its state differs. Ranks with other kinds "
      "of processors or numbers of threads may round differently. Each round "
      "compares a part of the weights; BAGUA_CHECK_WEIGHTS_EVERY=0 turns that off."));
}

}  // namespace bagua
