// Memory without a name that several processes map.
#pragma once

#include <cstddef>
#include <memory>

#include "comm/shm/file_descriptor.h"

namespace bagua {

// A mapping of a memfd. The kernel frees the memory when the last process that maps it has ended,
// however it ends.
//
// All pages are allocated when it is made, and its size is sealed: neither a full machine nor
// another process can turn an access into a SIGBUS. Thread safety: immutable; the bytes are the
// callers'. May fail: Error with the system's reason.
class SharedMemory final {
 public:
  enum class Writers { kOwner, kEverybody };

  // New memory, zeros. Writers::kOwner: other processes can map it for reading only.
  static std::shared_ptr<SharedMemory> create(size_t bytes, Writers writers);

  // Memory that another process has created with these arguments, which are compared.
  static std::shared_ptr<SharedMemory> open(const FileDescriptor& file, size_t bytes,
                                            Writers writers);

  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

  // To hand over to other processes. Closed by close_file(), the mapping stays.
  const FileDescriptor& file() const { return file_; }
  void close_file() { file_ = FileDescriptor(); }

 private:
  SharedMemory(FileDescriptor file, std::byte* data, size_t bytes);

  FileDescriptor file_;
  std::byte* const data_;
  const size_t bytes_;
};

}  // namespace bagua
