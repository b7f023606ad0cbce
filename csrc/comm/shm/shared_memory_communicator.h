// Ranks of one host, over memory that they share.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/call_site.h"
#include "comm/communicator.h"
#include "comm/refusal.h"
#include "comm/shm/layout.h"
#include "comm/shm/meetings.h"
#include "comm/shm/message_ring.h"
#include "comm/shm/peer_waits.h"
#include "comm/shm/reduction.h"
#include "comm/shm/shared_group.h"

namespace bagua {

// A group of ranks over the memory of share_memory(); CPU tensors.
//
// Contracts of Communicator, and:
// - all_reduce joins the values in rank order and rounds to the dtype after each step (kAvg divides
//   each rank's values first), so results can be computed bit by bit elsewhere.
// - Sizes, dtypes, roots or operations that differ between ranks throw MismatchError, in a
//   collective on all ranks; a rank waiting in exchange for one that waits in a collective throws
//   TimeoutError.
// - A failed call throws TransportError or TimeoutError, "rank r of n: <call> of <bytes> bytes
//   <dtype> with peer p failed: <reason>". A wait ends when nothing has come for the timeout, when
//   the awaited rank's process has ended, and when that rank has left, failed or was aborted.
// - abort() ends a call in flight, here and on the ranks that wait for this one.
// - Messages without elements are not sent.
// - After fork a child's calls throw, and its copy does nothing when it is destroyed.
//
// Note [Numbers of other ranks]
// Lengths, counters and descriptions that another rank writes are copied out of the shared memory
// and then compared with what they must be. No place in memory is computed from them, so a rank
// that damages its memory causes an error, wrong values or a time-out, and nothing else. Only the
// bells are written by all.
class SharedMemoryCommunicator final : public Communicator {
 public:
  SharedMemoryCommunicator(Group group, SharedGroup shared, std::chrono::milliseconds timeout);
  ~SharedMemoryCommunicator() override;

  void all_reduce(at::Tensor& tensor, ReduceOp op) override;
  void all_gather(const at::Tensor& input, at::Tensor& output) override;
  void all_to_all(const at::Tensor& input, at::Tensor& output) override;
  void broadcast(at::Tensor& tensor, int root) override;
  using Communicator::exchange;
  void exchange(c10::ArrayRef<Send> sends, c10::ArrayRef<Recv> recvs,
                const OnReceived& on_received) override;
  bool shares_memory() const override { return true; }
  std::shared_ptr<SharedBucket> share(const at::Tensor& tensor) override;
  void abort(const std::string& reason) noexcept override;

 private:
  class Bucket;

  template <typename Body>
  void guarded(const CallSite& site, Body body);
  void give_up() noexcept;

  bool reduces_whole(const CallSite& site) const;
  void reduce_whole(const CallSite& site, const at::Tensor& values, ReduceOp op);
  void reduce_in_pieces(const CallSite& site, const at::Tensor& values, ReduceOp op);
  void show_values(const BucketPiece& piece, uint64_t number);
  void join_part(const BucketPiece& piece, uint64_t number, at::ScalarType dtype, ReduceOp op);
  void copy_results(const BucketPiece& piece, uint64_t number);
  bool all_can(bool can);
  void hand_over(const SharedMemory& memory);
  std::vector<std::shared_ptr<SharedMemory>> take_over(const std::shared_ptr<SharedMemory>& own);

  RankState& mine() { return shared_.state(group().rank); }
  std::byte* half(int rank) const { return half(rank, halves_used_); }
  std::byte* half(int rank, uint64_t number) const;
  void end_half() { ++halves_used_; }

  const int process_;  // pid
  const SharedGroup shared_;
  Refusal refusal_;
  const PeerWaits waits_;
  Meetings meetings_;
  std::vector<RingWriter> writers_;  // by rank
  std::vector<RingReader> readers_;  // by rank
  uint64_t halves_used_ = 0;         // parity: the half that is free
  uint32_t buckets_ = 0;             // that are or were shared
  bool can_share_ = true;            // no bucket's memory lies half handed over in a socket
};

}  // namespace bagua
