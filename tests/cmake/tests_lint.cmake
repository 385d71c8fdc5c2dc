# The include-layer lint runs with every test; the rest of the linters is ./dev lint.
find_program(LUAJIT_PROGRAM luajit REQUIRED)
add_test(NAME lint.layers COMMAND ${LUAJIT_PROGRAM} ${CMAKE_CURRENT_SOURCE_DIR}/lint/layers.lua ${CMAKE_SOURCE_DIR})
add_test(NAME lint.layers_fails COMMAND ${LUAJIT_PROGRAM} ${CMAKE_CURRENT_SOURCE_DIR}/lint/layers_test.lua
  ${CMAKE_CURRENT_SOURCE_DIR}/lint/layers.lua ${CMAKE_BINARY_DIR}/lint-cases)
add_test(NAME lint.dev COMMAND bash ${CMAKE_CURRENT_SOURCE_DIR}/lint/dev_test.sh ${CMAKE_BINARY_DIR}/lint-cases/dev)
add_test(NAME lint.commit COMMAND bash ${CMAKE_CURRENT_SOURCE_DIR}/lint/commit_test.sh ${CMAKE_BINARY_DIR}/lint-cases/commit
  ${CMAKE_COMMAND})
add_test(NAME lint.gpu_run COMMAND bash ${CMAKE_CURRENT_SOURCE_DIR}/lint/gpu_run_test.sh ${CMAKE_BINARY_DIR}/lint-cases/gpu_run)
set_tests_properties(lint.layers lint.layers_fails lint.dev lint.commit lint.gpu_run PROPERTIES LABELS "lint" TIMEOUT 60)
