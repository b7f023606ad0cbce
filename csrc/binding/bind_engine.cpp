// The engine and the path from autograd to it. Every call that can block releases the GIL.
#include <exception>
#include <optional>
#include <string>

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "base/check.h"
#include "base/drop.h"
#include "binding/bindings.h"
#include "binding/interruptible.h"
#include "engine/engine.h"
#include "engine/gradient_path.h"
#include "engine/weights_sample.h"

namespace bagua {

namespace py = pybind11;

namespace {

// A Python callable that C++ may call and drop on any thread.
template <typename... Args>
std::function<void(Args...)> with_gil(const std::optional<py::function>& function) {
  if (!function) return nullptr;
  return [owned = shared_with_gil(*function)](Args... args) {
    py::gil_scoped_acquire gil;
    (*owned)(args...);
  };
}

}  // namespace

py::dict traffic_dict(const Traffic& traffic) {
  py::dict dict;
  dict["bytes_sent"] = traffic.bytes_sent;
  dict["bytes_received"] = traffic.bytes_received;
  dict["messages_sent"] = traffic.messages_sent;
  dict["messages_received"] = traffic.messages_received;
  dict["shm_bytes"] = traffic.shm_bytes;
  dict["wire_ns"] = traffic.wire_ns;
  return dict;
}

py::dict stats_dict(const EngineStats& stats) {
  py::list buckets;
  for (const BucketStats& bucket : stats.buckets) {
    py::dict dict = traffic_dict(bucket.traffic);
    dict["name"] = bucket.name;
    dict["ops"] = bucket.ops;
    dict["bytes"] = bucket.bytes;
    dict["rounds"] = bucket.rounds;
    dict["encode_ns"] = bucket.busy_ns - bucket.traffic.wire_ns;
    dict["busy_ns"] = bucket.busy_ns;
    dict["waiting_ns"] = bucket.waiting_ns;
    dict["hidden_ns"] = bucket.hidden_ns;
    dict["nonfinite_rounds"] = bucket.nonfinite_rounds;
    buckets.append(dict);
  }
  py::dict dict;
  dict["buckets"] = buckets;
  dict["control"] = traffic_dict(stats.control);
  dict["rounds"] = stats.rounds;
  dict["busy_ns"] = stats.busy_ns;
  dict["hidden_ns"] = stats.hidden_ns;
  dict["exposed_ns"] = stats.exposed_ns;
  dict["longest_wait_ns"] = stats.longest_wait_ns;
  return dict;
}

namespace {

void bind_plan(py::module_& m) {
  py::enum_<Adopt>(m, "Adopt")
      .value("NONE", Adopt::kNone)
      .value("GRAD_VIEW", Adopt::kGradView)
      .value("GRAD_COPY", Adopt::kGradCopy)
      .value("SPARSE", Adopt::kSparse);

  py::class_<Slot>(m, "Slot")
      .def(
          py::init([](std::string name, int64_t offset, std::vector<int64_t> sizes,
                      std::vector<int64_t> strides, Adopt adopt,
                      std::optional<at::Tensor> parameter, std::shared_ptr<SparseGradient> sparse) {
            return Slot{std::move(name),    offset, std::move(sizes),
                        std::move(strides), adopt,  parameter.value_or(at::Tensor()),
                        std::move(sparse)};
          }),
          py::arg("name"), py::arg("offset"), py::arg("sizes"), py::arg("strides"),
          py::arg("adopt"), py::arg("parameter") = py::none(),
          py::arg("sparse").none(true) = py::none())
      .def_readonly("name", &Slot::name)
      .def_readonly("offset", &Slot::offset);

  py::class_<Bucket>(m, "Bucket")
      .def(py::init([](std::string name, at::Tensor flat, std::vector<Slot> slots,
                       std::vector<std::shared_ptr<BucketOp>> ops, double adopt_scale,
                       int32_t part) {
             Bucket bucket{std::move(name), std::move(flat), std::move(slots),
                           std::move(ops),  adopt_scale,     part};
             bucket.check();
             return bucket;
           }),
           py::arg("name"), py::arg("flat"), py::arg("slots"), py::arg("ops"),
           py::arg("adopt_scale") = 1.0, py::arg("part") = 0);

  py::class_<Lane>(m, "Lane").def(
      py::init([](std::vector<Bucket> buckets,
                  std::vector<std::shared_ptr<CountingCommunicator>> communicators) {
        return Lane{std::move(buckets), std::move(communicators)};
      }),
      py::arg("buckets"), py::arg("communicators"));
}

void bind_weights_sample(py::module_& m) {
  py::class_<WeightsSample, std::shared_ptr<WeightsSample>>(m, "WeightsSample")
      .def(py::init<std::vector<std::pair<std::string, at::Tensor>>, int64_t>(), py::arg("named"),
           py::arg("every"))
      .def(
          "take",
          [](WeightsSample& sample,
             int64_t round) -> std::optional<std::tuple<int64_t, size_t, std::vector<uint64_t>>> {
            const auto digest = sample.take(round);
            if (!digest) return std::nullopt;
            return std::make_tuple(digest->round, digest->first, digest->parts);
          },
          py::arg("round"), ReleaseGil())
      .def(
          "take_ns",
          [](WeightsSample& sample, int64_t round) {
            const int64_t begin = now_ns();
            sample.take(round);
            return now_ns() - begin;
          },
          py::arg("round"), ReleaseGil(), "Nanoseconds that take() needs; for benchmarks.")
      .def("describe", &WeightsSample::describe)
      .def_property_readonly("windows", &WeightsSample::windows);
}

void bind_rounds(py::module_& m) {
  py::class_<Engine, std::shared_ptr<Engine>>(m, "Engine")
      .def(py::init([](std::vector<Lane> lanes, std::string name, uint64_t fingerprint,
                       uint64_t incarnation, double timeout_s,
                       std::shared_ptr<CountingCommunicator> control,
                       std::shared_ptr<FailureBoard> board, double straggler_after_s,
                       std::optional<py::function> on_straggler,
                       std::shared_ptr<WeightsSample> weights, std::shared_ptr<ManualClock> clock) {
             EngineOptions options{
                 .name = std::move(name),
                 .fingerprint = fingerprint,
                 .incarnation = incarnation,
                 .timeout = to_milliseconds(timeout_s),
                 .control = std::move(control),
                 .board = std::move(board),
                 .stragglers = {.after = to_milliseconds(straggler_after_s),
                                .report = with_gil<const std::string&>(on_straggler)},
                 .weights = std::move(weights),
                 .check_signals = check_signals};
             if (clock) options.stragglers.clock = std::move(clock);
             return std::shared_ptr<Engine>(new Engine(std::move(lanes), std::move(options)),
                                            delete_without_gil<Engine>);
           }),
           py::arg("lanes"), py::kw_only(), py::arg("name"), py::arg("fingerprint"),
           py::arg("incarnation"), py::arg("timeout_s"), py::arg("control"),
           py::arg("board").none(true) = py::none(), py::arg("straggler_after_s") = 0.0,
           py::arg("on_straggler").none(true) = py::none(),
           py::arg("weights").none(true) = py::none(), py::arg("clock").none(true) = py::none())
      .def(
          "begin_round",
          [](Engine& engine, float grad_scale, uint64_t frozen, bool has_inputs,
             std::optional<int32_t> part, std::optional<float> samples, bool samples_later) {
            engine.begin_round({.grad_scale = grad_scale,
                                .frozen = frozen,
                                .has_inputs = has_inputs,
                                .part = part,
                                .samples = samples_of(samples),
                                .samples_later = samples_later});
          },
          py::arg("grad_scale") = 1.0f, py::kw_only(), py::arg("frozen") = 0,
          py::arg("has_inputs") = true, py::arg("part") = py::none(),
          py::arg("samples") = py::none(), py::arg("samples_later") = false, ReleaseGil())
      .def("note_forward", &Engine::note_forward, ReleaseGil())
      .def("await_agreement", &Engine::await_agreement, ReleaseGil())
      .def("mark_ready", &Engine::mark_ready, py::arg("slot"), ReleaseGil())
      .def("mark_all", &Engine::mark_all, ReleaseGil())
      .def("marked", &Engine::marked, py::arg("slot"), ReleaseGil())
      .def("exchange_used", &Engine::exchange_used, py::arg("used"), ReleaseGil())
      .def("wait", &Engine::wait, ReleaseGil())
      .def("settle", &Engine::settle, ReleaseGil())
      .def("fail", &Engine::fail, py::arg("reason"), py::arg("timed_out"), ReleaseGil())
      .def("abort", &Engine::abort, py::arg("reason"), ReleaseGil())
      .def("stop", &Engine::stop, py::arg("agreed") = false, ReleaseGil())
      .def_property_readonly("round", &Engine::round)
      .def_property_readonly("round_open", &Engine::round_open)
      .def_property_readonly("weight", &Engine::weight)
      .def_property_readonly("slots", &Engine::slots)
      .def_property_readonly("used", [](const Engine& engine) { return engine.used(); })
      .def("stats", [](const Engine& engine) { return stats_dict(engine.stats()); });
}

void bind_gradient_path(py::module_& m) {
  py::class_<GradientPath, std::shared_ptr<GradientPath>>(m, "GradientPath")
      .def(py::init([](std::shared_ptr<Engine> engine, bool install_hooks, bool find_unused,
                       bool static_graph, std::vector<std::pair<std::string, at::Tensor>> weights,
                       std::optional<py::function> open_round,
                       std::optional<py::function> before_backward,
                       std::optional<py::function> after_backward,
                       std::optional<py::function> after_gradients,
                       std::optional<py::function> on_unused,
                       std::optional<py::function> on_past_wrapper) {
             return GradientPath::make(
                 std::move(engine),
                 {.install_hooks = install_hooks,
                  .find_unused = find_unused,
                  .static_graph = static_graph,
                  .weights = std::move(weights),
                  .open_round = with_gil<>(open_round),
                  .before_backward = with_gil<>(before_backward),
                  .after_backward = with_gil<>(after_backward),
                  .after_gradients = with_gil<>(after_gradients),
                  .on_unused = with_gil<const std::vector<std::string>&>(on_unused),
                  .on_past_wrapper = with_gil<const std::string&>(on_past_wrapper),
                  .on_error = as_core_error()});
           }),
           py::arg("engine"), py::kw_only(), py::arg("install_hooks"), py::arg("find_unused"),
           py::arg("static_graph") = false,
           py::arg("weights") = std::vector<std::pair<std::string, at::Tensor>>(),
           py::arg("open_round").none(true) = py::none(),
           py::arg("before_backward").none(true) = py::none(),
           py::arg("after_backward").none(true) = py::none(),
           py::arg("after_gradients").none(true) = py::none(),
           py::arg("on_unused").none(true) = py::none(),
           py::arg("on_past_wrapper").none(true) = py::none())
      .def("begin_forward", &GradientPath::begin_forward, py::arg("communicates"), ReleaseGil())
      .def(
          "begin_round",
          [](GradientPath& path, float grad_scale, double result_scale,
             std::optional<float> samples) {
            path.begin_round(grad_scale, result_scale, samples_of(samples));
          },
          py::arg("grad_scale") = 1.0f, py::arg("result_scale") = 1.0,
          py::arg("samples") = py::none(), ReleaseGil())
      .def("watch", &GradientPath::watch, py::arg("outputs"))
      .def_property_readonly("in_backward", &GradientPath::in_backward)
      .def_property_readonly("communicating", &GradientPath::communicating)
      .def("adopt", &GradientPath::adopt, py::arg("slot"), ReleaseGil())
      .def("answer_with_zeros", &GradientPath::answer_with_zeros, ReleaseGil())
      .def("remove_hooks", &GradientPath::remove_hooks);
}

}  // namespace

void bind_engine(py::module_& m) {
  bind_plan(m);
  bind_weights_sample(m);
  bind_rounds(m);
  bind_gradient_path(m);

  m.def("end_drops", &end_drops, ReleaseGil());
}

}  // namespace bagua
