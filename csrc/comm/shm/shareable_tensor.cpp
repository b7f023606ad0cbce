#include "comm/shm/shareable_tensor.h"

#include <cstring>
#include <mutex>
#include <set>
#include <utility>

#include <pthread.h>
#include <sys/mman.h>

#include "base/check.h"

namespace bagua {
namespace {

using Owner = std::shared_ptr<SharedMemory>;

// The mappings of this process that a child makes private.
struct PrivateInChildren {
  std::mutex mutex;
  std::set<const SharedMemory*> memory;

  PrivateInChildren() { pthread_atfork(before_fork, after_fork, in_child); }

  // Outlives all tensors.
  static PrivateInChildren& of_process() {
    static auto* const mappings = new PrivateInChildren();
    return *mappings;
  }

  static void before_fork() { of_process().mutex.lock(); }
  static void after_fork() { of_process().mutex.unlock(); }
  static void in_child() {
    for (const SharedMemory* memory : of_process().memory) {
      mmap(memory->data(), memory->bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED,
           memory->file().number(), 0);
    }
    of_process().mutex.unlock();
  }
};

void drop(void* owner) {
  auto* memory = static_cast<Owner*>(owner);
  {
    PrivateInChildren& mappings = PrivateInChildren::of_process();
    const std::lock_guard lock(mappings.mutex);
    mappings.memory.erase(memory->get());
  }
  delete memory;
}

}  // namespace

std::shared_ptr<SharedMemory> make_shareable(const at::Tensor& tensor) {
  const c10::Storage storage = tensor.storage();
  BAGUA_CHECK(tensor.is_cpu() && tensor.is_contiguous() && tensor.nbytes() > 0 &&
                  tensor.nbytes() == storage.nbytes(),
              "memory of ", tensor.nbytes(), " bytes on ", tensor.device().str(),
              " cannot be shared: it is not the whole of a storage on the CPU");
  const at::DataPtr& data = storage.data_ptr();
  if (data.get_deleter() == &drop) return *static_cast<const Owner*>(data.get_context());
  Owner memory = SharedMemory::create(storage.nbytes(), SharedMemory::Writers::kOwner);
  std::memcpy(memory->data(), data.get(), storage.nbytes());
  {
    PrivateInChildren& mappings = PrivateInChildren::of_process();
    const std::lock_guard lock(mappings.mutex);
    mappings.memory.insert(memory.get());
  }
  storage.set_data_ptr(
      at::DataPtr(memory->data(), new Owner(memory), &drop, c10::Device(c10::kCPU)));
  return memory;
}

}  // namespace bagua
