#include "op/outer/chunked_sparse.h"

#include <utility>

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/mul.h>

#include "base/check.h"
#include "base/per_instruction_set.h"
#include "ledger/communications.h"
#include "op/tensors/all_finite.h"

namespace bagua {
namespace {

// 1.
BAGUA_PER_INSTRUCTION_SET void correct(const float* g, const float* e, float decay, float* p,
                                       int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) p[i] = decay * e[i] + g[i];
}

BAGUA_PER_INSTRUCTION_SET void correct(const double* g, const double* e, double decay, double* p,
                                       int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) p[i] = decay * e[i] + g[i];
}

}  // namespace

ChunkedSparse::ChunkedSparse(std::shared_ptr<Communicator> communicator,
                             std::shared_ptr<Scratch> scratch, ChunkedSparseRule rule,
                             std::shared_ptr<RoundMemory> memory, Checksum checksum)
    : exchange_(std::move(communicator), checksum),
      scratch_(std::move(scratch)),
      rule_(rule),
      layout_(rule.numel, rule.k),
      feedback_(memory, 0) {
  BAGUA_CHECK_ARG(rule.decay >= 0 && rule.decay <= 1, "ChunkedSparse: decay = ", rule.decay,
                  " must be from 0 to 1.");
  BAGUA_CHECK_ARG(memory && memory->size() == 2 && memory->value(0).dim() == 1 &&
                      memory->value(0).is_cpu() && memory->value(0).numel() >= rule.numel &&
                      (memory->value(0).scalar_type() == at::kFloat ||
                       memory->value(0).scalar_type() == at::kDouble),
                  "ChunkedSparse remembers two tensors: a residual of float32 or float64 on the "
                  "CPU, of at least ",
                  rule.numel, " elements, and the number of communications.");
  check_communications(memory->value(1), "ChunkedSparse");
}

void ChunkedSparse::run(at::Tensor& flat, const Round& round) {
  check(flat, round);
  if (exchange_.group().size == 1) {
    add_residual(flat, at::mul(feedback_.residual(), rule_.decay), 1.0f);
    feedback_.kept().zero_();
  } else {
    exchange(flat, round);
  }
  feedback_.leave(round.number, finite_of(flat));
}

void ChunkedSparse::exchange(at::Tensor& flat, const Round& round) {
  const int64_t ranks = exchange_.group().size, chunks = layout_.chunks();
  const int64_t padding = flat.numel() - rule_.numel;
  const at::Tensor& e = feedback_.residual();
  at::Tensor& p = feedback_.kept();
  const uint64_t fingerprint = frame_fingerprint(
      "chunked sparse", static_cast<int>(flat.scalar_type()), rule_.numel, rule_.k, round.bucket);
  exchange_.begin(round, /*kernels=*/nullptr);
  at::Tensor message = scratch_->get(Scratch::kSend, layout_.bytes(), at::kByte, at::kCPU);
  at::Tensor messages =
      scratch_->get(Scratch::kReceive, ranks * layout_.bytes(), at::kByte, at::kCPU);
  auto* const own = static_cast<std::byte*>(message.data_ptr());
  AT_DISPATCH_FLOATING_TYPES(flat.scalar_type(), "chunked sparse", [&] {
    const auto* g = flat.const_data_ptr<scalar_t>();
    const auto* before = e.const_data_ptr<scalar_t>();
    auto* corrected = p.mutable_data_ptr<scalar_t>();
    // 1. and 2., while a chunk is in cache
    at::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        const int64_t first = chunk * kSparseChunkNumel;
        const int64_t numel = std::min(kSparseChunkNumel, rule_.numel - first);
        correct(g + first, before + first, static_cast<scalar_t>(rule_.decay), corrected + first,
                numel);
        layout_.take(chunk, corrected, own);
      }
    });
  });
  layout_.write_padding(own);
  p.narrow(0, rule_.numel, padding).zero_();
  // 3.
  exchange_.all_gather(fingerprint, message, messages, round);
  // 4. and 5.
  flat.zero_();
  const auto* received = static_cast<const std::byte*>(messages.const_data_ptr());
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const std::byte* const theirs = received + rank * layout_.bytes();
    try {
      AT_DISPATCH_FLOATING_TYPES(flat.scalar_type(), "chunked sparse", [&] {
        auto* sum = flat.mutable_data_ptr<scalar_t>();
        at::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
          for (int64_t chunk = begin; chunk < end; ++chunk) layout_.add(chunk, theirs, sum);
        });
      });
    } catch (const Error& error) {
      throw MismatchError(concat("bucket '", round.bucket, "': the payload from rank ", rank,
                                 " was corrupted on the wire: ", error.what()));
    }
  }
  flat.div_(ranks);
}

void ChunkedSparse::check(const at::Tensor& flat, const Round& round) {
  const at::Tensor& e = feedback_.residual();
  BAGUA_CHECK_ARG(flat.is_cpu() && flat.numel() == e.numel() &&
                      flat.scalar_type() == e.scalar_type() && round.grad_scale == 1.0f,
                  "bucket '", round.bucket, "' (", flat.numel(), " elements of ", flat.toString(),
                  ", scale ", round.grad_scale, ") does not fit the residual that is remembered ",
                  "for it (", e.numel(), " elements of ", e.toString(), ", scale 1).");
}

std::string ChunkedSparse::describe() const {
  return concat("ChunkedSparse(", rule_.k, " of each ", kSparseChunkNumel, " of ", rule_.numel,
                ", decay ", rule_.decay, ", ranks ", exchange_.group().size,
                checksum_text(exchange_.checksum()), ")");
}

}  // namespace bagua
