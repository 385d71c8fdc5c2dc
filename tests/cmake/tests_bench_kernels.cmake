# Benchmarks of the kernels, built on request: cmake --build <dir> --target bench_matmul
add_executable(bench_matmul EXCLUDE_FROM_ALL ${CMAKE_SOURCE_DIR}/tests/bench/bench_matmul.c)
target_link_libraries(bench_matmul PRIVATE dn_kernels)
