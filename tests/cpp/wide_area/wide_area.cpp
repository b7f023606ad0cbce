// A wide-area network in user space, for machines without netem. Needs root and /dev/net/tun.
//
//   wide_area SEED NAMESPACE...
//
// Opens a TUN device "wan0" in each network namespace, says "ready", and forwards IPv4 packets to
// 10.88.0.(i+1), the i-th namespace. Commands come as lines on the standard input, each is answered
// by one line: "ok", an "error ...", or what was asked for. It ends with the standard input.
//
//   node I KEY=VALUE...    the connection of namespace I to the network
//   path I J KEY=VALUE...  the way from I to J, one direction; "*" is every namespace
//   counts                 packets of each path so far, as JSON
//
// A packet passes, in this order: I's router, I's upward rate, the path, J's downward rate, J's
// router.
#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <map>
#include <queue>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <netinet/in.h>
#include <netinet/ip.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <unistd.h>

namespace {

using Clock = std::chrono::steady_clock;
using Time = int64_t;  // nanoseconds

constexpr size_t kMostNodes = 200;
constexpr size_t kMostBytes = 1 << 16;
constexpr size_t kMostHeld = 200'000;  // packets under way
constexpr size_t kMostFlows = 60'000;
constexpr uint16_t kFirstPort = 61'000, kLastPort = 65'000;  // that a NAT gives
constexpr int kPacketsInARow = 64;  // that are read from one device before the next one

// What was wrong with a command.
struct Refusal : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] void die(const std::string& what) {
  std::fprintf(stderr, "wide_area: %s: %s\n", what.c_str(), std::strerror(errno));
  std::exit(1);
}

Time now() { return Clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }

// A rate with a queue in front of it, which drops what would wait too long.
struct Bottleneck {
  double ns_per_byte = 0;  // 0: any rate
  Time free_at = 0;

  // When a packet that comes at `at` has passed; -1: the queue is full.
  Time pass(Time at, size_t bytes, Time queue) {
    if (ns_per_byte == 0) return at;
    const Time passed = std::max(free_at, at) + static_cast<Time>(bytes * ns_per_byte);
    if (passed - at > queue) return -1;
    return free_at = passed;
  }
};

struct Counts {
  uint64_t packets = 0, bytes = 0, lost = 0, full = 0, cut = 0, large = 0, forgotten = 0;
};

struct Path {
  Time delay = 0, jitter = 0;
  double loss = 0, burst = 1;  // share of packets that is lost, and how many in a row (mean)
  double reorder = 0, duplicate = 0;
  size_t mtu = kMostBytes;  // larger packets vanish without a word
  bool cut = false;
  Bottleneck rate;
  bool losing = false;
  Time last = 0;  // arrival of the latest packet: later ones do not overtake it
  Counts counts;
};

enum class Router { kNone, kNat, kFirewall };

// A connection of a namespace as its router knows it.
struct Flow {
  uint16_t inside = 0, outside = 0;  // ports of the namespace, and that the others see
  Time last = 0;
};

using Peer = std::tuple<uint32_t, uint16_t, uint16_t>;  // address, port there, port here

struct Node {
  int device = -1;
  Bottleneck up, down;
  Time queue = 200'000'000;
  Router router = Router::kNone;
  Time forgets_after = 0;
  std::map<Peer, Flow> from_inside, from_outside;
  uint16_t next_port = kFirstPort;
};

struct Packet {
  Time at = 0;
  uint64_t number = 0;
  size_t from = 0, to = 0;
  std::vector<unsigned char> data;
};

struct Later {
  bool operator()(const Packet& a, const Packet& b) const {
    return std::tie(a.at, a.number) > std::tie(b.at, b.number);
  }
};

// The ports of a TCP packet; others pass a router untouched.
class TcpPorts {
 public:
  explicit TcpPorts(std::vector<unsigned char>& data) {
    auto* const ip = reinterpret_cast<iphdr*>(data.data());
    const size_t header = ip->ihl * 4UL;
    const bool first = (ntohs(ip->frag_off) & IP_OFFMASK) == 0;
    if (ip->protocol != IPPROTO_TCP || !first || data.size() < header + sizeof(tcphdr)) return;
    tcp_ = reinterpret_cast<tcphdr*>(data.data() + header);
  }

  explicit operator bool() const { return tcp_ != nullptr; }
  bool opens() const { return tcp_->syn && !tcp_->ack; }
  uint16_t source() const { return ntohs(tcp_->source); }
  uint16_t target() const { return ntohs(tcp_->dest); }
  void set_source(uint16_t port) { replace(tcp_->source, port); }
  void set_target(uint16_t port) { replace(tcp_->dest, port); }

