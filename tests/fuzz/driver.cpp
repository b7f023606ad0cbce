// Runs the targets of a program on random and on changed valid inputs: what libFuzzer does, less
// its knowledge of coverage, with any compiler. Build with -fsanitize=address,undefined.
//
//   program [--inputs N | --seconds S] [--seed X] [--target NAME] [FILE...]
//
// N inputs or S seconds for each target (default: 2 s). FILE: run these inputs of --target instead.
// An input that fails is written to fuzz-failure-<target>, and its seed and number are printed.
#include <array>
#include <chrono>
#include <csignal>
#include <fstream>
#include <iterator>
#include <random>
#include <string>

#include <unistd.h>

#include "target.h"

extern "C" void __sanitizer_set_death_callback(void (*callback)()) __attribute__((weak));

namespace bagua::fuzz {
namespace {

constexpr unsigned kSecondsPerBatch = 60;  // after which an input counts as one that hangs
constexpr uint64_t kBatch = 1024;

constexpr size_t kLongestRandom = 512;

// Where decoders have their edges: ends of integer ranges, NaN, infinities, largest and smallest
// numbers of float, half and bfloat16.
constexpr std::array<uint64_t, 22> kInteresting{
    0,          1,          0xff,       0x7f,       0x80,       0xffff,     0x7fff,     0x8000,
    0xffffffff, 0x7fffffff, 0x80000000, 0x7f800000, 0xff800000, 0x7fc00000, 0x7f7fffff, 0x00000001,
    0x7c00,     0x7e00,     0x7f80,     ~0ull,      1ull << 63, ~0ull >> 1};

// Changes to a valid input, as libFuzzer makes them, without its knowledge of coverage.
class Mutation {
 public:
  Mutation(uint64_t seed, std::vector<Bytes> examples)
      : random_(seed), examples_(std::move(examples)) {}

  // Random bytes one time in eight; otherwise an example with one to eight changes.
  const Bytes& next() {
    if (examples_.empty() || below(8) == 0) {
      input_.resize(below(kLongestRandom));
      for (uint8_t& byte : input_) byte = static_cast<uint8_t>(random_());
      return input_;
    }
    input_ = examples_[below(examples_.size())];
    for (uint64_t changes = 1 + below(8); changes > 0; --changes) change();
    return input_;
  }

 private:
  uint64_t below(uint64_t bound) { return random_() % bound; }
  void overwrite(uint64_t value, size_t width) {
    if (input_.size() < width) return;
    std::memcpy(input_.data() + below(input_.size() - width + 1), &value, width);
  }
  void change() {
    const size_t size = input_.size();
    if (size == 0) return input_.push_back(static_cast<uint8_t>(random_()));
    const size_t from = below(size), count = 1 + below(std::min<size_t>(size - from, 32));
    switch (below(8)) {
      case 0:
        input_[from] ^= static_cast<uint8_t>(1u << below(8));
        return;
      case 1:
        return overwrite(random_(), 1);
      case 2:
        return overwrite(kInteresting[below(kInteresting.size())], 2);
      case 3:
        return overwrite(kInteresting[below(kInteresting.size())], 4);
      case 4:
        return overwrite(kInteresting[below(kInteresting.size())], 8);
      case 5:  // a piece of it once more, elsewhere
        std::memmove(input_.data() + below(size - count + 1), input_.data() + from, count);
        return;
      case 6:
        input_.erase(input_.begin() + from, input_.begin() + from + count);
        return;
      default: {  // more of it
        const Bytes piece(input_.begin() + from, input_.begin() + from + count);
        input_.insert(input_.begin() + below(size), piece.begin(), piece.end());
      }
    }
  }

  std::mt19937_64 random_;
  const std::vector<Bytes> examples_;
  Bytes input_;
};

struct Options {
  uint64_t inputs = 0;
  double seconds = 2;
  uint64_t seed = 1;
  std::string target;
  std::vector<std::string> files;
};

// What runs now: for the report of a failure.
struct Running {
  const Target* target = nullptr;
  const Bytes* input = nullptr;
  uint64_t seed = 0;
  uint64_t number = 0;
} running;

void report() {
  if (running.input == nullptr) return;
  const std::string path = std::string("fuzz-failure-") + running.target->name;
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(running.input->data()),
             static_cast<std::streamsize>(running.input->size()));
  std::fprintf(stderr, "target %s, seed %llu, input %llu (%zu bytes): written to %s\n",
               running.target->name, static_cast<unsigned long long>(running.seed),
               static_cast<unsigned long long>(running.number), running.input->size(),
               path.c_str());
  running.input = nullptr;
}

void run_one(const Target& target, const Bytes& input) {
  running.target = &target;
  running.input = &input;
  try {
    target.run(Input(input));
  } catch (const std::exception& error) {
    fail(error.what());
  }
}

void run_many(const Target& target, const Options& options) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  Mutation mutation(options.seed, target.examples());
  for (const Bytes& example : target.examples()) run_one(target, example);
  uint64_t done = 0;
  while (options.inputs > 0 ? done < options.inputs : elapsed() < options.seconds) {
    alarm(kSecondsPerBatch);
    for (uint64_t i = 0; i < kBatch && (options.inputs == 0 || done < options.inputs); ++i) {
      running.seed = options.seed;
      running.number = done++;
      run_one(target, mutation.next());
    }
  }
  alarm(0);
  running.input = nullptr;
  std::printf("%s: %llu inputs in %.1f s, seed %llu\n", target.name,
              static_cast<unsigned long long>(done), elapsed(),
              static_cast<unsigned long long>(options.seed));
  std::fflush(stdout);
}

void run_file(const Target& target, const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const Bytes input{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  run_one(target, input);
  running.input = nullptr;
  std::printf("%s: %s passed\n", target.name, path.c_str());
}

bool parse(int count, char** arguments, Options& options) {
  for (int i = 1; i < count; ++i) {
    const std::string option = arguments[i];
    if (!option.starts_with("--")) {
      options.files.push_back(option);
      continue;
    }
    if (++i == count) return false;
    if (option == "--inputs") {
      options.inputs = std::strtoull(arguments[i], nullptr, 10);
    } else if (option == "--seconds") {
      options.seconds = std::strtod(arguments[i], nullptr);
    } else if (option == "--seed") {
      options.seed = std::strtoull(arguments[i], nullptr, 10);
    } else if (option == "--target") {
      options.target = arguments[i];
    } else {
      return false;
    }
  }
  return true;
}

}  // namespace

void fail(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  report();
  std::abort();
}

int main(int count, char** arguments) {
  Options options;
  if (!parse(count, arguments, options)) {
    std::fprintf(stderr, "options: --inputs N, --seconds S, --seed X, --target NAME, FILE...\n");
    return 2;
  }
  if (__sanitizer_set_death_callback != nullptr) __sanitizer_set_death_callback(report);
  std::signal(SIGALRM, [](int) { fail("no end after a minute"); });
  bool found = false;
  for (const Target& target : targets()) {
    if (!options.target.empty() && options.target != target.name) continue;
    found = true;
    for (const std::string& file : options.files) run_file(target, file);
    if (options.files.empty()) run_many(target, options);
  }
  if (!found) std::fprintf(stderr, "there is no target '%s'\n", options.target.c_str());
  return found ? 0 : 2;
}

}  // namespace bagua::fuzz

int main(int count, char** arguments) { return bagua::fuzz::main(count, arguments); }
