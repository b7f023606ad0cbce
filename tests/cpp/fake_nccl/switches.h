// Functions of the fake NCCL for programs in which it may be preloaded: see fake_nccl.cpp.
#pragma once

#include <cstdint>

#pragma weak fake_nccl_given
#pragma weak fake_nccl_have_ended
#pragma weak fake_nccl_launch
#pragma weak fake_nccl_last_stream
#pragma weak fake_nccl_count
#pragma weak fake_nccl_misuse
extern "C" {
uint64_t fake_nccl_given(void* stream);
int fake_nccl_have_ended(void* stream, uint64_t kernels);
void fake_nccl_launch(void* stream, int (*has_ended)(void*), void* argument);
void* fake_nccl_last_stream();
int fake_nccl_count(const char* name);
const char* fake_nccl_misuse();
}
