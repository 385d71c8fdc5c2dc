# `dunlin bench` on the CPU with shapes so small that it takes seconds: every operation and every kind of row is run, and
# the files have a line for each.
if(TARGET dunlin)
  set(library "")
  if(TARGET dunlin-cuda)
    set(library $<TARGET_FILE:dunlin-cuda>)
  endif()
  add_test(NAME cli.bench COMMAND ${CMAKE_COMMAND} -DDUNLIN=$<TARGET_FILE:dunlin> -DWORK=${CMAKE_CURRENT_BINARY_DIR}/bench
    -DLIBRARY=${library} -P ${CMAKE_SOURCE_DIR}/tests/cli/bench.cmake)
  set_tests_properties(cli.bench PROPERTIES TIMEOUT 240)
endif()
