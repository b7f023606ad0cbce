// What ranks leave for each other in the store before NCCL connects them.
#include <string>

#include "base/check.h"
#include "comm/nccl/nccl_rendezvous.h"
#include "hostile.h"

namespace bagua::fuzz {
namespace {

// The id that rank 0 handed over, or an Error that can be shown.
void rendezvous(Input input) {
  const NcclLibrary no_library;  // only rank 0 needs one
  NcclRendezvous meeting(c10::make_intrusive<HostileStore>(input), {1, 3},
                         NcclHandle::Clock::now() + std::chrono::milliseconds(5));
  try {
    meeting.hand_over(no_library);
  } catch (const Error& error) {
    FUZZ_REQUIRE(is_text(error.what()));
  }
  const auto reason = meeting.given_up();
  FUZZ_REQUIRE(!reason || is_text(*reason));
  FUZZ_REQUIRE(is_text(meeting.missing()));
}

std::vector<Bytes> meetings() {
  const Bytes id(NCCL_UNIQUE_ID_BYTES, 7);
  const auto handed_over = static_cast<uint16_t>(id.size());
  const std::string reason = "2: no interface";
  return {Example().put(uint8_t{1}).put(handed_over).put_from(id.data(), id.size()),
          Example()
              .put(uint8_t{0})
              .put(uint8_t{1})
              .put(static_cast<uint16_t>(reason.size()))
              .put_from(reason.data(), reason.size())};
}

constexpr Target kTargets[] = {{"rendezvous", rendezvous, meetings}};

}  // namespace

std::span<const Target> targets() { return kTargets; }

}  // namespace bagua::fuzz
