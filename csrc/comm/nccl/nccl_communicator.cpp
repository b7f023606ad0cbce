#include "comm/nccl/nccl_communicator.h"

#include <algorithm>
#include <exception>
#include <optional>
#include <utility>

#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/util/Exception.h>

#include "base/check.h"
#include "base/owner_process.h"
#include "comm/call_site.h"
#include "comm/device_stream.h"
#include "comm/flat_copy.h"
#include "comm/nccl/nccl_calls.h"
#include "comm/nccl/nccl_handle.h"
#include "comm/nccl/nccl_rendezvous.h"
#include "comm/nccl/nccl_watchdog.h"
#include "comm/tensor_checks.h"

namespace bagua {
namespace {

class NcclRanks final : public NcclCommunicator {
 public:
  // is_local: a group of one that does without NCCL.
  NcclRanks(std::shared_ptr<NcclHandle> handle, Group group, at::Device device,
            std::shared_ptr<const NcclLibrary> library, bool is_local)
      : NcclCommunicator(group),
        is_local_(is_local),
        handle_(std::move(handle)),
        device_(device),
        library_(std::move(library)),
        watchdog_(device_.is_cpu() || is_local_
                      ? nullptr
                      : std::make_unique<NcclWatchdog>(handle_.pointer(), group)) {}

  void all_reduce(at::Tensor& tensor, ReduceOp op) override {
    check_all_reduce(tensor, op);
    check_device("all_reduce", tensor);
    const ncclDataType_t type = to_nccl(tensor.scalar_type());
    const CallSite site = CallSite::of("all_reduce", tensor);
    handle_->refuse_if_failed(site);
    if (is_local_ || tensor.numel() == 0) return;
    if (op == ReduceOp::kAvg && !nccl_averages_well(tensor, group().size)) {
      tensor.div_(group().size);
      op = ReduceOp::kSum;
    }
    start(site, [&](const NcclFunctions& nccl, ncclComm_t comm, cudaStream_t stream) {
      return nccl.all_reduce(tensor.data_ptr(), tensor.data_ptr(), tensor.numel(), type,
                             to_nccl(op), comm, stream);
    });
  }

  void all_gather(const at::Tensor& input, at::Tensor& output) override {
    check_all_gather(input, output, group());
    check_device("all_gather", input);
    const CallSite site = CallSite::of("all_gather", input);
    handle_->refuse_if_failed(site);
    if (input.numel() == 0) return;
    if (is_local_) return copy_unless_same(flat(output), flat(input));
    start(site, [&](const NcclFunctions& nccl, ncclComm_t comm, cudaStream_t stream) {
      return nccl.all_gather(input.data_ptr(), output.data_ptr(), input.nbytes(), ncclInt8, comm,
                             stream);
    });
  }

  void all_to_all(const at::Tensor& input, at::Tensor& output) override {
    check_all_to_all(input, output, group());
    check_device("all_to_all", input);
    const CallSite site = CallSite::of("all_to_all", input);
    handle_->refuse_if_failed(site);
    if (input.numel() == 0) return;
    if (is_local_) return copy_unless_same(flat(output), flat(input));
    const size_t chunk = input.nbytes() / group().size;
    std::vector<Message> recvs, sends;
    for (int peer = 0; peer < group().size; ++peer) {
      recvs.push_back({bytes_of(output) + peer * chunk, chunk, peer});
      sends.push_back({bytes_of(input) + peer * chunk, chunk, peer});
    }
    start(site, [&](const NcclFunctions& nccl, ncclComm_t comm, cudaStream_t stream) {
      return transfer(nccl, comm, stream, recvs, sends);
    });
  }

  void broadcast(at::Tensor& tensor, int root) override {
    check_broadcast(tensor, root, group());
    check_device("broadcast", tensor);
    const CallSite site = CallSite::of("broadcast", tensor, root == group().rank ? -1 : root);
    handle_->refuse_if_failed(site);
    if (is_local_ || tensor.numel() == 0) return;
    start(site, [&](const NcclFunctions& nccl, ncclComm_t comm, cudaStream_t stream) {
      return nccl.broadcast(tensor.data_ptr(), tensor.data_ptr(), tensor.nbytes(), ncclInt8, root,
                            comm, stream);
    });
  }

  using Communicator::exchange;
  void exchange(c10::ArrayRef<Send> sends, c10::ArrayRef<Recv> recvs,
                const OnReceived& on_received) override {
    check_exchange(sends, recvs, group());
    for (const Send& send : sends) check_device("exchange", send.tensor);
    for (const Recv& recv : recvs) check_device("exchange", recv.tensor);
    const CallSite site = exchange_site(sends, recvs);
    handle_->refuse_if_failed(site);
    if (is_local_) {
      for (const auto& [source, target] : own_messages(sends, recvs, 0)) {
        copy_unless_same(flat(target), flat(source));
      }
    } else {
      const std::vector<Message> incoming = messages_of(recvs), outgoing = messages_of(sends);
      if (!incoming.empty() || !outgoing.empty()) {
        start(site, [&](const NcclFunctions& nccl, ncclComm_t comm, cudaStream_t stream) {
          return transfer(nccl, comm, stream, incoming, outgoing);
        });
      }
    }
    call_back(on_received, recvs.size());
  }

