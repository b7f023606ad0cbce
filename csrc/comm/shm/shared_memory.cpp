#include "comm/shm/shared_memory.h"

#include <cstdint>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "comm/shm/system_error.h"

namespace bagua {
namespace {

constexpr int kFixedSize = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// A file beyond the limit would be a signal that ends the process.
void check_file_size_limit(size_t bytes) {
  rlimit limit{};
  BAGUA_CHECK_SYSTEM(getrlimit(RLIMIT_FSIZE, &limit) == 0, "getrlimit");
  BAGUA_CHECK(limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur >= bytes, "shared memory of ",
              bytes, " bytes is more than this process may write into a file, ", limit.rlim_cur,
              " bytes; raise the limit (ulimit -f)");
}

// The creator has reserved all pages. Each is mapped when it is touched: most are late or never.
std::byte* map(const FileDescriptor& file, size_t bytes, int protection) {
  void* data = mmap(nullptr, bytes, protection, MAP_SHARED, file.number(), 0);
  BAGUA_CHECK_SYSTEM(data != MAP_FAILED, "mmap of shared memory");
  return static_cast<std::byte*>(data);
}

}  // namespace

SharedMemory::SharedMemory(FileDescriptor file, std::byte* data, size_t bytes)
    : file_(std::move(file)), data_(data), bytes_(bytes) {}

SharedMemory::~SharedMemory() { munmap(data_, bytes_); }

std::shared_ptr<SharedMemory> SharedMemory::create(size_t bytes, Writers writers) {
  check_file_size_limit(bytes);
  FileDescriptor file(memfd_create("bagua", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  BAGUA_CHECK_SYSTEM(file.is_open(), "memfd_create");
  const auto length = static_cast<off_t>(bytes);
  BAGUA_CHECK_SYSTEM(ftruncate(file.number(), length) == 0, "ftruncate of shared memory");
  BAGUA_CHECK_SYSTEM(fallocate(file.number(), 0, 0, length) == 0, "fallocate of shared memory");
  std::byte* data = map(file, bytes, PROT_READ | PROT_WRITE);
  std::shared_ptr<SharedMemory> memory(new SharedMemory(std::move(file), data, bytes));
  const int number = memory->file().number();
  // Linux has this seal since 5.1. Without it other ranks map for reading all the same.
  if (writers == Writers::kOwner) fcntl(number, F_ADD_SEALS, F_SEAL_FUTURE_WRITE);
  BAGUA_CHECK_SYSTEM(fcntl(number, F_ADD_SEALS, kFixedSize) == 0, "sealing of shared memory");
  return memory;
}

std::shared_ptr<SharedMemory> SharedMemory::open(const FileDescriptor& file, size_t bytes,
                                                 Writers writers) {
  struct stat status{};
  BAGUA_CHECK_SYSTEM(fstat(file.number(), &status) == 0, "fstat of shared memory");
  const int seals = fcntl(file.number(), F_GET_SEALS);
  BAGUA_CHECK(seals >= 0 && (seals & kFixedSize) == kFixedSize,
              "another rank's shared memory is not sealed");
  BAGUA_CHECK(std::cmp_equal(status.st_size, bytes), "another rank's shared memory has ",
              status.st_size, " bytes instead of ", bytes);
  const int write = writers == Writers::kEverybody ? PROT_WRITE : 0;
  std::byte* data = map(file, bytes, PROT_READ | write);
  return std::shared_ptr<SharedMemory>(new SharedMemory(FileDescriptor(), data, bytes));
}

}  // namespace bagua
