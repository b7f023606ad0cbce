#include "comm/shm/shared_group.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <fstream>
#include <new>
#include <sstream>
#include <string_view>
#include <thread>
#include <utility>

#include <sys/random.h>
#include <unistd.h>

#include "base/check.h"
#include "comm/shm/system_error.h"
#include "comm/shm/unix_socket.h"
#include "health/error_text.h"
#include "health/sanitize.h"

namespace bagua {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr std::string_view kRefuses = "no";
constexpr std::string_view kOffers = "1";    // the version of what follows
constexpr milliseconds kSlice(100);          // between looks at whether another rank has given up
constexpr milliseconds kForAStranger(1000);  // who connects and does not say who it is

uint64_t random_word() {
  uint64_t word = 0;
  BAGUA_CHECK_SYSTEM(getrandom(&word, sizeof word, 0) == sizeof word, "getrandom");
  return word;
}

std::string socket_name() {
  std::ostringstream name;
  name << "bagua-" << std::hex << random_word() << random_word();
  return name.str();
}

std::string boot() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  file >> id;
  BAGUA_CHECK(!id.empty(), "/proc/sys/kernel/random/boot_id cannot be read");
  return id;
}

std::string network_namespace() {
  std::array<char, 64> target{};
  const ssize_t length = readlink("/proc/self/ns/net", target.data(), target.size());
  BAGUA_CHECK_SYSTEM(length > 0, "readlink of /proc/self/ns/net");
  return {target.data(), static_cast<size_t>(length)};
}

struct Place {
  std::string refusal;  // the other members hold nothing where there is one
  std::string boot;
  std::string network;
  int64_t node = 0;
  int pid = 0;
  std::string socket;
  uint64_t word = 0;
};

std::string text_of(const Place& place) {
  if (!place.refusal.empty()) return concat(kRefuses, " ", place.refusal);
  return concat(kOffers, " ", place.boot, " ", place.network, " ", place.node, " ", place.pid, " ",
                place.socket, " ", place.word);
}

Place parse_place(int rank, const std::string& written) {
  std::istringstream words(written.substr(0, 1024));
  std::string kind;
  Place place;
  words >> kind;
  if (kind == kRefuses) {
    std::getline(words >> std::ws, place.refusal);
    place.refusal = concat("rank ", rank, ": ", sanitize_untrusted(place.refusal));
    return place;
  }
  words >> place.boot >> place.network >> place.node >> place.pid >> place.socket >> place.word;
  if (kind != kOffers || words.fail() || place.pid <= 0) {
    place.refusal = concat("rank ", rank, " has put something else into the store: ",
                           sanitize_untrusted(written.substr(0, 40)));
  }
  return place;
}

// Why a rank shares no memory with rank 0; empty if it may.
std::string why_apart(const Place& first, const Place& other, int rank) {
  if (!other.refusal.empty()) return other.refusal;
  const std::string ranks = concat("ranks 0 and ", rank, " ");
  if (first.node != other.node) {
    return concat(ranks, "are on nodes ", first.node, " and ", other.node);
  }
  if (first.boot != other.boot) return ranks + "run under different kernels";
  if (first.network != other.network) return ranks + "are in different network namespaces";
  return "";
}

// Sent over a new connection, together with the sender's memory and, from rank 0, the bells.
struct Hello {
  uint64_t word;  // of the sender's place, which only the members of the group know
  int64_t rank;
};

// Sent when the receiver's memory has been mapped, and then when the live word has been written.
struct Progress {
  uint64_t step;
};

class Sharing {
 public:
  Sharing(Gathering& meeting, const SharingOffer& offer)
      : meeting_(meeting),
        group_(meeting.group()),
        deadline_(meeting.deadline()),
        sockets_(group_.size),
        processes_(group_.size),
        places_(group_.size) {
    shared_.memory.resize(group_.size);
    shared_.links.resize(group_.size);
    prepare(offer);
  }