 private:
  // The checksum changes with the port (RFC 1624, equation 3).
  void replace(uint16_t& field, uint16_t port) {
    const uint16_t value = htons(port);
    uint32_t sum = (~tcp_->check & 0xffffU) + (~field & 0xffffU) + value;
    sum = (sum & 0xffffU) + (sum >> 16);
    sum = (sum & 0xffffU) + (sum >> 16);
    tcp_->check = static_cast<uint16_t>(~sum);
    field = value;
  }

  tcphdr* tcp_ = nullptr;
};

class WideArea {
 public:
  WideArea(uint32_t seed, size_t nodes) : random_(seed), nodes_(nodes), paths_(nodes * nodes) {}

  std::vector<Node>& nodes() { return nodes_; }

  // The answer to a command.
  std::string obey(const std::string& line) try {
    std::istringstream words(line);
    std::string word;
    words >> word;
    if (word == "counts") return counts();
    if (word == "node") {
      const auto chosen = numbers(words);
      for (const auto& [key, value] : settings(words)) {
        for (const size_t i : chosen) set(nodes_[i], key, value);
      }
    } else if (word == "path") {
      const auto from = numbers(words), to = numbers(words);
      for (const auto& [key, value] : settings(words)) {
        for (const size_t i : from) {
          for (const size_t j : to) set(path(i, j), key, value);
        }
      }
    } else {
      throw Refusal("unknown command '" + word + "'");
    }
    return "ok";
  } catch (const Refusal& refusal) {
    return std::string("error ") + refusal.what();
  }

  // Takes a packet that namespace `from` has sent.
  void take(size_t from, std::vector<unsigned char> data) {
    const size_t to = target(data);
    if (to >= nodes_.size() || to == from || held_.size() >= kMostHeld) return;
    Path& way = path(from, to);
    const Time at = now();
    way.counts.packets++;
    way.counts.bytes += data.size();
    if (!leaves(nodes_[from], data, at)) {
      way.counts.forgotten++;
    } else if (way.cut) {
      way.counts.cut++;
    } else if (data.size() > way.mtu) {
      way.counts.large++;
    } else if (is_lost(way)) {
      way.counts.lost++;
    } else {
      send(from, to, std::move(data), at);
    }
  }

  // Hands over everything whose time has come; nanoseconds until the next one.
  Time deliver() {
    while (!held_.empty()) {
      const Time left = held_.top().at - now();
      if (left > 0) return left;
      Packet packet = held_.top();
      held_.pop();
      Path& way = path(packet.from, packet.to);
      Node& node = nodes_[packet.to];
      if (way.cut) {
        way.counts.cut++;
      } else if (!enters(node, packet.data, packet.at)) {
        way.counts.forgotten++;
      } else if (write(node.device, packet.data.data(), packet.data.size()) < 0 &&
                 errno != EAGAIN && errno != EIO && errno != EINVAL) {
        die("write");
      }
    }
    return 1'000'000'000;
  }

 private:
  Path& path(size_t from, size_t to) { return paths_[from * nodes_.size() + to]; }

  double draw() { return std::uniform_real_distribution<double>()(random_); }

  size_t target(const std::vector<unsigned char>& data) const {
    if (data.size() < sizeof(iphdr) || data[0] >> 4 != 4) return nodes_.size();
    if (data[16] != 10 || data[17] != 88 || data[18] != 0 || data[19] == 0) return nodes_.size();
    return data[19] - 1U;
  }

  // Losses come in bursts of a geometric length (the model of Gilbert).
  bool is_lost(Path& way) {
    if (way.loss == 0) return way.losing = false;
    if (way.burst <= 1) return draw() < way.loss;
    const double begin = way.loss / (1 - way.loss) / way.burst;
    return way.losing = way.losing ? draw() >= 1 / way.burst : draw() < begin;
  }

  void send(size_t from, size_t to, std::vector<unsigned char> data, Time at) {
    Path& way = path(from, to);
    const size_t bytes = data.size();
    Time arrival = nodes_[from].up.pass(at, bytes, nodes_[from].queue);
    if (arrival >= 0) arrival = way.rate.pass(arrival, bytes, nodes_[from].queue);
    if (arrival >= 0) arrival = nodes_[to].down.pass(arrival + way.delay, bytes, nodes_[to].queue);
    if (arrival < 0) {
      way.counts.full++;
      return;
    }
    arrival += static_cast<Time>(draw() * static_cast<double>(way.jitter));
    if (draw() < way.reorder) {  // and later packets overtake it
      arrival += std::max<Time>(way.delay, 1'000'000);
    } else {
      arrival = way.last = std::max(arrival, way.last);
    }
    if (draw() < way.duplicate) held_.push({arrival, number_++, from, to, data});
    held_.push({arrival, number_++, from, to, std::move(data)});
  }

