# The fuzzing programs of `make fuzz`, with the sanitizers of BAGUA_SANITIZE: see tests/fuzz.
#
# BAGUA_LIBFUZZER=ON (clang only): libFuzzer drives them, one target at a time.
option(BAGUA_LIBFUZZER "Let clang's libFuzzer drive the fuzzing programs" OFF)
if(BAGUA_LIBFUZZER)
  set(FUZZ_DRIVER tests/fuzz/libfuzzer.cpp)
  foreach(target bagua_codec bagua_core bagua_nccl)
    # A builtin of gcc's that clang knows by its longer sibling alone.
    target_compile_options(${target} PRIVATE -fsanitize=fuzzer-no-link -D__builtin_irintf=__builtin_lrintf)
  endforeach()
else()
  set(FUZZ_DRIVER tests/fuzz/driver.cpp tests/fuzz/mutation.cpp)
endif()

add_custom_target(fuzz)
function(bagua_fuzz_program name)
  add_executable(${name} tests/fuzz/${name}.cpp ${FUZZ_DRIVER})
  target_link_libraries(${name} PRIVATE ${ARGN})
  if(BAGUA_LIBFUZZER)
    target_compile_options(${name} PRIVATE -fsanitize=fuzzer-no-link -D__builtin_irintf=__builtin_lrintf)
    target_link_options(${name} PRIVATE -fsanitize=fuzzer)
  endif()
  set_target_properties(${name} PROPERTIES EXCLUDE_FROM_ALL ON BUILD_RPATH "${TORCH_ROOT}/lib")
  add_dependencies(fuzz ${name})
endfunction()

bagua_fuzz_program(fuzz_codec bagua_codec)
target_sources(fuzz_codec PRIVATE csrc/op/wire/frame.cpp)
bagua_fuzz_program(fuzz_messages bagua_codec bagua_core torch_link)
if(BAGUA_NCCL AND BAGUA_NCCL_INCLUDE)
  bagua_fuzz_program(fuzz_nccl bagua_core bagua_codec bagua_nccl torch_link)
  target_include_directories(fuzz_nccl PRIVATE csrc/comm/nccl/needs)
  target_include_directories(fuzz_nccl SYSTEM PRIVATE "${BAGUA_NCCL_INCLUDE}")
endif()
