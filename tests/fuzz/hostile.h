// A store and a communicator whose other side may do anything with the bytes it sends.
#pragma once

#include <string>
#include <vector>

#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/check.h"
#include "comm/communicator.h"
#include "op/contract/bucket_op.h"
#include "op/wire/frame.h"
#include "target.h"

namespace bagua::fuzz {

// What Python takes as the text of an exception.
inline bool is_text(const std::string& text) {
  size_t i = 0;
  while (i < text.size()) {
    const auto byte = static_cast<uint8_t>(text[i]);
    const size_t length = byte < 0x80 ? 1 : byte < 0xe0 ? 2 : byte < 0xf0 ? 3 : 4;
    if (byte >= 0x80 && byte < 0xc2) return false;
    for (size_t j = 1; j < length; ++j) {
      if (i + j >= text.size() || static_cast<uint8_t>(text[i + j]) >> 6 != 2) return false;
    }
    i += length;
  }
  return text.size() < 10000;
}

// Answers every question with what comes next in the input.
class HostileStore final : public c10d::Store {
 public:
  explicit HostileStore(Input input) : input_(input) {}

  c10::intrusive_ptr<Store> clone() override { throw std::runtime_error("one is enough"); }
  void set(const std::string&, const std::vector<uint8_t>&) override {}
  std::vector<uint8_t> compareSet(const std::string&, const std::vector<uint8_t>&,
                                  const std::vector<uint8_t>&) override {
    return next();
  }
  std::vector<uint8_t> get(const std::string&) override { return next(); }
  int64_t add(const std::string&, int64_t) override { return input_.take<int64_t>(); }
  bool deleteKey(const std::string&) override { return there(); }
  bool check(const std::vector<std::string>&) override { return there(); }
  int64_t getNumKeys() override { return input_.take<int64_t>(); }
  void wait(const std::vector<std::string>&) override { wait({}, kNoTimeout); }
  void wait(const std::vector<std::string>&, const std::chrono::milliseconds&) override {
    if (!there()) throw std::runtime_error("wait timeout");
  }

 private:
  bool there() { return input_.take<uint8_t>() % 8 != 0; }
  std::vector<uint8_t> next() {
    std::vector<uint8_t> value(input_.take<uint16_t>() % 6000);
    input_.take_into(value.data(), value.size());
    return value;
  }

  Input input_;
};

// Peers send what this rank sends, with changes that the input says.
class HostileCommunicator final : public Communicator {
 public:
  HostileCommunicator(Group group, Input input) : Communicator(group), input_(input) {}

  void all_reduce(at::Tensor& tensor, ReduceOp) override { spoil(tensor); }
  void all_gather(const at::Tensor& input, at::Tensor& output) override {
    output.view({group().size, -1}).copy_(input.view({1, -1}));
    spoil(output);
  }
  void all_to_all(const at::Tensor& input, at::Tensor& output) override {
    output.copy_(input);
    spoil(output);
  }
  void broadcast(at::Tensor& tensor, int) override { spoil(tensor); }
  using Communicator::exchange;
  void exchange(c10::ArrayRef<Send> sends, c10::ArrayRef<Recv> recvs,
                const OnReceived& on_received) override {
    for (size_t i = 0; i < recvs.size(); ++i) {
      at::Tensor received = recvs[i].tensor.view({-1});
      received.zero_();
      if (!sends.empty()) {
        const at::Tensor sent = sends[i % sends.size()].tensor.view({-1});
        const int64_t common = std::min(received.numel(), sent.numel());
        received.narrow(0, 0, common).copy_(sent.narrow(0, 0, common));
      }
      spoil(received);
      on_received(i);
    }
  }
  void abort(const std::string&) noexcept override {}

  // Whether anything has arrived otherwise than it was sent.
  bool changed() const { return changed_; }

 private:
  void spoil(at::Tensor& tensor) {
    auto* bytes = static_cast<uint8_t*>(tensor.data_ptr());
    const auto size = static_cast<int64_t>(tensor.nbytes());
    if (size == 0) return;
    const Bytes before(bytes, bytes + size);
    spoil(bytes, size);
    changed_ = changed_ || std::memcmp(before.data(), bytes, size) != 0;
  }
  void spoil(uint8_t* bytes, int64_t size) {
    const uint8_t what = input_.take<uint8_t>();
    if (what == 0xff) return input_.take_into(bytes, size);
    for (int change = what % 4; change > 0; --change) {
      const int64_t at = input_.up_to(size - 1);
      bytes[at] ^= input_.take<uint8_t>();
    }
  }

  Input input_;
  bool changed_ = false;
};

// Runs an op on messages that arrive changed: it ends, which with a checksum it may not, or says
// that a payload does not match.
inline void run(BucketOp& op, int64_t numel, const HostileCommunicator& communicator,
                Checksum checksum) {
  at::Tensor flat = at::zeros({numel}, at::kFloat);
  for (int64_t i = 0; i < numel; ++i) flat.data_ptr<float>()[i] = static_cast<float>(i % 97) - 48;
  try {
    op.run(flat, {.number = 1, .grad_scale = 1, .bucket = "fuzzed"});
  } catch (const MismatchError&) {
    return;
  }
  FUZZ_REQUIRE(checksum == Checksum::kOff || !communicator.changed());
}

}  // namespace bagua::fuzz
