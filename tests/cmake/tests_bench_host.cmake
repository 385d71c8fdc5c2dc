# What the scheduler's thread does between two steps, on a device that computes nothing: cmake --build <dir> --target bench_host
add_executable(bench_host EXCLUDE_FROM_ALL ${CMAKE_SOURCE_DIR}/tests/bench/bench_host.c)
target_link_libraries(bench_host PRIVATE dn_sched)
