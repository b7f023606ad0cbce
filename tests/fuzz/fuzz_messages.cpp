// What ranks send each other, and leave for each other in the store: messages of ops, the agreement
// record, the failure board.
#include <cmath>
#include <string>

#include <ATen/Parallel.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include "base/check.h"
#include "codec/factory.h"
#include "comm/shm/message_ring.h"
#include "engine/agreement.h"
#include "health/failure_board.h"
#include "hostile.h"
#include "op/all_reduce_rows.h"
#include "op/compressed_all_reduce.h"
#include "op/compressed_gossip.h"
#include "op/sharded/compressed_all_gather.h"
#include "op/sharded/compressed_reduce_scatter.h"
#include "op/sparse.h"

namespace bagua::fuzz {
namespace {

constexpr int64_t kMostNumel = 3000;
constexpr at::ScalarType kValues[] = {at::kFloat, at::kDouble};

at::Tensor tensor_of(void* data, int64_t numel, at::ScalarType type) {
  return at::from_blob(data, {numel}, at::TensorOptions(type));
}

// Whatever a message holds, it is refused and changes nothing, or adds values at k places.
void sparse_message(Input input) {
  const int64_t numel = 1 + input.up_to(kMostNumel), k = 1 + input.up_to(numel - 1);
  const at::ScalarType type = kValues[input.take<uint8_t>() % 2];
  const SparseMessage layout(numel, k, type);
  const auto bytes = exactly<std::byte>(layout.bytes());
  input.take_into(bytes.get(), layout.bytes());
  const auto element = static_cast<int64_t>(c10::elementSize(type));
  const auto memory = exactly<std::byte>(numel * element);
  std::memset(memory.get(), 0, numel * element);
  const auto chosen = exactly<int32_t>(k);
  at::Tensor sum = tensor_of(memory.get(), numel, type);
  at::Tensor indices = tensor_of(chosen.get(), k, at::kInt);
  bool added = true;
  try {
    layout.add(tensor_of(bytes.get(), layout.bytes(), at::kByte), sum, indices);
  } catch (const Error&) {
    added = false;
  }
  int64_t changed = 0;
  for (int64_t i = 0; i < numel; ++i) {
    bool zero = true;
    for (int64_t j = 0; j < element; ++j) zero = zero && memory[i * element + j] == std::byte{0};
    changed += zero ? 0 : 1;
  }
  FUZZ_REQUIRE(changed <= (added ? k : 0));
}

std::vector<Bytes> sparse_messages() {
  std::vector<Bytes> result;
  for (const int64_t numel : {1, 40, 700, 3000}) {
    for (const int64_t k : {int64_t{1}, numel / 9 + 1, numel / 2 + 1}) {
      for (const uint8_t kind : {0, 1}) {
        const at::ScalarType type = kValues[kind];
        at::Tensor m = at::zeros({numel}, type);
        for (int64_t i = 0; i < numel; ++i) m[i] = static_cast<double>(i * 7919 % 101) - 50;
        const SparseMessage layout(numel, k, type);
        at::Tensor message = at::zeros({layout.bytes()}, at::kByte);
        at::Tensor indices = at::zeros({k}, at::kInt);
        layout.take(m, message, indices);
        result.push_back(Example().up_to(numel - 1).up_to(k - 1).put(kind).put_from(
            message.const_data_ptr(), message.numel()));
      }
    }
  }
  return result;
}

// A round begins exactly if all ranks show the same.
void agreement(Input input) {
  const int size = 2 + input.take<uint8_t>() % 3;
  const auto mine = input.take<AgreementRecord>();
  HostileCommunicator communicator({0, size}, input);
  at::Tensor shown = tensor_of(const_cast<AgreementRecord*>(&mine), sizeof mine, at::kByte);
  at::Tensor seen = at::zeros({size * static_cast<int64_t>(sizeof mine)}, at::kByte);
  HostileCommunicator(communicator.group(), input).all_gather(shown, seen);
  const auto* records = static_cast<const AgreementRecord*>(seen.const_data_ptr());
  bool equal = true, same_weights = true, same_before = true, all_show = true, possible = true;
  for (int rank = 0; rank < size; ++rank) {
    equal = equal && records[rank].fingerprint == records[0].fingerprint &&
            records[rank].round == records[0].round &&
            records[rank].incarnation == records[0].incarnation &&
            records[rank].part == records[0].part && records[rank].frozen == records[0].frozen;
    same_weights = same_weights && records[rank].weights == records[0].weights;
    same_before = same_before && records[rank].weights_before == records[0].weights_before;
    all_show = all_show && records[rank].flags % 2 == 1;
    possible = possible && std::isfinite(records[rank].samples) && records[rank].samples >= 0;
  }
  try {
    const Agreement agreed = agree(communicator, mine);
    FUZZ_REQUIRE(equal && possible &&
                 agreed.equal_weights == (same_weights || same_before || !all_show));
    FUZZ_REQUIRE(agreed.weighing.total >= 0 && agreed.weighing.factor({}) >= 0);
  } catch (const MismatchError&) {
    FUZZ_REQUIRE(!equal || !possible);
  }
}

std::vector<Bytes> agreements() {
  const AgreementRecord record{0x1234567890abcdef, 7, 99, kShowsWeights, 0, 3.0f, 0,
                               0xfedcba9876543210, 5};
  return {Example().put(uint8_t{1}).put(record).put(uint8_t{0}),
          Example().put(uint8_t{1}).put(record).put(uint8_t{0xff}).put(record).put(record)};
}

// The board finds nothing, or a text; it never throws.
void board(Input input) {
  const int rank = input.take<uint8_t>() % 3;
  const auto round = input.take<int64_t>();
  FailureBoard board(c10::make_intrusive<HostileStore>(input), rank, 3);
  const auto failure = board.poll();
  FUZZ_REQUIRE(!failure || is_text(failure->text));
  const auto exited = board.poll_exit(round);
  FUZZ_REQUIRE(!exited || is_text(*exited));
  FUZZ_REQUIRE(!exited || exited->starts_with("rank 0 ") || exited->starts_with("rank 1 ") ||
               exited->starts_with("rank 2 "));
  board.publish("this rank failed", Blame::kThisRank);
  board.publish_exit(round);
}

// Where other ranks are, from what two looks at the store showed: text, whatever was written.
void heartbeat(Input input) {
  const auto round = input.take<int64_t>();
  Snapshot looks[2];
  for (Snapshot& look : looks) {
    for (int rank = 0; rank < 3; ++rank) {
      std::string written(input.up_to(60), ' ');
      input.take_into(written.data(), written.size());
      look.beats.push_back(parse_heartbeat(written));
      const auto& beat = look.beats.back();
      if (beat) {
        for (const SeatPosition& position : beat->positions) {
          FUZZ_REQUIRE(position.where.round >= 0 && is_text(position.where.text) &&
                       is_text(position.head) && is_text(position.seat));
        }
      }
      FUZZ_REQUIRE(!beat || heartbeat_text(*parse_heartbeat(heartbeat_text(*beat))) ==
                                heartbeat_text(*beat));
    }
  }
  const Looker me{.seat = input.take<uint8_t>() % 2 ? "" : "a", .members = {0, 1, 2}, .rank = 0};
  for (const bool everyone : {false, true}) {
    const OtherRanks others =
        where_others_are(looks[0], looks[1], me,
                         {.number = round, .unit = everyone ? "" : "round", .everyone = everyone});
    for (const auto& list : {others.causes, others.failed}) {
      for (const std::string& rank : list) {
        FUZZ_REQUIRE(is_text(rank) && !rank.starts_with("rank 0"));
      }
    }
  }
  const Heartbeat own{.positions = {{.seat = me.seat, .head = "", .where = {round, true, "", 1}},
                                    {.seat = "b", .head = "", .where = {1, false, "", 0, 1}}}};
  const auto reason = never_comes(looks[0], looks[1], me, own);
  FUZZ_REQUIRE(!reason || is_text(*reason));
}

std::vector<Bytes> heartbeats() {
  std::vector<Bytes> result;
  for (const int64_t last_round : {6, 7, 8}) {
    Example example;
    example.put(int64_t{7});
    for (int64_t number = 0; number < 6; ++number) {
      const int64_t at = number < 5 ? 7 : last_round;
      const SeatPosition lane{
          .seat = number == 4 ? "a" : "", .head = "", .where = {at, number % 2 == 0, "computing"}};
      const SeatPosition call{.seat = "b", .head = "call 2 of c", .where = {2, true, "send", 1}};
      const std::string text = heartbeat_text({.number = number, .positions = {lane, call}});
      example.up_to(static_cast<int64_t>(text.size())).put_from(text.data(), text.size());
      if (number % 3 == 2) example.put(uint8_t{0});
    }
    result.push_back(example);
  }
  return result;
}

std::vector<Bytes> boards() {
  std::vector<Bytes> result;
  for (const std::string text :
       {"!1: out of memory", "=0: ranks differ", "2 7 0 12 1 3 ", "1 -1 2 99999999999999 "}) {
    Example example;
    example.put(uint8_t{0}).put(int64_t{20});
    for (int answer = 0; answer < 4; ++answer) {
      example.put(uint8_t{1}).put(static_cast<uint16_t>(text.size()));
      example.put_from(text.data(), text.size());
    }
    result.push_back(example);
  }
  return result;
}

void compressed_op(Input input) {
  static const std::vector<std::string> names = codec_names();
  const int kind = input.take<uint8_t>() % 4;
  const int size = 2 + input.take<uint8_t>() % 3;
  const auto checksum = static_cast<Checksum>(input.take<uint8_t>() % 2);
  const int64_t drawn = input.up_to(kMostNumel);
  const auto codec = make_codec(names[input.take<uint8_t>() % names.size()]);
  const auto communicator = std::make_shared<HostileCommunicator>(Group{1, size}, input);
  const auto scratch = std::make_shared<Scratch>();
  const auto replica = [&] { return at::zeros({drawn}, at::kFloat); };
  const auto run_with = [&](BucketOp& op, int64_t numel) {
    run(op, numel, *communicator, checksum);
  };
  if (kind == 0) {
    CompressedAllReduce op(communicator, codec, scratch, ReduceOp::kAvg, checksum);
    run_with(op, drawn);
  } else if (kind == 1) {
    CompressedGossip op(communicator, codec, scratch, {replica(), replica(), replica()}, {0.3, 0.3},
                        checksum);
    run_with(op, drawn);
  } else if (kind == 2) {
    CompressedReduceScatter op(communicator, codec, scratch, size, nullptr, checksum);
    run_with(op, drawn / size * size);
  } else {
    CompressedAllGather op(communicator, codec, scratch, checksum);
    run_with(op, drawn / size * size);
  }
}

void sparse_op(Input input) {
  const int64_t numel = 1 + input.up_to(kMostNumel), k = 1 + input.up_to(numel - 1);
  const auto checksum = static_cast<Checksum>(input.take<uint8_t>() % 2);
  const auto communicator = std::make_shared<HostileCommunicator>(Group{1, 3}, input);
  const std::vector<at::Tensor> nothing_owed{at::zeros({numel}, at::kFloat),
                                             at::zeros({}, at::kLong)};
  const auto memory = std::make_shared<RoundMemory>(nothing_owed, std::make_shared<RoundOutcome>());
  Sparse op(communicator, std::make_shared<Scratch>(), numel, k, memory,
            {.checksum = checksum, .device = {}});
  run(op, numel, *communicator, checksum);
}

std::vector<Bytes> compressed_ops() {
  std::vector<Bytes> result;
  for (const uint8_t kind : {0, 1, 2, 3}) {
    for (const uint8_t codec : {0, 1, 2, 3}) {
      for (const int64_t numel : {2, 96, 1500, 3000}) {
        for (const uint8_t checksum : {0, 1}) {
          Example example;
          example.put(kind).put(uint8_t{0}).put(checksum).up_to(numel).put(codec);
          for (int message = 0; message < 2; ++message) {
            example.put(uint8_t{1}).up_to(40).put(uint8_t{0xff});
          }
          result.push_back(example);
        }
      }
    }
  }
  return result;
}

std::vector<Bytes> sparse_ops() {
  std::vector<Bytes> result;
  for (const uint8_t checksum : {0, 1}) {
    result.push_back(Example()
                         .up_to(999)
                         .up_to(9)
                         .put(checksum)
                         .put(uint8_t{2})
                         .up_to(40)
                         .put(uint8_t{1})
                         .up_to(200)
                         .put(uint8_t{1}));
    result.push_back(Example().up_to(999).up_to(399).put(checksum).put(uint8_t{0}));
  }
  return result;
}

// Numbers of rows, then indices and values: refused, or added to rows that there are.
void rows_op(Input input) {
  const int64_t rows = 1 + input.up_to(300), width = input.up_to(5);
  const int64_t own = std::min(rows, input.up_to(40));
  const auto communicator = std::make_shared<HostileCommunicator>(Group{1, 3}, input);
  const auto gradient = std::make_shared<SparseGradient>();
  const std::vector<int64_t> sizes{rows, width};
  gradient->local = at::_sparse_coo_tensor_unsafe(
      at::arange(own, at::kLong).view({1, own}), at::ones({own, width}), sizes,
      at::TensorOptions(at::kFloat).layout(at::kSparse), false);
  AllReduceRows op(communicator, std::make_shared<Scratch>(), gradient, sizes, ReduceOp::kSum);
  at::Tensor flat = at::zeros({1});
  try {
    op.run(flat, {.number = 1, .grad_scale = 1, .bucket = "fuzzed"});
  } catch (const MismatchError&) {
    return;
  }
  const at::Tensor indices = gradient->result._indices().view({-1});
  const int64_t count = indices.numel();
  FUZZ_REQUIRE(count <= rows && gradient->result._values().size(0) == count);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t index = indices.data_ptr<int64_t>()[i];
    FUZZ_REQUIRE(index >= 0 && index < rows);
  }
}

std::vector<Bytes> rows_ops() {
  std::vector<Bytes> result;
  for (const uint8_t changes : {0, 1, 3}) {
    result.push_back(
        Example().up_to(99).up_to(4).up_to(7).put(changes).up_to(3).put(uint8_t{2}).put(changes));
  }
  Example announced;  // three numbers of rows
  announced.up_to(99).up_to(4).up_to(2).put(uint8_t{0xff});
  for (const int64_t number : {5, 2, 0}) announced.put(number);
  result.push_back(announced.put(uint8_t{0}));
  return result;
}

constexpr size_t kRingBytes = 1024;

// Whatever the other rank's counters and its ring hold, a message is refused or read into its
// place, and one that is sent stays inside the ring.
void shared_ring(Input input) {
  RankState mine, theirs;
  const auto ring = exactly<std::byte>(kRingBytes);
  const auto bytes = static_cast<uint64_t>(input.up_to(3 * kRingBytes));
  const auto memory = exactly<std::byte>(bytes);
  const bool reads = input.take<uint8_t>() % 2 == 0;
  Moving message{.data = memory.get(), .bytes = bytes, .dtype = at::kByte, .peer = 1};
  RingReader reader(mine, theirs, ring.get(), kRingBytes, 0, 1);
  RingWriter writer(mine, theirs, ring.get(), kRingBytes, 0, 1);
  try {
    for (int step = 0; step < 8 && !message.is_done(); ++step) {
      const auto number = input.take<uint8_t>() % 4 == 0
                              ? input.take<uint64_t>()
                              : static_cast<uint64_t>(input.up_to(4 * kRingBytes));
      if (reads) {
        input.take_into(ring.get(), kRingBytes);
        theirs.channels[0].sent.store(number);
        reader.pull(message);
      } else {
        theirs.channels[0].taken.store(number);
        writer.push(message);
      }
      FUZZ_REQUIRE(message.done <= message.bytes);
    }
  } catch (const Error&) {
    FUZZ_REQUIRE(message.done <= message.bytes);
  }
}

std::vector<Bytes> shared_rings() {
  std::vector<Bytes> result;
  for (const int64_t bytes : {0, 1, 100, 900, 1500, 3000}) {
    Example sent;
    sent.up_to(bytes).put(uint8_t{0});
    for (uint64_t shown = 512; shown <= 2048; shown += 512) {
      const MessageHeader header{.number = 1,
                                 .bytes = static_cast<uint64_t>(bytes),
                                 .dtype = static_cast<int32_t>(at::kByte)};
      std::byte ring[kRingBytes] = {};
      std::memcpy(ring, &header, sizeof header);
      sent.put(uint8_t{1}).up_to(static_cast<int64_t>(shown)).put_from(ring, sizeof ring);
    }
    result.push_back(sent);
    Example taken;
    taken.up_to(bytes).put(uint8_t{1});
    for (int64_t seen = 0; seen < 4; ++seen) taken.put(uint8_t{1}).up_to(512 * seen);
    result.push_back(taken);
  }
  return result;
}

constexpr Target kTargets[] = {
    {"sparse_message", sparse_message, sparse_messages},
    {"agreement", agreement, agreements},
    {"board", board, boards},
    {"heartbeat", heartbeat, heartbeats},
    {"compressed_op", compressed_op, compressed_ops},
    {"sparse_op", sparse_op, sparse_ops},
    {"rows_op", rows_op, rows_ops},
    {"shared_ring", shared_ring, shared_rings},
};

}  // namespace

std::span<const Target> targets() {
  at::set_num_threads(1);
  return kTargets;
}

}  // namespace bagua::fuzz
