# Specs of policies (busted under LuaJIT, with the bench of lua/dunlin/testing.lua), and policies under load.
find_program(BUSTED busted)
find_program(LUAJIT_PROGRAM luajit)
if(BUSTED AND LUAJIT_PROGRAM)
  add_test(NAME policies.specs COMMAND ${BUSTED} --lua=${LUAJIT_PROGRAM} --output=plainTerminal tests/policies
    WORKING_DIRECTORY ${CMAKE_SOURCE_DIR})
  set_tests_properties(policies.specs PROPERTIES LABELS "policies" TIMEOUT 120
    ENVIRONMENT "LUA_PATH=${CMAKE_SOURCE_DIR}/lua/?.lua\;${CMAKE_SOURCE_DIR}/lua/?/init.lua\;\;")
else()
  message(WARNING "busted or luajit not found: the specs in tests/policies will not run")
endif()

# Plain programs, since Criterion's processes and ThreadSanitizer do not go together; also run without a sanitizer.
foreach(name policy_reload)
  add_executable(tsan_${name} ${CMAKE_CURRENT_SOURCE_DIR}/tsan/${name}.c)
  target_link_libraries(tsan_${name} PRIVATE dn_policy)
  add_test(NAME tsan.${name} COMMAND tsan_${name})
  set_tests_properties(tsan.${name} PROPERTIES LABELS "tsan;policy" TIMEOUT 120
    FAIL_REGULAR_EXPRESSION "ThreadSanitizer|AddressSanitizer|runtime error:")
endforeach()

# It compares the policies' names with those of the kernels, which the policy layer itself may not see.
target_link_libraries(policy_test_names PRIVATE dn_kernels)

add_executable(bench_policy EXCLUDE_FROM_ALL ${CMAKE_CURRENT_SOURCE_DIR}/bench/bench_policy.c)
target_link_libraries(bench_policy PRIVATE dn_policy)