  // Whether the router of the sender lets a packet out; a NAT gives it another source port.
  static bool leaves(Node& node, std::vector<unsigned char>& data, Time at) {
    TcpPorts ports(data);
    if (node.router == Router::kNone || !ports) return true;
    const uint32_t address = reinterpret_cast<iphdr*>(data.data())->daddr;
    const Peer key{address, ports.target(), ports.source()};
    auto found = node.from_inside.find(key);
    if (found == node.from_inside.end() || at - found->second.last > node.forgets_after) {
      if (node.router == Router::kFirewall && !ports.opens()) return false;
      const bool nat = node.router == Router::kNat;
      if (nat) node.next_port = node.next_port < kLastPort ? node.next_port + 1 : kFirstPort;
      found = remember(node, key, nat ? node.next_port : ports.source(), at);
    }
    touch(node, found->second, address, ports.target(), at);
    ports.set_source(found->second.outside);
    return true;
  }

  // Whether the router of the receiver lets a packet in: others may open connections to the ports
  // on which the namespace listens, as routers forward them.
  static bool enters(Node& node, std::vector<unsigned char>& data, Time at) {
    TcpPorts ports(data);
    if (node.router == Router::kNone || !ports) return true;
    const uint32_t address = reinterpret_cast<iphdr*>(data.data())->saddr;
    const Peer key{address, ports.source(), ports.target()};
    auto found = node.from_outside.find(key);
    if (found == node.from_outside.end() || at - found->second.last > node.forgets_after) {
      if (!ports.opens()) return false;
      remember(node, key, ports.target(), at);
      found = node.from_outside.find(key);
    }
    touch(node, found->second, address, ports.source(), at);
    ports.set_target(found->second.inside);
    return true;
  }

  // `key` has the port inside.
  static std::map<Peer, Flow>::iterator remember(Node& node, const Peer& key, uint16_t outside,
                                                 Time at) {
    if (node.from_inside.size() > kMostFlows) {
      node.from_inside.clear();
      node.from_outside.clear();
    }
    const auto& [address, port, inside] = key;
    const Flow flow{inside, outside, at};
    node.from_outside[{address, port, outside}] = flow;
    return node.from_inside.insert_or_assign(key, flow).first;
  }

  static void touch(Node& node, const Flow& flow, uint32_t address, uint16_t port, Time at) {
    const Flow touched{flow.inside, flow.outside, at};
    node.from_inside[{address, port, touched.inside}] = touched;
    node.from_outside[{address, port, touched.outside}] = touched;
  }

  std::vector<size_t> numbers(std::istringstream& words) const {
    std::string word;
    words >> word;
    std::vector<size_t> chosen;
    for (size_t i = 0; i < nodes_.size(); i++) {
      if (word == "*" || word == std::to_string(i)) chosen.push_back(i);
    }
    if (chosen.empty()) throw Refusal("'" + word + "' is not the number of a namespace");
    return chosen;
  }

  static std::vector<std::pair<std::string, double>> settings(std::istringstream& words) {
    std::vector<std::pair<std::string, double>> found;
    for (std::string word; words >> word;) {
      const size_t middle = word.find('=');
      char* end = nullptr;
      const char* const text = middle == std::string::npos ? "" : word.c_str() + middle + 1;
      const double value = std::strtod(text, &end);
      if (*text == 0 || *end != 0 || !(value >= 0)) {
        throw Refusal("'" + word + "' is not of the form key=number");
      }
      found.emplace_back(word.substr(0, middle), value);
    }
    return found;
  }

  static Time milliseconds(double value) { return static_cast<Time>(value * 1e6); }
  static double ns_per_byte(double mbit) { return mbit == 0 ? 0 : 8000 / mbit; }
  static double share(double percent) {
    if (percent >= 100) throw Refusal("a share is below 100 percent");
    return percent / 100;
  }

  static void set(Node& node, const std::string& key, double value) {
    if (key == "up_mbit") {
      node.up.ns_per_byte = ns_per_byte(value);
    } else if (key == "down_mbit") {
      node.down.ns_per_byte = ns_per_byte(value);
    } else if (key == "queue_ms") {
      node.queue = milliseconds(value);
    } else if (key == "nat_ms" || key == "firewall_ms") {
      const Router router = key == "nat_ms" ? Router::kNat : Router::kFirewall;
      node.router = value == 0 ? Router::kNone : router;
      node.forgets_after = milliseconds(value);
    } else {
      throw Refusal("a node has no '" + key + "'");
    }
  }

