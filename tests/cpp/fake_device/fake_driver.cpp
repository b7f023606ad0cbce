// Two functions of CUDA's driver, in a library that is called libcuda.so.1.
#include <atomic>

namespace {

std::atomic<int> capture = 0;
std::atomic<int> threads_in_thread_local_mode = 0;
std::atomic<int> threads_in_another_mode = 0;

}  // namespace

extern "C" {

int cuThreadExchangeStreamCaptureMode(int* mode) {
  ++(*mode == 1 ? threads_in_thread_local_mode : threads_in_another_mode);
  *mode = 0;  // CU_STREAM_CAPTURE_MODE_GLOBAL, which threads begin with
  return 0;
}

int cuStreamIsCapturing(void*, int* status) {
  *status = capture;
  return 0;
}

// For the tests.
void fake_driver_capture(int on) { capture = on; }
int fake_driver_threads_in_thread_local_mode() { return threads_in_thread_local_mode; }
int fake_driver_threads_in_another_mode() { return threads_in_another_mode; }

}  // extern "C"
