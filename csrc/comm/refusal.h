// Refusal of all calls after the first failure.
#pragma once

#include <atomic>
#include <mutex>
#include <string>

#include "comm/call_site.h"
#include "comm/communicator.h"

namespace bagua {

// Thread safety: all methods.
class Refusal final {
 public:
  explicit Refusal(Group group) : group_(group) {}

  // Throws Error, "rank r of n: <call> refused: <reason>", once there is a reason.
  void check(const char* call) const;

  // The first reason stays.
  void refuse(const std::string& reason) noexcept;
  void refuse_after(const std::string& failure) noexcept {
    refuse(concat("an earlier call failed (", failure, ")"));
  }

  bool is_set() const { return refuses_.load(std::memory_order_acquire); }
  std::string reason() const;

  // "rank r of n: <call> of <bytes> bytes <dtype> with peer p failed: <what>"
  std::string failure_text(const CallSite& site, const std::string& what) const;

 private:
  const Group group_;
  std::atomic<bool> refuses_{false};
  mutable std::mutex mutex_;  // of reason_: an abort comes from another thread
  std::string reason_;
};

}  // namespace bagua
