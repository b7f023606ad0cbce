# Makes the object library bagua_nccl: the communicator on NCCL, or what refuses it.
#
# NCCL is loaded at run time; a build needs nothing but nccl.h, which comes with torch's CUDA wheels
# (nvidia-nccl-cu*) and needs no CUDA toolkit (csrc/comm/nccl/needs).
if(BAGUA_NCCL)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c
      "import importlib.util as u; s = u.find_spec('nvidia.nccl'); print(s.submodule_search_locations[0])"
    OUTPUT_VARIABLE BAGUA_NCCL_WHEEL OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  find_path(BAGUA_NCCL_INCLUDE nccl.h
    HINTS "${BAGUA_NCCL_WHEEL}/include" "$ENV{NCCL_HOME}/include" "$ENV{CUDA_HOME}/include")
endif()
add_library(bagua_nccl OBJECT)
target_include_directories(bagua_nccl PUBLIC csrc)
if(BAGUA_NCCL AND BAGUA_NCCL_INCLUDE)
  message(STATUS "nccl.h in ${BAGUA_NCCL_INCLUDE}")
  target_sources(bagua_nccl PRIVATE
    $<$<NOT:$<BOOL:${BAGUA_WITH_CUDA}>>:csrc/comm/nccl/no_fill_if_set.cpp>
    csrc/comm/nccl/abort_flag.cpp
    csrc/comm/nccl/nccl_calls.cpp
    csrc/comm/nccl/nccl_communicator.cpp
    csrc/comm/nccl/nccl_handle.cpp
    csrc/comm/nccl/nccl_library.cpp
    csrc/comm/nccl/nccl_rendezvous.cpp
    csrc/comm/nccl/nccl_watchdog.cpp)
  # Builds with and without CUDA compile the others alike.
  set_source_files_properties(csrc/comm/nccl/no_fill_if_set.cpp PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  target_include_directories(bagua_nccl PRIVATE csrc/comm/nccl/needs)
  target_include_directories(bagua_nccl SYSTEM PRIVATE "${BAGUA_NCCL_INCLUDE}")
elseif(BAGUA_NCCL STREQUAL "ON")
  message(FATAL_ERROR
    "BAGUA_NCCL=ON, and there is no nccl.h in the environment of ${Python_EXECUTABLE}. Install the "
    "nvidia-nccl wheel of your torch (pip install --no-deps nvidia-nccl-cu13 or -cu12), or set NCCL_HOME.")
else()
  target_sources(bagua_nccl PRIVATE csrc/comm/nccl/no_nccl.cpp)
endif()
target_link_libraries(bagua_nccl PUBLIC torch_headers ${CMAKE_DL_LIBS})
