// A sentence for ranks whose store does not answer.
#pragma once

namespace bagua {

inline constexpr const char* kStoreIsSilent =
    "The job's store does not answer: the process that has it (torchrun's agent, or else rank 0, "
    "at MASTER_ADDR) was killed or stopped, or is cut off. A rank that is named below may wait for "
    "that one too.";

}  // namespace bagua
