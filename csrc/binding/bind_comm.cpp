// Communicators and the failure board for Python.

#include <chrono>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include "base/drop.h"
#include "base/own_sockets.h"
#include "binding/bindings.h"
#include "binding/interruptible.h"
#include "comm/c10d_communicator.h"
#include "comm/collective_watch.h"
#include "comm/communicator.h"
#include "comm/counting_communicator.h"
#include "comm/gathering.h"
#include "comm/host_communicator.h"
#include "comm/shm/shared_memory_communicator.h"
#include "comm/thread_communicator.h"
#include "health/board.h"
#include "health/diagnose.h"
#include "health/failure.h"
#include "health/failure_board.h"
#include "health/sanitize.h"

namespace py = pybind11;

namespace bagua {
namespace {

using AnyRank = std::shared_ptr<Communicator>;

// Runs a call that may wait for other ranks. One that was left refuses all further calls, and so
// does the communicator. A call on tensors of a device waits for none, and uses the current stream.
template <typename Call>
void call(const AnyRank& self, bool on_cpu, Call call) {
  if (!on_cpu || self->group().size == 1) {
    const py::gil_scoped_release no_gil;
    return call();
  }
  try {
    run_interruptibly(call);
  } catch (const py::error_already_set&) {
    self->abort(concat("rank ", self->group().rank, " was interrupted in a call"));
    throw;
  }
}

void all_reduce(const AnyRank& self, at::Tensor tensor, ReduceOp op) {
  call(self, tensor.is_cpu(), [=]() mutable { self->all_reduce(tensor, op); });
}

void all_gather(const AnyRank& self, const at::Tensor& input, at::Tensor output) {
  call(self, input.is_cpu(), [=]() mutable { self->all_gather(input, output); });
}

void all_to_all(const AnyRank& self, const at::Tensor& input, at::Tensor output) {
  call(self, input.is_cpu(), [=]() mutable { self->all_to_all(input, output); });
}

void broadcast(const AnyRank& self, at::Tensor tensor, int root) {
  call(self, tensor.is_cpu(), [=]() mutable { self->broadcast(tensor, root); });
}

void expect(const AnyRank& self, const std::vector<std::pair<at::Tensor, int>>& recvs) {
  std::vector<Recv> all;
  for (const auto& [tensor, peer] : recvs) all.push_back({tensor, peer});
  call(self, false, [=] { self->expect(all); });
}

void exchange(const AnyRank& self, const std::vector<std::pair<at::Tensor, int>>& sends,
              const std::vector<std::pair<at::Tensor, int>>& recvs) {
  std::vector<Send> all_sends;
  for (const auto& [tensor, peer] : sends) all_sends.push_back({tensor, peer});
  std::vector<Recv> all_recvs;
  for (const auto& [tensor, peer] : recvs) all_recvs.push_back({tensor, peer});
  const std::vector<std::pair<at::Tensor, int>>& any = sends.empty() ? recvs : sends;
  call(self, !any.empty() && any[0].first.is_cpu(), [=] { self->exchange(all_sends, all_recvs); });
}

void bind_communicator(py::module_& m) {
  py::enum_<ReduceOp>(m, "ReduceOp")
      .value("SUM", ReduceOp::kSum)
      .value("AVG", ReduceOp::kAvg)
      .value("MIN", ReduceOp::kMin)
      .value("MAX", ReduceOp::kMax);

  py::class_<Communicator, std::shared_ptr<Communicator>>(m, "Communicator")
      .def_property_readonly("rank", [](const Communicator& self) { return self.group().rank; })
      .def_property_readonly("size", [](const Communicator& self) { return self.group().size; })
      .def("all_reduce", &all_reduce, py::arg("tensor"), py::arg("op"))
      .def("all_gather", &all_gather, py::arg("input"), py::arg("output"))
      .def("all_to_all", &all_to_all, py::arg("input"), py::arg("output"))
      .def("broadcast", &broadcast, py::arg("tensor"), py::arg("root"))
      .def("exchange", &exchange, py::arg("sends"), py::arg("recvs"))
      .def("expect", &expect, py::arg("recvs"))
      .def_property_readonly("shares_memory", &Communicator::shares_memory)
      .def("shorten_paths", &Communicator::shorten_paths)
      .def("abort", &Communicator::abort, py::arg("reason"), ReleaseGil());

  m.attr("MOST_RANKS_TOLD_DIRECTLY") = kMostToldDirectly;
  py::class_<C10dCommunicator, Communicator, std::shared_ptr<C10dCommunicator>>(m,
                                                                                "C10dCommunicator")
      .def(py::init([](c10::intrusive_ptr<c10d::Backend> backend) {
             return std::shared_ptr<C10dCommunicator>(new C10dCommunicator(std::move(backend)),
                                                      delete_without_gil<C10dCommunicator>);
           }),
           py::arg("backend"));

  py::class_<CountingCommunicator, Communicator, std::shared_ptr<CountingCommunicator>>(
      m, "CountingCommunicator")
      .def(py::init<std::shared_ptr<Communicator>>(), py::arg("inner"))
      .def(
          "counted_apart",
          [](const CountingCommunicator& self) {
            return std::make_shared<CountingCommunicator>(self.inner());
          },
          "The same connections, of the same owner, with counters from zero.")
      .def("traffic",
           [](const CountingCommunicator& self) { return traffic_dict(self.traffic()); });

  py::class_<HostCommunicator, Communicator, std::shared_ptr<HostCommunicator>>(m,
                                                                                "HostCommunicator")
      .def(py::init<std::shared_ptr<Communicator>>(), py::arg("inner"));
}

using SharedRank = std::shared_ptr<SharedMemoryCommunicator>;

void bind_shared_memory(py::module_& m) {
  py::class_<SharedMemoryCommunicator, Communicator, SharedRank>(m, "SharedMemoryCommunicator");
}

// A Python function as one that any thread calls. Its error, which several threads throw, is text.
TransportsMeeting::Exchange exchange_of(const py::object& function) {
  if (function.is_none()) return {};
  const std::shared_ptr<py::object> kept(new py::object(function), [](py::object* object) {
    const py::gil_scoped_acquire locked;
    delete object;
  });
  return [kept](const std::string& own) {
    const py::gil_scoped_acquire locked;
    try {
      return (*kept)(py::bytes(own)).cast<std::vector<std::string>>();
    } catch (const py::error_already_set& error) {
      throw Error(py::str(error.value()));
    }
  };
}

void bind_gathering(py::module_& m) {
  using Shared = std::shared_ptr<Gathering>;
  py::class_<Gathering, Shared>(m, "Gathering", "Ranks that meet in a store, under a key.")
      .def(py::init([](c10::intrusive_ptr<c10d::Store> store, std::string key, int rank, int size,
                       double timeout, bool counted) {
             return std::make_shared<Gathering>(std::move(store), std::move(key), Group{rank, size},
                                                to_milliseconds(timeout), counted);
           }),
           py::arg("store"), py::arg("key"), py::arg("rank"), py::arg("size"), py::arg("timeout"),
           py::arg("counted") = false,
           "counted: this rank has come to this meeting before, and left it by an exception.")
      .def(
          "bring", [](const Shared& self, const std::string& text) { self->bring(text); },
          py::arg("text"), py::call_guard<py::gil_scoped_release>(),
          "Come to the meeting with a text.")
      .def(
          "texts",
          [](const Shared& self, std::optional<double> timeout, bool finish) {
            const auto limit = timeout ? to_milliseconds(*timeout) : self->timeout();
            const auto texts = std::make_shared<std::vector<std::string>>();
            run_interruptibly([=] {
              *texts = self->texts(limit);
              if (finish) self->finish();
            });
            return std::vector<py::bytes>(texts->begin(), texts->end());
          },
          py::arg("timeout") = py::none(), py::kw_only(), py::arg("finish") = true,
          "The texts of all ranks, once all have come. Raises BaguaTimeoutError, which names those "
          "that are missing, or BaguaError. finish: call finish() too.")
      .def(
          "share_memory",
          [](const Shared& self, int64_t node,
             const std::string& refusal) -> std::tuple<SharedRank, std::string, bool> {
            const auto made = std::make_shared<SharingOutcome>();
            run_interruptibly([=] { *made = share_memory(*self, {node, refusal}); });
            if (!made->shared) return {nullptr, std::move(made->reason), made->on_one_node};
            return {std::make_shared<SharedMemoryCommunicator>(
                        self->group(), std::move(*made->shared), self->timeout()),
                    "", true};
          },
          py::arg("node"), py::arg("refusal") = "",
          "A communicator and '', or None and the reason why the ranks share no memory, and "
          "whether\nthe launcher has put them on one node; alike on all ranks, which all call it. "
          "node: number of the launcher; refusal: why this rank does not\n"
          "want to. Raises BaguaError or BaguaTimeoutError if a rank does not come.")
      .def("give_up", &Gathering::give_up, py::arg("reason"),
           "Have gather() raise BaguaError(reason). From any thread.")
      .def("finish", &Gathering::finish, py::call_guard<py::gil_scoped_release>(),
           "The last call of every rank, which has read texts() or stores().")
      .def("forget", &Gathering::forget, py::call_guard<py::gil_scoped_release>(),
           "Instead of finish(), by one rank, once all ranks have read texts() or stores().")
      .def(
          "stores",
          [](const Shared& self, int transports, const py::object& exchange) {
            const auto meeting =
                std::make_shared<TransportsMeeting>(self, transports, exchange_of(exchange));
            std::vector<c10::intrusive_ptr<c10d::Store>> stores;
            for (int i = 0; i < transports; ++i) {
              stores.push_back(c10::make_intrusive<GatheringStore>(meeting, i));
            }
            return stores;
          },
          py::arg("transports"), py::arg("exchange") = py::none(),
          "A store for each of so many transports that connect at the same time, in threads: what "
          "all of them set before they read is gathered, or given to exchange(own), which returns "
          "that of all ranks.");
}

void bind_thread_ranks(py::module_& m) {
  py::class_<ThreadHub, std::shared_ptr<ThreadHub>>(m, "ThreadHub")
      .def(py::init([](int size, double timeout) {
             return std::make_shared<ThreadHub>(size, to_milliseconds(timeout));
           }),
           py::arg("size"), py::arg("timeout") = 60.0);

  py::class_<ThreadCommunicator, Communicator, std::shared_ptr<ThreadCommunicator>>(
      m, "ThreadCommunicator")
      .def(py::init<std::shared_ptr<ThreadHub>, int>(), py::arg("hub"), py::arg("rank"));
}

// A function of Python that a thread of a board calls, unless the interpreter ends: Note [Drops at
// exit]. What it raises is dropped.
template <typename... Args>
std::function<void(Args...)> unless_ending(const std::optional<py::function>& function) {
  if (!function) return nullptr;
  return [owned = shared_with_gil(*function)](Args... args) {
    before_end([&] {
      const py::gil_scoped_acquire gil;
      try {
        (*owned)(args...);
      } catch (py::error_already_set& error) {
        error.discard_as_unraisable("bagua");
      }
    });
  };
}

void bind_failure_board(py::module_& m) {
  m.def("is_timeout_of_transport", &is_timeout_of_transport, py::arg("text"));
  m.def("watch_collectives", &watch_collectives);
  m.def("watched_collectives", &watched_collectives);
  py::enum_<Blame>(m, "Blame")
      .value("THIS_RANK", Blame::kThisRank)
      .value("MAYBE_OTHER", Blame::kMaybeOther);
  py::class_<Board, std::shared_ptr<Board>>(m, "Board")
      .def(py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                       double straggler_after_s, const std::optional<py::function>& on_straggler) {
             const StragglerReports reports{
                 .after = to_milliseconds(straggler_after_s),
                 .report = unless_ending<const std::string&>(on_straggler)};
             return std::shared_ptr<Board>(new Board(store, rank, size, reports),
                                           delete_without_gil<Board>);
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::kw_only(),
           py::arg("straggler_after_s") = 0.0, py::arg("on_straggler").none(true) = py::none())
      .def(
          "seat",
          [](std::shared_ptr<Board> board, std::string name, std::vector<int> members,
             std::string title, std::string unit, bool per_round) {
            SeatOptions options{.name = std::move(name),
                                .title = std::move(title),
                                .unit = std::move(unit),
                                .members = std::move(members),
                                .per_round = per_round};
            return std::shared_ptr<FailureBoard>(
                new FailureBoard(std::move(board), std::move(options)),
                delete_without_gil<FailureBoard>);
          },
          py::arg("name"), py::arg("members"), py::kw_only(), py::arg("title") = "",
          py::arg("unit") = "round", py::arg("per_round") = false)
      .def("leave", &Board::leave, py::arg("process_ends") = false, ReleaseGil());
  py::class_<FailureBoard, std::shared_ptr<FailureBoard>>(m, "FailureBoard")
      .def(py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size) {
             return std::shared_ptr<FailureBoard>(new FailureBoard(store, rank, size),
                                                  delete_without_gil<FailureBoard>);
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"))
      .def("publish", &FailureBoard::publish, py::arg("reason"),
           py::arg("blame") = Blame::kThisRank, ReleaseGil())
      .def(
          "poll",
          [](FailureBoard& self) -> std::optional<std::string> {
            const auto news = self.poll();
            return news ? std::optional(news->text) : std::nullopt;
          },
          ReleaseGil())
      .def("publish_exit", &FailureBoard::publish_exit, py::arg("rounds"), ReleaseGil())
      .def("poll_exit", &FailureBoard::poll_exit, py::arg("round"), ReleaseGil())
      .def(
          "beat",
          [](FailureBoard& self, int64_t round, std::string text, bool waits,
             const std::optional<py::function>& on_news,
             const std::optional<py::function>& on_never) {
            const int64_t thread = gettid();
            const Whereabouts here{round, waits, std::move(text), waits ? thread : 0, thread};
            const auto call = unless_ending<const std::string&>(on_news);
            FailureBoard::OnNews tell;
            if (call) tell = [call](const FailureBoard::News& news) { call(news.text); };
            auto never = unless_ending<const std::string&>(on_never);
            const Watched watched = never ? Watched::kYes : Watched::kNo;
            const py::gil_scoped_release no_gil;
            self.beat([here] { return here; }, std::move(tell), watched, std::move(never));
          },
          py::arg("round"), py::arg("text"), py::arg("waits") = false,
          py::arg("on_news").none(true) = py::none(), py::arg("on_never").none(true) = py::none(),
          "Set this rank's position; from the first call on it is published twice a second.\n"
          "on_news(text) and on_never(reason) are called on another thread: another rank has\n"
          "failed or exited; this wait, which is reported when it is long, cannot end.")
      .def(
          "survey",
          [](FailureBoard& self, int64_t round, const std::string& unit, bool everyone) {
            return in_words(self.others({.number = round, .unit = unit, .everyone = everyone}));
          },
          py::arg("round"), py::arg("unit") = "round", py::arg("everyone") = false, ReleaseGil(),
          "Who is silent, behind or ahead of a rank in this round, in words; takes a second.")
      .def(
          "diagnose",
          [](FailureBoard& self, const std::string& seen, int64_t number, const std::string& unit,
             bool everyone, std::optional<int> peer) {
            const Position position{.number = number,
                                    .unit = unit,
                                    .everyone = everyone,
                                    .needed = number,
                                    .peer = peer.value_or(-1)};
            const auto cause = std::make_exception_ptr(TransportError(seen));
            return message_of(diagnose(cause, position, self));
          },
          py::arg("seen"), py::arg("number"), py::arg("unit") = "round",
          py::arg("everyone") = false, py::arg("peer").none(true) = py::none(), ReleaseGil());
}

void bind_sockets(py::module_& m) {
  py::class_<OpenedSockets>(m, "OpenedSockets")
      .def(py::init<>())
      .def("keep_from_children", &OpenedSockets::keep_from_children)
      .def(
          "give_up_after",
          [](const OpenedSockets& sockets, double seconds) {
            sockets.give_up_after(to_milliseconds(seconds));
          },
          py::arg("seconds"))
      .def("control_congestion_by", &OpenedSockets::control_congestion_by, py::arg("algorithm"))
      .def("round_trip_us", [](OpenedSockets& sockets) { return sockets.round_trip().count(); });
  m.def(
      "torch_sockets_give_up_after",
      [](double seconds, int port) { torch_sockets_give_up_after(to_milliseconds(seconds), port); },
      py::arg("seconds"), py::arg("store_port"));
}

struct PythonCall {
  py::function function;
  py::tuple arguments;
  py::object result{};
};

void bind_waits(py::module_& m) {
  m.def(
      "interruptible",
      [](py::function function, const py::args& arguments) {
        const auto call = shared_with_gil(PythonCall{std::move(function), arguments});
        run_interruptibly([call] {
          const py::gil_scoped_acquire gil;
          call->result = call->function(*call->arguments);
        });
        return call->result;
      },
      py::arg("function"),
      "Return function(*arguments), which may block without looking for signals; from the main\n"
      "thread it is called on another one. Ctrl-C ends the wait, and leaves the call to itself.");
  m.def(
      "keys_of",
      [](const c10::intrusive_ptr<c10d::Store>& store) {
        const auto keys = std::make_shared<std::vector<std::string>>();
        run_interruptibly([=] { *keys = store->listKeys(); });
        return *keys;
      },
      py::arg("store"),
      "All keys of a store, which torch's list_keys() waits for with the GIL in its hands.");
}

}  // namespace

void bind_comm(py::module_& m) {
  bind_communicator(m);
  bind_shared_memory(m);
  bind_gathering(m);
  bind_thread_ranks(m);
  bind_failure_board(m);
  bind_waits(m);
  bind_sockets(m);
}

}  // namespace bagua
