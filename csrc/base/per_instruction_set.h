// BAGUA_PER_INSTRUCTION_SET compiles a function, with the BAGUA_HD functions that it calls, once
// per instruction set; the loader picks the best one that the processor has. Where all must give
// the same bits, the maths is exact IEEE, products are not contracted with sums (-ffp-contract=off)
// and sums have one order. (`avx512f` alone would lack the byte packing.) The sanitizers start too
// late for the loader's choice and do without.
#pragma once

#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && \
    !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define BAGUA_PER_INSTRUCTION_SET \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))

namespace bagua {
// Name of the instruction set that the loader has picked.
inline const char* instruction_set() {
  if (__builtin_cpu_supports("x86-64-v4")) return "x86-64-v4";
  return __builtin_cpu_supports("x86-64-v3") ? "x86-64-v3" : "x86-64";
}
}  // namespace bagua
#else
#define BAGUA_PER_INSTRUCTION_SET

namespace bagua {
// Functions exist once.
inline const char* instruction_set() { return "baseline"; }
}  // namespace bagua
#endif
