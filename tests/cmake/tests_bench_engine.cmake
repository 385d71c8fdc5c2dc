# Speed of the engine without a server around it: cmake --build <dir> --target bench_engine
add_executable(bench_engine EXCLUDE_FROM_ALL ${CMAKE_SOURCE_DIR}/tests/bench/bench_engine.c)
target_link_libraries(bench_engine PRIVATE dn_engine)