  void check() override { handle_->refuse_if_failed({"a later call", 0, at::kByte, -1}); }

  void invalidate_if_aborted(at::Tensor& result) override {
    if (!is_local_) handle_->abort_flag().guard(result);
  }

  void abort(const std::string& reason) noexcept override {
    handle_->fail({NcclFailure::Kind::kError, concat("aborted: ", reason)});
  }

  std::shared_ptr<NcclCommunicator> split(const std::vector<int>& members) override {
    for (const int member : members) check_peer("split", member, group());
    const auto mine = std::find(members.begin(), members.end(), group().rank);
    const int position = static_cast<int>(mine - members.begin());
    const Group child_group{position, static_cast<int>(members.size())};
    const bool is_member = mine != members.end();
    auto child = std::make_shared<NcclHandle>(library_, child_group, device_, handle_->timeout());
    handle_->refuse_if_failed({"split", 0, at::kByte, -1});
    const bool stays_local = members.size() == 1 && (is_local_ || group().size > 1);
    if (!is_local_) {
      // A group of one has no communicator, but its rank must answer the others.
      std::optional<int> color;
      if (is_member && !stays_local) color = *std::min_element(members.begin(), members.end());
      handle_->split(color, position, *child);
    }
    if (!is_member) return nullptr;
    return std::make_shared<NcclRanks>(std::move(child), child_group, device_, library_,
                                       stays_local);
  }

  std::optional<std::string> failure() const override {
    const auto failure = handle_->failure();
    return failure ? std::optional(failure->reason) : std::nullopt;
  }

 private:
  void check_device(const char* call, const at::Tensor& tensor) const {
    BAGUA_CHECK(tensor.device() == device_, call, ": the tensor is on ", tensor.device().str(),
                ", this communicator moves tensors of ", device_.str());
  }

  // On the current stream, between two events for the watchdog.
  template <typename Start>
  void start(const CallSite& site, const Start& start_on) {
    const auto stream = static_cast<cudaStream_t>(current_stream_handle(device_));
    std::optional<c10::Event> begins;
    if (watchdog_.pointer()) begins = watchdog_->recorded();
    handle_->call(site, [&](const NcclFunctions& nccl, ncclComm_t comm) {
      return start_on(nccl, comm, stream);
    });
    if (watchdog_.pointer()) watchdog_->watch(site, std::move(*begins), watchdog_->recorded());
  }

  void call_back(const OnReceived& on_received, size_t count) {
    try {
      for (size_t message = 0; message < count; ++message) on_received(message);
    } catch (const std::exception& error) {
      handle_->fail({NcclFailure::Kind::kError,
                     concat("the caller failed during an exchange: ", error.what())});
      throw;
    }
  }

  const bool is_local_;
  const OwnersOnly<std::shared_ptr<NcclHandle>> handle_;
  const at::Device device_;
  const std::shared_ptr<const NcclLibrary> library_;
  // Null: nothing to watch. Joins before the handle ends.
  const OwnersOnly<std::unique_ptr<NcclWatchdog>> watchdog_;
};

void connect(NcclHandle& handle, const NcclOptions& options) {
  const auto deadline = NcclHandle::Clock::now() + options.timeout;
  NcclRendezvous rendezvous(options.store, options.group, deadline);
  const ncclUniqueId id = rendezvous.hand_over(*options.library);
  try {
    handle.connect(
        id, deadline, [&] { return rendezvous.given_up(); }, [&] { return rendezvous.missing(); });
  } catch (const TimeoutError&) {
    throw;
  } catch (const std::exception& error) {
    rendezvous.give_up(error.what());
    throw;
  }
}

}  // namespace

std::shared_ptr<NcclCommunicator> make_nccl_communicator(const NcclOptions& options) {
  // Checks
  const auto [rank, size] = options.group;
  BAGUA_CHECK_ARG(rank >= 0 && rank < size, "rank ", rank, " is outside a group of size ", size);
  BAGUA_CHECK_ARG(options.timeout.count() > 0, "the timeout must be positive");
  BAGUA_CHECK_ARG(options.library, "NcclCommunicator: there is no library");
  const bool is_local = size == 1 && !options.alone_too;
  BAGUA_CHECK_ARG(options.store || is_local, "NcclCommunicator: there is no store");
  BAGUA_CHECK_ARG(options.device.is_cpu() || options.device.has_index(),
                  "NcclCommunicator: say which device, as in cuda:0");

  auto handle =
      std::make_shared<NcclHandle>(options.library, options.group, options.device, options.timeout);
  if (!is_local) connect(*handle, options);
  return std::make_shared<NcclRanks>(std::move(handle), options.group, options.device,
                                     options.library, is_local);
}

}  // namespace bagua