  static void set(Path& way, const std::string& key, double value) {
    if (key == "delay_ms") {
      way.delay = milliseconds(value);
    } else if (key == "jitter_ms") {
      way.jitter = milliseconds(value);
    } else if (key == "loss_percent") {
      way.loss = share(value);
    } else if (key == "burst") {
      way.burst = value;
    } else if (key == "reorder_percent") {
      way.reorder = share(value);
    } else if (key == "duplicate_percent") {
      way.duplicate = share(value);
    } else if (key == "rate_mbit") {
      way.rate.ns_per_byte = ns_per_byte(value);
    } else if (key == "mtu") {
      way.mtu = value == 0 ? kMostBytes : static_cast<size_t>(value);
    } else if (key == "cut") {
      way.cut = value != 0;
    } else {
      throw Refusal("a path has no '" + key + "'");
    }
  }

  std::string counts() {
    std::ostringstream text;
    text << "{";
    for (size_t i = 0; i < nodes_.size(); i++) {
      for (size_t j = 0; j < nodes_.size(); j++) {
        const Counts& c = path(i, j).counts;
        if (c.packets == 0) continue;
        text << (text.tellp() > 1 ? ", " : "") << "\"" << i << " " << j
             << "\": {\"packets\": " << c.packets << ", \"bytes\": " << c.bytes
             << ", \"lost\": " << c.lost << ", \"full\": " << c.full << ", \"cut\": " << c.cut
             << ", \"large\": " << c.large << ", \"forgotten\": " << c.forgotten << "}";
      }
    }
    text << "}";
    return text.str();
  }

  std::mt19937_64 random_;
  std::vector<Node> nodes_;
  std::vector<Path> paths_;
  std::priority_queue<Packet, std::vector<Packet>, Later> held_;
  uint64_t number_ = 0;
};

int open_device(const std::string& name) {
  const int space = open(("/run/netns/" + name).c_str(), O_RDONLY | O_CLOEXEC);
  if (space < 0 || setns(space, CLONE_NEWNET) != 0) die(name);
  close(space);
  const int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  ifreq request{};
  request.ifr_flags = IFF_TUN | IFF_NO_PI;
  std::strcpy(request.ifr_name, "wan0");
  if (device < 0 || ioctl(device, TUNSETIFF, &request) != 0) die("/dev/net/tun");
  return device;
}

void read_packets(WideArea& network, size_t node) {
  std::array<unsigned char, kMostBytes> memory;
  for (int k = 0; k < kPacketsInARow; k++) {
    const ssize_t bytes = read(network.nodes()[node].device, memory.data(), memory.size());
    if (bytes <= 0) return;
    network.take(node, {memory.data(), memory.data() + bytes});
  }
}

// Answers the commands that have come; false: there will be none.
bool obey_commands(WideArea& network, std::string& pending) {
  std::array<char, 4096> memory;
  const ssize_t bytes = read(STDIN_FILENO, memory.data(), memory.size());
  if (bytes <= 0) return false;
  pending.append(memory.data(), bytes);
  for (size_t end; (end = pending.find('\n')) != std::string::npos; pending.erase(0, end + 1)) {
    std::cout << network.obey(pending.substr(0, end)) << std::endl;
  }
  return true;
}

void serve(WideArea& network) {
  std::vector<pollfd> files{{STDIN_FILENO, POLLIN, 0}};
  for (const Node& node : network.nodes()) files.push_back({node.device, POLLIN, 0});
  for (std::string pending;;) {
    const Time left = network.deliver();
    const timespec limit{left / 1'000'000'000, left % 1'000'000'000};
    if (ppoll(files.data(), files.size(), &limit, nullptr) < 0 && errno != EINTR) die("poll");
    for (size_t i = 1; i < files.size(); i++) {
      if (files[i].revents != 0) read_packets(network, i - 1);
    }
    if (files[0].revents != 0 && !obey_commands(network, pending)) return;
  }
}

}  // namespace

int main(int count, char** words) {
  const size_t nodes = count < 3 ? 0 : count - 2;
  if (nodes == 0 || nodes > kMostNodes) {
    std::fprintf(stderr, "usage: wide_area SEED NAMESPACE..., of which there are 1 to 200\n");
    return 2;
  }
  WideArea network(std::strtoul(words[1], nullptr, 10), nodes);
  for (size_t i = 0; i < nodes; i++) network.nodes()[i].device = open_device(words[2 + i]);
  setpriority(PRIO_PROCESS, 0, -10);  // delays are the network's, not those of a busy machine
  std::cout << "ready" << std::endl;
  serve(network);
}
