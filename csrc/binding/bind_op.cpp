// Ops: complete at construction, run by an engine (or directly, in tests and eager calls).
#include <optional>

#include "base/check.h"
#include "binding/bindings.h"
#include "binding/comm_hook_op.h"
#include "binding/python_op.h"
#include "ledger/round_memory.h"
#include "op/all_reduce.h"
#include "op/all_reduce_rows.h"
#include "op/average_weights.h"
#include "op/compressed_all_reduce.h"
#include "op/compressed_gossip.h"
#include "op/gossip.h"
#include "op/hierarchical.h"
#include "op/low_rank.h"
#include "op/neighbor_average.h"
#include "op/sampled.h"
#include "op/sharded/compressed_all_gather.h"
#include "op/sharded/compressed_reduce_scatter.h"
#include "op/sharded/sharded_hierarchical.h"
#include "op/tensors/all_finite.h"
#include "op/tensors/low_rank_products.h"
#include "op/update_momentum.h"
#include "op/wire/bucket_parts.h"
#include "op/wire/device_frames.h"
#include "op/wire/frame.h"

namespace bagua {

namespace py = pybind11;

namespace {

std::optional<at::Tensor> or_none(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

void bind_ledger(py::module_& m) {
  py::class_<Scratch, std::shared_ptr<Scratch>>(m, "Scratch").def(py::init<>());

  py::class_<RoundOutcome, std::shared_ptr<RoundOutcome>>(m, "RoundOutcome")
      .def(py::init<>())
      .def(
          "leave", [](RoundOutcome& outcome, int64_t round) { outcome.leave(round, {}); },
          py::arg("round"), "For a memory that takes no part in the round.")
      .def_property_readonly("newest", &RoundOutcome::newest);

  py::class_<RoundMemory, std::shared_ptr<RoundMemory>>(m, "RoundMemory")
      .def(py::init<std::vector<at::Tensor>, std::shared_ptr<RoundOutcome>>(), py::arg("initial"),
           py::arg("outcome"))
      .def("value", [](RoundMemory& memory, size_t i) { return memory.value(i).detach(); })
      .def("next", [](RoundMemory& memory, size_t i) { return memory.next(i).detach(); })
      .def(
          "leave",
          [](RoundMemory& memory, int64_t round, bool finite) {
            memory.leave(round, {.here = finite, .there = {}});
          },
          py::arg("step"), py::arg("finite"))
      .def("set", &RoundMemory::set, py::arg("i"), py::arg("value"));
}

void bind_bucket_op(py::module_& m) {
  py::class_<BucketOp, std::shared_ptr<BucketOp>>(m, "BucketOp")
      .def("describe", &BucketOp::describe)
      .def(
          "run",
          [](BucketOp& op, at::Tensor flat, int64_t step, float grad_scale,
             const std::string& bucket) {
            op.run(flat, {.number = step, .grad_scale = grad_scale, .bucket = bucket});
          },
          py::arg("flat"), py::arg("step") = 1, py::arg("grad_scale") = 1.0f,
          py::arg("bucket") = "eager", py::call_guard<py::gil_scoped_release>());

  m.def("all_finite", &all_finite, py::arg("tensor"), py::call_guard<py::gil_scoped_release>(),
        "Whether a tensor holds neither NaN nor infinity.");

  py::class_<Sampled, BucketOp, std::shared_ptr<Sampled>>(m, "Sampled")
      .def(py::init<std::shared_ptr<BucketOp>>(), py::arg("inner"))
      .def("request", &Sampled::request, py::arg("places"))
      .def(
          "take",
          [](Sampled& op) -> std::optional<std::tuple<at::Tensor, at::Tensor, float>> {
            std::optional<BucketSample> sample = op.take();
            if (!sample) return std::nullopt;
            return std::make_tuple(sample->before, sample->after, sample->grad_scale);
          },
          "(elements before the op, after it, the round's grad_scale), once.");
}

void bind_all_reduce(py::module_& m) {
  py::class_<AllReduce, BucketOp, std::shared_ptr<AllReduce>>(m, "AllReduce")
      .def(py::init<std::shared_ptr<Communicator>, ReduceOp>(), py::arg("communicator"),
           py::arg("op"))
      .def(py::init<std::shared_ptr<Communicator>, ReduceOp, const at::Tensor&>(),
           py::arg("communicator"), py::arg("op"), py::arg("flat"), ReleaseGil(),
           "For this bucket only, whose memory ranks of one host then share. All ranks construct "
           "it.");

  py::class_<SparseGradient, std::shared_ptr<SparseGradient>>(m, "SparseGradient")
      .def(py::init<>())
      .def_property(
          "local", [](const SparseGradient& gradient) { return or_none(gradient.local); },
          [](SparseGradient& gradient, std::optional<at::Tensor> local) {
            gradient.local = local.value_or(at::Tensor());
          })
      .def_property_readonly(
          "result", [](const SparseGradient& gradient) { return or_none(gradient.result); });

  py::class_<AllReduceRows, BucketOp, std::shared_ptr<AllReduceRows>>(m, "AllReduceRows")
      .def(py::init<std::shared_ptr<Communicator>, std::shared_ptr<Scratch>,
                    std::shared_ptr<SparseGradient>, std::vector<int64_t>, ReduceOp>(),
           py::arg("communicator"), py::arg("scratch"), py::arg("gradient"), py::arg("sizes"),
           py::arg("op"));

  py::class_<CompressedAllReduce, BucketOp, std::shared_ptr<CompressedAllReduce>>(
      m, "CompressedAllReduce")
      .def(py::init([](std::shared_ptr<Communicator> communicator, std::shared_ptr<Codec> codec,
                       std::shared_ptr<Scratch> scratch, ReduceOp op, bool checksum,
                       std::shared_ptr<RoundMemory> memory, int64_t padding,
                       std::shared_ptr<Communicator> shards) {
             std::optional<TwoResiduals> residuals;
             if (memory) residuals = {std::move(memory), padding, std::move(shards)};
             return std::make_shared<CompressedAllReduce>(std::move(communicator), std::move(codec),
                                                          std::move(scratch), op,
                                                          checksum_if(checksum), residuals);
           }),
           py::arg("communicator"), py::arg("codec"), py::arg("scratch"), py::arg("op"),
           py::kw_only(), py::arg("checksum") = false, py::arg("memory").none(true) = py::none(),
           py::arg("padding") = 0, py::arg("shards").none(true) = py::none(),
           "shards: of ranks whose buckets are other shards of the same gradients.");

  m.def("part_stride", &part_stride, py::arg("numel"), py::arg("parts"),
        "Elements between the parts into which ranks cut a bucket.");
}

void bind_hierarchical(py::module_& m) {
  py::class_<ShardedHierarchical, BucketOp, std::shared_ptr<ShardedHierarchical>>(
      m, "ShardedHierarchical", "inner: by share; None for those of other ranks of the node.")
      .def(
          py::init([](std::shared_ptr<Communicator> node,
                      std::vector<std::shared_ptr<BucketOp>> inner,
                      std::shared_ptr<Scratch> scratch, int ranks, int nodes, ReduceOp op,
                      const std::string& device) {
            const c10::Device on(device);
            const c10::OptionalDeviceGuard guard(on.has_index() ? std::optional(on) : std::nullopt);
            return std::make_shared<ShardedHierarchical>(
                std::move(node), std::move(inner), std::move(scratch),
                NodeShare{.ranks = ranks, .nodes = nodes, .op = op},
                on.is_cuda() ? make_cuda_plain_sum() : nullptr);
          }),
          py::arg("node"), py::arg("inner"), py::arg("scratch"), py::arg("ranks"), py::arg("nodes"),
          py::arg("op"), py::arg("device") = "cpu",
          "device: of the buckets; kernels are loaded there.");

  py::class_<CompressedReduceScatter, BucketOp, std::shared_ptr<CompressedReduceScatter>>(
      m, "CompressedReduceScatter", "Afterwards part `rank` of the bucket has the result.")
      .def(py::init([](std::shared_ptr<Communicator> communicator, std::shared_ptr<Codec> codec,
                       std::shared_ptr<Scratch> scratch, double divisor,
                       std::shared_ptr<RoundMemory> memory, bool checksum) {
             return std::make_shared<CompressedReduceScatter>(
                 std::move(communicator), std::move(codec), std::move(scratch), divisor,
                 std::move(memory), checksum_if(checksum));
           }),
           py::arg("communicator"), py::arg("codec"), py::arg("scratch"), py::kw_only(),
           py::arg("divisor"), py::arg("memory").none(true) = py::none(),
           py::arg("checksum") = false);

  py::class_<CompressedAllGather, BucketOp, std::shared_ptr<CompressedAllGather>>(
      m, "CompressedAllGather", "Before it part `rank` of the bucket is what this rank brings.")
      .def(py::init([](std::shared_ptr<Communicator> communicator, std::shared_ptr<Codec> codec,
                       std::shared_ptr<Scratch> scratch, bool checksum) {
             return std::make_shared<CompressedAllGather>(std::move(communicator), std::move(codec),
                                                          std::move(scratch),
                                                          checksum_if(checksum));
           }),
           py::arg("communicator"), py::arg("codec"), py::arg("scratch"), py::kw_only(),
           py::arg("checksum") = false);

  py::class_<Hierarchical, BucketOp, std::shared_ptr<Hierarchical>>(m, "Hierarchical")
      .def(
          py::init([](std::shared_ptr<Communicator> node, std::shared_ptr<BucketOp> inner,
                      int ranks, int nodes, ReduceOp op, std::shared_ptr<Codec> codec,
                      std::shared_ptr<Scratch> scratch) {
            std::optional<ResultPayloads> payloads;
            if (codec) payloads = {std::move(codec), std::move(scratch)};
            return std::make_shared<Hierarchical>(
                std::move(node), std::move(inner),
                NodeShare{.ranks = ranks, .nodes = nodes, .op = op}, std::move(payloads));
          }),
          py::arg("node"), py::arg("inner").none(true), py::arg("ranks"), py::arg("nodes"),
          py::arg("op"), py::arg("codec").none(true) = py::none(),
          py::arg("scratch").none(true) = py::none(),
          "codec, scratch: of an inner op whose payloads have its whole result; they travel in the "
          "node.");
}

void bind_decentralized(py::module_& m) {
  py::class_<AverageWeights, BucketOp, std::shared_ptr<AverageWeights>>(m, "AverageWeights")
      .def(py::init<at::Tensor, at::Tensor, std::shared_ptr<BucketOp>>(), py::arg("peer_weight"),
           py::arg("communications"), py::arg("inner"));

  m.def(
      "shift_one_peer", &shift_one_peer, py::arg("rank"), py::arg("size"), py::arg("step"),
      "The mutual partner of rank at step (0, 1, ...); rank itself when it sits out (odd sizes).");

  py::class_<Gossip, BucketOp, std::shared_ptr<Gossip>>(m, "Gossip")
      .def(py::init<std::shared_ptr<Communicator>, at::Tensor, std::vector<int>,
                    std::shared_ptr<Scratch>>(),
           py::arg("communicator"), py::arg("communications"), py::arg("weights"),
           py::arg("scratch"));

  py::class_<NeighborAverage, BucketOp, std::shared_ptr<NeighborAverage>>(m, "NeighborAverage")
      .def(py::init([](std::shared_ptr<Communicator> communicator, double own_weight,
                       const std::vector<std::pair<int, double>>& neighbors,
                       std::shared_ptr<Scratch> scratch) {
             std::vector<MixingTerm> terms;
             for (const auto& [rank, weight] : neighbors) terms.push_back({rank, weight});
             return std::make_shared<NeighborAverage>(std::move(communicator), own_weight,
                                                      std::move(terms), std::move(scratch));
           }),
           py::arg("communicator"), py::arg("own_weight"), py::arg("neighbors"),
           py::arg("scratch"));

  py::class_<CompressedGossip, BucketOp, std::shared_ptr<CompressedGossip>>(m, "CompressedGossip")
      .def(py::init([](std::shared_ptr<Communicator> communicator, std::shared_ptr<Codec> codec,
                       std::shared_ptr<Scratch> scratch, at::Tensor weight,
                       at::Tensor left_peer_weight, at::Tensor right_peer_weight, double mix_left,
                       double mix_right, bool checksum) {
             return std::make_shared<CompressedGossip>(
                 std::move(communicator), std::move(codec), std::move(scratch),
                 Replicas{.own = std::move(weight),
                          .left = std::move(left_peer_weight),
                          .right = std::move(right_peer_weight)},
                 MixingWeights{.left = mix_left, .right = mix_right}, checksum_if(checksum));
           }),
           py::arg("communicator"), py::arg("codec"), py::arg("scratch"), py::arg("weight"),
           py::arg("left_peer_weight"), py::arg("right_peer_weight"), py::arg("mix_left"),
           py::arg("mix_right"), py::kw_only(), py::arg("checksum") = false);
}

void bind_momentum_and_low_rank(py::module_& m) {
  py::class_<UpdateMomentum, BucketOp, std::shared_ptr<UpdateMomentum>>(m, "UpdateMomentum")
      .def(py::init([](const std::vector<at::Tensor>& memories, const std::vector<int64_t>& offsets,
                       const std::vector<std::vector<int64_t>>& strides, at::Tensor betas,
                       std::shared_ptr<Scratch> scratch) {
             BAGUA_CHECK_ARG(memories.size() == offsets.size() && offsets.size() == strides.size(),
                             "UpdateMomentum: one memory, offset and strides per slot.");
             std::vector<SlotMomentum> slots;
             for (size_t i = 0; i < memories.size(); ++i) {
               slots.push_back({memories[i], offsets[i], strides[i]});
             }
             return std::make_shared<UpdateMomentum>(std::move(slots), std::move(betas),
                                                     std::move(scratch));
           }),
           py::arg("memories"), py::arg("offsets"), py::arg("strides"), py::arg("betas"),
           py::arg("scratch"));

  py::class_<LowRank, BucketOp, std::shared_ptr<LowRank>>(m, "LowRank")
      .def(py::init([](std::shared_ptr<Communicator> communicator, std::shared_ptr<Scratch> scratch,
                       int64_t numel, const std::vector<std::array<int64_t, 4>>& matrices,
                       bool warm_start, bool error_feedback, uint64_t seed,
                       std::shared_ptr<RoundMemory> memory) {
             std::vector<LowRankMatrix> placed;
             for (const auto& [offset, rows, columns, rank] : matrices) {
               placed.push_back({offset, rows, columns, rank});
             }
             return std::make_shared<LowRank>(
                 std::move(communicator), std::move(scratch), numel, placed,
                 LowRankOptions{
                     .warm_start = warm_start, .error_feedback = error_feedback, .seed = seed},
                 std::move(memory));
           }),
           py::arg("communicator"), py::arg("scratch"), py::arg("numel"), py::arg("matrices"),
           py::kw_only(), py::arg("warm_start"), py::arg("error_feedback"), py::arg("seed"),
           py::arg("memory"));
}

void bind_python_ops(py::module_& m) {
  py::class_<PythonOp, BucketOp, std::shared_ptr<PythonOp>>(m, "PythonOp")
      .def(py::init<const py::function&>(), py::arg("function"));

  py::class_<CommHookOp, BucketOp, std::shared_ptr<CommHookOp>>(m, "CommHookOp")
      .def(py::init([](py::function hook, py::object state, size_t index, size_t count,
                       std::vector<at::Tensor> parameters, std::vector<size_t> offsets) {
             return std::make_shared<CommHookOp>(
                 std::move(hook), std::move(state),
                 HookedBucket{index, count, std::move(parameters), std::move(offsets)});
           }),
           py::arg("hook"), py::arg("state"), py::kw_only(), py::arg("index"), py::arg("count"),
           py::arg("parameters"), py::arg("offsets"));
}

}  // namespace

void bind_op(py::module_& m) {
  m.attr("FRAME_BYTES") = kFrameBytes;
  bind_ledger(m);
  bind_bucket_op(m);
  bind_all_reduce(m);
  bind_hierarchical(m);
  bind_decentralized(m);
  bind_momentum_and_low_rank(m);
  bind_python_ops(m);
}

}  // namespace bagua