  SharingOutcome run() {
    meeting_.bring(text_of(mine_));
    const std::vector<std::string> offers = meeting_.texts();
    // The first rank with a reason ends it: all ranks look in this order.
    for (int rank = 0; rank < group_.size; ++rank) {
      places_[rank] = parse_place(rank, offers[rank]);
      std::string reason = why_apart(places_[0], places_[rank], rank);
      if (reason.empty()) continue;
      meeting_.finish();
      const bool on_one_node = places_[rank].node == places_[0].node;
      return {{}, std::move(reason), on_one_node};
    }
    std::string failure;
    try {
      make_memory();
      hand_over_memory();
      prove_that_it_is_shared();
    } catch (const std::exception& error) {
      failure = concat("rank ", group_.rank, ": ", short_text(error));
    }
    // Before the sockets close: the failures of the others are consequences.
    std::string reason = sanitize_untrusted(meeting_.agree(failure).substr(0, 1024));
    meeting_.finish();
    if (!reason.empty()) return {{}, std::move(reason)};
    for (int rank = 0; rank < group_.size; ++rank) {
      shared_.memory[rank]->close_file();
      if (rank == group_.rank) continue;
      shared_.links[rank] =
          std::make_unique<PeerLink>(std::move(sockets_[rank]), std::move(processes_[rank]));
    }
    shared_.bells->close_file();
    return {std::move(shared_), ""};
  }

 private:
  void prepare(const SharingOffer& offer) {
    mine_.refusal = offer.refusal;
    if (!mine_.refusal.empty()) return;
    try {
      BAGUA_CHECK(group_.size <= kMostSharedRanks, "shared memory joins at most ", kMostSharedRanks,
                  " ranks");
      mine_.boot = boot();
      mine_.network = network_namespace();
      mine_.node = offer.node;
      mine_.pid = getpid();
      mine_.socket = socket_name();
      mine_.word = random_word();
      listening_ = listen_at(mine_.socket, group_.size);
    } catch (const Error& error) {
      mine_.refusal = error.what();
    }
  }

  void make_memory() {
    own() = make_rank_memory(group_.size);
    state(group_.rank).word.store(mine_.word);
    if (group_.rank == 0) shared_.bells = make_bells(group_.size);
  }

  // 1. Connect to those below; connecting needs no accepting. 2. Accept those above.
  void hand_over_memory() {
    for (int rank = 0; rank < group_.rank; ++rank) {
      sockets_[rank] = connect_to(places_[rank].socket, deadline_);
      const PeerProcess peer = peer_of(sockets_[rank]);
      BAGUA_CHECK(peer.uid == geteuid() && peer.pid == places_[rank].pid, "the socket of rank ",
                  rank, " belongs to process ", peer.pid, " of user ", peer.uid);
      say_hello(sockets_[rank]);
    }
    for (int missing = group_.size - 1 - group_.rank; missing > 0;) {
      FileDescriptor socket = accept_within(listening_, kSlice);
      if (!socket.is_open()) {
        check_others();
        continue;
      }
      if (admit(std::move(socket))) --missing;
    }
    listening_ = FileDescriptor();
    for (int rank = 0; rank < group_.rank; ++rank) {
      std::vector<FileDescriptor> files;
      const auto hello = receive<Hello>(sockets_[rank], files, rank == 0 ? 2 : 1);
      BAGUA_CHECK(hello.rank == rank && hello.word == places_[rank].word, "rank ", rank,
                  " answers as rank ", hello.rank);
      map(rank, files);
    }
    meet(1);
  }

  // False: it is not a rank of this group, or has come before.
  bool admit(FileDescriptor socket) {
    const PeerProcess peer = peer_of(socket);
    if (peer.uid != geteuid()) return false;
    std::vector<FileDescriptor> files;
    Hello hello{};
    try {
      if (!receive_message(socket, std::as_writable_bytes(std::span(&hello, 1)), files, 1,
                           kForAStranger)) {
        return false;
      }
    } catch (const Error&) {  // it has no memory for this rank, which goes on waiting for one
      return false;
    }
    if (hello.rank <= group_.rank || hello.rank >= group_.size) return false;
    const int rank = static_cast<int>(hello.rank);
    if (hello.word != places_[rank].word || peer.pid != places_[rank].pid) return false;
    if (sockets_[rank].is_open()) return false;
    say_hello(socket);
    sockets_[rank] = std::move(socket);
    map(rank, files);
    return true;
  }

