#include "op/sparse.h"

#include <utility>

#include <ATen/ops/empty.h>

#include "base/check.h"
#include "op/wire/message_frames.h"

namespace bagua {

Sparse::Sparse(std::shared_ptr<Communicator> communicator, std::shared_ptr<Scratch> scratch,
               int64_t numel, int64_t k, std::shared_ptr<RoundMemory> memory, Checksum checksum)
    : communicator_(std::move(communicator)),
      scratch_(std::move(scratch)),
      k_(k),
      feedback_("Sparse", numel, std::move(memory), scratch_),
      checksum_(checksum) {
  BAGUA_CHECK_ARG(k <= numel && (k >= 1 || numel == 0), "Sparse: k = ", k,
                  " must be between 1 and the ", numel, " elements of the bucket.");
}

void Sparse::run(at::Tensor& flat, const Round& round) {
  feedback_.check(flat, round);
  const int ranks = communicator_->group().size;
  // 1.
  at::Tensor m = feedback_.corrected(flat, round);
  at::Tensor sum = feedback_.zeroed_sum(flat);
  if (feedback_.numel() > 0) exchange(m, sum, round);
  // 5.
  feedback_.finish(flat, sum, ranks, round);
}

// Steps 2 to 4.
void Sparse::exchange(at::Tensor& m, at::Tensor& sum, const Round& round) {
  const int64_t ranks = communicator_->group().size, numel = feedback_.numel();
  const SparseMessage layout(numel, k_, m.scalar_type(), m.device());
  const Frame frame{
      .fingerprint = frame_fingerprint("sparse " + layout.coding(),
                                       static_cast<int>(m.scalar_type()), numel, k_, round.bucket),
      .step = static_cast<uint64_t>(round.step),
      .payload_bytes = static_cast<uint64_t>(layout.bytes() - kFrameBytes),
      .checksum = checksum_};
  at::Tensor message = scratch_->get(Scratch::kSend, layout.bytes(), at::kByte, m.device());
  at::Tensor messages =
      scratch_->get(Scratch::kReceive, ranks * layout.bytes(), at::kByte, m.device());
  at::Tensor indices = scratch_->get(Scratch::kIndices, k_, at::kInt, at::kCPU);
  // 2.
  layout.take(m, message, indices);
  write_head(frame, message);
  // 3.
  communicator_->all_gather(message, messages);
  // 4.
  const at::Tensor rows = messages.view({ranks, layout.bytes()});
  check_heads(frame, rows, round);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    try {
      layout.add(rows.select(0, rank), sum, indices);
    } catch (const Error& error) {
      throw MismatchError(concat("bucket '", round.bucket, "': the payload from rank ", rank,
                                 " was corrupted on the wire: ", error.what()));
    }
  }
}

void Sparse::write_head(const Frame& frame, at::Tensor& message) const {
  if (message.is_cpu()) return write_frame(frame, static_cast<std::byte*>(message.data_ptr()));
  at::Tensor head = at::empty({kFrameBytes}, at::kByte);
  write_frame(frame, checksum_of(message), static_cast<std::byte*>(head.mutable_data_ptr()));
  message.narrow(0, 0, kFrameBytes).copy_(head);
}

// All of them, before anything is added.
void Sparse::check_heads(const Frame& frame, const at::Tensor& rows, const Round& round) const {
  const bool on_cpu = rows.is_cpu();
  const at::Tensor heads = on_cpu ? rows : rows.narrow(1, 0, kFrameBytes).cpu().contiguous();
  for (int64_t row = 0; row < rows.size(0); ++row) {
    const auto* head = static_cast<const std::byte*>(heads.select(0, row).const_data_ptr());
    const int rank = static_cast<int>(row);
    if (on_cpu) {
      check_frame(head, frame, rank, round.bucket);
    } else {
      check_frame(head, frame, checksum_of(rows.select(0, row)), rank, round.bucket);
    }
  }
}

// On a device; 0 where nobody looks at it.
uint64_t Sparse::checksum_of(const at::Tensor& message) const {
  if (checksum_ == Checksum::kOff) return 0;
  const int64_t bytes = message.numel() - kFrameBytes;
  return checksum_on_device(message.narrow(0, kFrameBytes, bytes)).item<int64_t>();
}

std::string Sparse::describe() const {
  return concat("Sparse(", k_, " of ", feedback_.numel(), ", ranks ", communicator_->group().size,
                feedback_.remembers() ? "" : ", no error feedback", checksum_text(checksum_), ")");
}

}  // namespace bagua
