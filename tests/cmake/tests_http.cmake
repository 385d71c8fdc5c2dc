# The HTTP layer against real and hostile clients: a small server on it (http_echo) and Python, curl, h2load.
add_executable(http_echo ${CMAKE_SOURCE_DIR}/tests/clients/http_echo.c)
target_link_libraries(http_echo PRIVATE dn_http)

# The same server with its own h2o_socket_write hidden from the dynamic linker: it must refuse to run.
if(NOT H2O_LIBRARY MATCHES "\\.a$")
  file(GLOB http_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/runtime/http/*.c)
  add_executable(http_echo_nohook ${CMAKE_SOURCE_DIR}/tests/clients/http_echo.c ${http_sources})
  target_compile_definitions(http_echo_nohook PRIVATE DN_H2O_TEST_HIDDEN=1)
  target_link_libraries(http_echo_nohook PRIVATE dn_base H2O::h2o MbedTLS2or3::mbedtls)
endif()

find_package(Python3 COMPONENTS Interpreter)
if(Python3_FOUND)
  foreach(group basic limits gone chaos)
    add_test(NAME http.${group}
      COMMAND ${Python3_EXECUTABLE} -W ignore ${CMAKE_SOURCE_DIR}/tests/clients/http_${group}.py $<TARGET_FILE:http_echo>)
    set_tests_properties(http.${group} PROPERTIES LABELS "http;clients" TIMEOUT 300 RUN_SERIAL TRUE # they measure time
      FAIL_REGULAR_EXPRESSION "AddressSanitizer|LeakSanitizer|runtime error:|ThreadSanitizer")
  endforeach()
endif()

# Measurement, not a test: tests/bench/http_bench.py build/.../http_bench
add_executable(http_bench EXCLUDE_FROM_ALL ${CMAKE_SOURCE_DIR}/tests/bench/http_bench.c)
target_link_libraries(http_bench PRIVATE dn_http)
