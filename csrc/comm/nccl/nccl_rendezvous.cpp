#include "comm/nccl/nccl_rendezvous.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>
#include <vector>

#include "base/check.h"
#include "health/error_text.h"
#include "health/sanitize.h"

namespace bagua {
namespace {

constexpr const char* kIdKey = "id";
constexpr const char* kFailedKey = "failed";

std::string here_key(int rank) { return concat("here/", rank); }

}  // namespace

NcclRendezvous::NcclRendezvous(c10::intrusive_ptr<c10d::Store> store, Group group,
                               NcclHandle::Clock::time_point deadline)
    : store_(std::move(store)), group_(group), deadline_(deadline) {}

ncclUniqueId NcclRendezvous::hand_over(const NcclLibrary& library) {
  const std::string what =
      concat("rank ", group_.rank, " of ", group_.size, ": connecting through NCCL failed: ");
  try {
    store_->set(here_key(group_.rank), std::string("1"));
    return group_.rank == 0 ? make(library) : wait_for_id();
  } catch (const Error& error) {
    give_up(error.what());
    throw Error(what + error.what());
  } catch (const std::exception& error) {
    const std::string message =
        concat(what, group_.rank == 0 ? "the store did not take" : "rank 0 has not handed over",
               " the id of the group: ", short_text(error));
    if (NcclHandle::Clock::now() >= deadline_) throw TimeoutError(message);
    throw Error(message);
  }
}

ncclUniqueId NcclRendezvous::make(const NcclLibrary& library) {
  ncclUniqueId id{};
  const ncclResult_t result = library.functions->get_unique_id(&id);
  BAGUA_CHECK(result == ncclSuccess, "NCCL ", library.version,
              " makes no id for the group: ", library.functions->get_error_string(result),
              ". Set NCCL_SOCKET_IFNAME to the interface that the ranks share.");
  store_->set(kIdKey, std::vector<uint8_t>(id.internal, id.internal + sizeof(id.internal)));
  return id;
}

// Not one long wait: rank 0 may have given up. A wait that ends early is a store that does not
// work.
ncclUniqueId NcclRendezvous::wait_for_id() {
  using std::chrono::milliseconds;
  while (true) {
    const auto start = NcclHandle::Clock::now();
    const auto left = std::chrono::duration_cast<milliseconds>(deadline_ - start);
    const auto length = std::clamp(left, milliseconds{1}, milliseconds{1000});
    try {
      store_->wait({kIdKey}, length);
      break;
    } catch (const std::exception&) {
      if (const auto reason = given_up()) throw Error(*reason);
      const auto now = NcclHandle::Clock::now();
      if (now >= deadline_ || now - start < length / 2) throw;
    }
  }
  const std::vector<uint8_t> bytes = store_->get(kIdKey);
  ncclUniqueId id{};
  BAGUA_CHECK(bytes.size() == sizeof(id.internal), "the store has ", bytes.size(),
              " bytes for the id of the group instead of ", sizeof(id.internal),
              ": give each group a separate prefix");
  std::memcpy(id.internal, bytes.data(), bytes.size());
  return id;
}

void NcclRendezvous::give_up(const std::string& reason) noexcept {
  try {
    store_->compareSet(kFailedKey, "", concat(group_.rank, ": ", reason));
  } catch (const std::exception&) {  // the others will find out by their timeout
    return;
  }
}

std::optional<std::string> NcclRendezvous::given_up() noexcept {
  try {
    if (!store_->check({kFailedKey})) return std::nullopt;
    return "another rank gave up, rank " + sanitize_untrusted(store_->get_to_str(kFailedKey));
  } catch (const std::exception&) {  // a store that does not answer knows nothing
    return std::nullopt;
  }
}

std::string NcclRendezvous::missing() noexcept {
  try {
    std::string absent;
    for (int rank = 0; rank < group_.size; ++rank) {
      if (store_->check({here_key(rank)})) continue;
      absent += concat(absent.empty() ? "missing: rank " : ", ", rank);
    }
    if (!absent.empty()) return absent;
  } catch (const std::exception&) {
    return "the store does not answer";
  }
  return "all ranks have come and NCCL does not connect them: check that NCCL_SOCKET_IFNAME names "
         "the interface they share, and look at NCCL_DEBUG=INFO";
}

}  // namespace bagua
