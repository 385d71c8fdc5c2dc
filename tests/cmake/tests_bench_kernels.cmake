# Benchmarks of the kernels, built on request: cmake --build <dir> --target bench_matmul
foreach(bench bench_matmul bench_mla)
  add_executable(${bench} EXCLUDE_FROM_ALL ${CMAKE_SOURCE_DIR}/tests/bench/${bench}.c)
  target_link_libraries(${bench} PRIVATE dn_kernels m)
endforeach()
include(CheckCCompilerFlag)
check_c_compiler_flag(-march=native DN_HAS_MARCH_NATIVE) # bench_mla measures what this machine multiplies
if(DN_HAS_MARCH_NATIVE)
  target_compile_options(bench_mla PRIVATE -march=native -Wno-psabi)
endif()
