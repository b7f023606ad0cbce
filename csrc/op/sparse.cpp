#include "op/sparse.h"

#include <utility>

#include <c10/core/DeviceGuard.h>

#include "base/check.h"
#include "codec/cuda/chunk_codec_cuda.h"
#include "comm/device_stream.h"

namespace bagua {
namespace {

[[noreturn]] void throw_corrupted(int64_t rank, const std::string& reason, const Round& round) {
  throw MismatchError(concat("bucket '", round.bucket, "': the payload from rank ", rank,
                             " was corrupted on the wire: ", reason));
}

}  // namespace

Sparse::Sparse(std::shared_ptr<Communicator> communicator, std::shared_ptr<Scratch> scratch,
               int64_t numel, int64_t k, std::shared_ptr<RoundMemory> memory, Options options)
    : exchange_(std::move(communicator), options.checksum),
      scratch_(std::move(scratch)),
      k_(k),
      feedback_("Sparse", numel, std::move(memory), scratch_),
      codec_(std::move(options.device)) {
  BAGUA_CHECK_ARG(k <= numel && (k >= 1 || numel == 0), "Sparse: k = ", k,
                  " must be between 1 and the ", numel, " elements of the bucket.");
  if (codec_ || !feedback_.device().is_cuda() || !has_cuda_codecs()) return;
  const c10::DeviceGuard on_device(feedback_.device());
  codec_ = make_cuda_sparse_codec();
}

void Sparse::run(at::Tensor& flat, const Round& round) {
  feedback_.check(flat, round);
  const int ranks = exchange_.group().size;
  // 1.
  at::Tensor m = feedback_.corrected(flat, round);
  at::Tensor sum = feedback_.sum(flat);
  if (m.is_cpu()) sum.zero_();
  if (feedback_.numel() > 0)
    m.is_cpu() ? exchange(m, sum, round) : exchange_on_device(m, sum, round);
  // 5.
  feedback_.finish(flat, sum, ranks, round);
}

uint64_t Sparse::fingerprint(const SparseMessage& layout, const at::Tensor& m,
                             const Round& round) const {
  return frame_fingerprint("sparse " + layout.coding(), static_cast<int>(m.scalar_type()),
                           feedback_.numel(), k_, round.bucket);
}

// Steps 2 to 4 on the CPU.
void Sparse::exchange(at::Tensor& m, at::Tensor& sum, const Round& round) {
  const int64_t ranks = exchange_.group().size;
  const SparseMessage layout(feedback_.numel(), k_, m.scalar_type());
  exchange_.begin(round, /*kernels=*/nullptr);
  at::Tensor message = scratch_->get(Scratch::kSend, layout.bytes(), at::kByte, at::kCPU);
  at::Tensor messages =
      scratch_->get(Scratch::kReceive, ranks * layout.bytes(), at::kByte, at::kCPU);
  at::Tensor indices = scratch_->get(Scratch::kIndices, k_, at::kInt, at::kCPU);
  // 2.
  layout.take(m, message, indices);
  // 3.
  exchange_.all_gather(fingerprint(layout, m, round), message, messages, round);
  // 4.
  const at::Tensor rows = messages.view({ranks, layout.bytes()});
  for (int64_t rank = 0; rank < ranks; ++rank) {
    try {
      layout.add(rows.select(0, rank), sum, indices);
    } catch (const Error& error) {
      throw_corrupted(rank, error.what(), round);
    }
  }
}

// The same on a device, whose codec adds all messages at once.
void Sparse::exchange_on_device(at::Tensor& m, at::Tensor& sum, const Round& round) {
  const int64_t ranks = exchange_.group().size;
  const at::Device device = m.device();
  const SparseMessage layout(feedback_.numel(), k_, m.scalar_type());
  const SparseShape& shape = layout.shape();
  if (!codec_) codec_ = make_cuda_sparse_codec();
  exchange_.begin(round, &codec_->frames());
  check_earlier(layout, round);
  at::Tensor message = scratch_->get(Scratch::kSend, layout.bytes(), at::kByte, device);
  at::Tensor messages = scratch_->get(Scratch::kReceive, ranks * layout.bytes(), at::kByte, device);
  at::Tensor faults = scratch_->get(Scratch::kIndices, ranks, at::kInt, device);
  at::Tensor work =
      scratch_->get(Scratch::kCodec, codec_->scratch_bytes(shape, ranks), at::kByte, device);
  const auto bytes_of = [](at::Tensor& memory) {
    return static_cast<std::byte*>(memory.mutable_data_ptr());
  };
  const StreamHandle stream = current_stream_handle(device);
  // 2.
  codec_->take(shape, m.mutable_data_ptr(), bytes_of(message) + kFrameBytes, bytes_of(work),
               stream);
  // 3.
  exchange_.all_gather(fingerprint(layout, m, round), message, messages, round);
  // 4.
  const SparseMessages of_ranks{bytes_of(messages) + kFrameBytes, layout.bytes(), ranks};
  codec_->add(shape, of_ranks, sum.mutable_data_ptr(), faults.mutable_data_ptr<int32_t>(),
              bytes_of(work), stream);
  faults_.fetch(faults);
}

void Sparse::check_earlier(const SparseMessage& layout, const Round& round) {
  for (const at::Tensor& faults : faults_.take()) {
    for (int64_t rank = 0; rank < faults.numel(); ++rank) {
      if (faults[rank].item<int32_t>() != 0) throw_corrupted(rank, layout.bad_indices(), round);
    }
  }
}

std::string Sparse::describe() const {
  return concat("Sparse(", k_, " of ", feedback_.numel(), ", ranks ", exchange_.group().size,
                feedback_.remembers() ? "" : ", no error feedback",
                checksum_text(exchange_.checksum()), ")");
}

}  // namespace bagua
