# Measurement, not a test: quality MODEL --text FILE --choices FILE
add_executable(quality EXCLUDE_FROM_ALL ${CMAKE_SOURCE_DIR}/tests/bench/quality.c)
target_link_libraries(quality PRIVATE dn_cli)
set_target_properties(quality PROPERTIES ENABLE_EXPORTS ON)
