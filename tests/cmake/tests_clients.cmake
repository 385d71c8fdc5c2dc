# End to end: real clients (the openai package, httpx, curl, h2load) against the real program. run_clients.py finds a
# Python with the packages, or says why it skips.
find_package(Python3 COMPONENTS Interpreter)
if(Python3_FOUND AND TARGET dunlin)
  file(GLOB client_tests CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/tests/clients/test_*.py)
  set(limit 300)
  if(DN_SANITIZE)
    set(limit 900) # Kimi's take four minutes
  endif()
  foreach(file ${client_tests})
    get_filename_component(name ${file} NAME_WE)
    string(REPLACE "test_" "" short ${name})
    add_test(NAME clients.${short}
      COMMAND ${Python3_EXECUTABLE} ${CMAKE_SOURCE_DIR}/tests/clients/run_clients.py $<TARGET_FILE:dunlin> ${name}.py)
    set_tests_properties(clients.${short} PROPERTIES LABELS "clients" TIMEOUT ${limit} SKIP_REGULAR_EXPRESSION "^SKIPPED: "
      ENVIRONMENT "DN_SHARED_DATA=${DN_SHARED_DATA}"
      FAIL_REGULAR_EXPRESSION "AddressSanitizer|LeakSanitizer|runtime error:|ThreadSanitizer")
  endforeach()
endif()
