#include "op/sparse.h"

#include <utility>
#include <vector>

#include <ATen/ops/stack.h>

#include "base/check.h"

namespace bagua {
namespace {

[[noreturn]] void throw_corrupted(int64_t rank, const std::string& reason, const Round& round) {
  throw MismatchError(concat("bucket '", round.bucket, "': the payload from rank ", rank,
                             " was corrupted on the wire: ", reason));
}

}  // namespace

Sparse::Sparse(std::shared_ptr<Communicator> communicator, std::shared_ptr<Scratch> scratch,
               int64_t numel, int64_t k, std::shared_ptr<RoundMemory> memory, Checksum checksum)
    : exchange_(std::move(communicator), checksum),
      scratch_(std::move(scratch)),
      k_(k),
      feedback_("Sparse", numel, std::move(memory), scratch_) {
  BAGUA_CHECK_ARG(k <= numel && (k >= 1 || numel == 0), "Sparse: k = ", k,
                  " must be between 1 and the ", numel, " elements of the bucket.");
}

void Sparse::run(at::Tensor& flat, const Round& round) {
  feedback_.check(flat, round);
  const int ranks = exchange_.group().size;
  // 1.
  at::Tensor m = feedback_.corrected(flat, round);
  at::Tensor sum = feedback_.zeroed_sum(flat);
  if (feedback_.numel() > 0) exchange(m, sum, round);
  // 5.
  feedback_.finish(flat, sum, ranks, round);
}

// Steps 2 to 4.
void Sparse::exchange(at::Tensor& m, at::Tensor& sum, const Round& round) {
  const int64_t ranks = exchange_.group().size, numel = feedback_.numel();
  const SparseMessage layout(numel, k_, m.scalar_type(), m.device());
  const uint64_t fingerprint = frame_fingerprint(
      "sparse " + layout.coding(), static_cast<int>(m.scalar_type()), numel, k_, round.bucket);
  exchange_.begin(round);
  check_earlier(layout, round);
  at::Tensor message = scratch_->get(Scratch::kSend, layout.bytes(), at::kByte, m.device());
  at::Tensor messages =
      scratch_->get(Scratch::kReceive, ranks * layout.bytes(), at::kByte, m.device());
  at::Tensor indices = scratch_->get(Scratch::kIndices, k_, at::kInt, at::kCPU);
  // 2.
  layout.take(m, message, indices);
  // 3.
  exchange_.all_gather(fingerprint, message, messages, round);
  // 4.
  const at::Tensor rows = messages.view({ranks, layout.bytes()});
  std::vector<at::Tensor> well;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    try {
      well.push_back(layout.add(rows.select(0, rank), sum, indices));
    } catch (const Error& error) {
      throw_corrupted(rank, error.what(), round);
    }
  }
  if (!m.is_cpu()) well_.fetch(at::stack(well));
}

void Sparse::check_earlier(const SparseMessage& layout, const Round& round) {
  for (const at::Tensor& well : well_.take()) {
    for (int64_t rank = 0; rank < well.numel(); ++rank) {
      if (!well[rank].item<bool>()) throw_corrupted(rank, layout.bad_indices(), round);
    }
  }
}

std::string Sparse::describe() const {
  return concat("Sparse(", k_, " of ", feedback_.numel(), ", ranks ", exchange_.group().size,
                feedback_.remembers() ? "" : ", no error feedback",
                checksum_text(exchange_.checksum()), ")");
}

}  // namespace bagua