  void say_hello(const FileDescriptor& socket) {
    const Hello hello{.word = mine_.word, .rank = group_.rank};
    std::vector<int> files{own()->file().number()};
    if (group_.rank == 0) files.push_back(shared_.bells->file().number());
    send_message(socket, std::as_bytes(std::span(&hello, 1)), files);
  }

  // The process is opened before it answers again: the number is not yet another one's.
  void map(int rank, const std::vector<FileDescriptor>& files) {
    BAGUA_CHECK(files.size() == (rank == 0 ? 2 : 1), "rank ", rank, " handed over ", files.size(),
                " descriptors");
    processes_[rank] = open_process(places_[rank].pid);
    shared_.memory[rank] =
        SharedMemory::open(files[0], rank_memory_bytes(group_.size), SharedMemory::Writers::kOwner);
    if (rank == 0) {
      shared_.bells =
          SharedMemory::open(files[1], bells_bytes(group_.size), SharedMemory::Writers::kEverybody);
    }
  }

  void prove_that_it_is_shared() {
    state(group_.rank).live_word.store(~mine_.word);
    meet(2);
    for (int rank = 0; rank < group_.size; ++rank) {
      const uint64_t word = places_[rank].word;
      BAGUA_CHECK(state(rank).word.load() == word && state(rank).live_word.load() == ~word,
                  "what rank ", rank, " writes into its memory is not seen");
    }
  }

  // All ranks have come to this step.
  void meet(uint64_t step) {
    const Progress progress{step};
    for (const FileDescriptor& socket : sockets_) {
      if (socket.is_open()) send_message(socket, std::as_bytes(std::span(&progress, 1)), {});
    }
    for (int rank = 0; rank < group_.size; ++rank) {
      if (rank == group_.rank) continue;
      std::vector<FileDescriptor> none;
      const auto theirs = receive<Progress>(sockets_[rank], none, 0);
      BAGUA_CHECK(theirs.step == step, "rank ", rank, " is at step ", theirs.step,
                  " of sharing memory instead of ", step);
    }
  }

  template <typename Message>
  Message receive(const FileDescriptor& socket, std::vector<FileDescriptor>& files,
                  size_t most_files) {
    Message message{};
    const auto bytes = std::as_writable_bytes(std::span(&message, 1));
    while (!receive_message(socket, bytes, files, most_files, kSlice)) check_others();
    return message;
  }

  void check_others() {
    BAGUA_CHECK(!meeting_.has_failure(), "another rank has given up");
    BAGUA_CHECK(steady_clock::now() < deadline_, "not all ranks have connected in time");
  }

  std::shared_ptr<SharedMemory>& own() { return shared_.memory[group_.rank]; }
  RankState& state(int rank) const { return shared_.state(rank); }

  Gathering& meeting_;
  const Group group_;
  const Deadline deadline_;
  Place mine_;
  FileDescriptor listening_;
  std::vector<FileDescriptor> sockets_;    // by rank
  std::vector<FileDescriptor> processes_;  // by rank
  std::vector<Place> places_;              // by rank
  SharedGroup shared_;
};

}  // namespace

RankState& SharedGroup::state(int rank) const {
  return *std::launder(reinterpret_cast<RankState*>(memory[rank]->data()));
}

Bell& SharedGroup::bell(int rank) const {
  return *std::launder(
      reinterpret_cast<Bell*>(bells->data() + sizeof(Bell) * static_cast<size_t>(rank)));
}

std::shared_ptr<SharedMemory> make_rank_memory(int size) {
  auto memory = SharedMemory::create(rank_memory_bytes(size), SharedMemory::Writers::kOwner);
  new (memory->data()) RankState();
  return memory;
}

std::shared_ptr<SharedMemory> make_bells(int size) {
  auto memory = SharedMemory::create(bells_bytes(size), SharedMemory::Writers::kEverybody);
  for (int rank = 0; rank < size; ++rank) new (memory->data() + sizeof(Bell) * rank) Bell();
  return memory;
}

SharingOutcome share_memory(Gathering& meeting, const SharingOffer& offer) {
  try {
    return Sharing(meeting, offer).run();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    const std::string text = short_text(error);
    if (is_timeout_of_transport(text)) throw TimeoutError(text);
    throw Error(text);
  }
}

}  // namespace bagua
