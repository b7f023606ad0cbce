// fake_cuda_guard.h for Python: its switches, and tensors.
#include <cstdint>

#include <Python.h>
#include <torch/csrc/autograd/python_variable.h>

#include "fake_device/fake_cuda_guard.h"

extern "C" {

void fake_cuda_follow(uint64_t (*given)(void*), int (*have_ended)(void*, uint64_t)) {
  followed = {given, have_ended};
}
void fake_cuda_hold(int yes) { holds = yes != 0; }
void fake_cuda_break() { breaks = true; }
void fake_cuda_refuse(int yes) { refuses = yes != 0; }
void fake_cuda_set_stream(int64_t stream) { current_stream = stream; }
int64_t fake_cuda_stream() { return current_stream; }
void fake_cuda_set_device(int device) {
  FakeGuard().setDevice({kDevice.type(), static_cast<c10::DeviceIndex>(device)});
}
int fake_cuda_device() { return current_device; }
int fake_cuda_events() { return events; }
int fake_cuda_events_made() { return events_made; }
unsigned fake_cuda_contexts() { return contexts; }

PyObject* fake_cuda_tensor(float* data, int64_t numel) {
  return THPVariable_Wrap(tensor_over(data, numel));
}

}  // extern "C"
