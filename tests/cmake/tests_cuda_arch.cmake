# 90 without "a" is an error that says what to write; other lists are none.
set(script -P ${CMAKE_SOURCE_DIR}/kernels/cuda/architectures.cmake)
add_test(NAME build.cuda_arch_90 COMMAND ${CMAKE_COMMAND} -DDN_CUDA_ARCHITECTURES=90 ${script})
add_test(NAME build.cuda_arch_90_in_list
  COMMAND ${CMAKE_COMMAND} "-DDN_CUDA_ARCHITECTURES=80-real\;90-virtual" ${script})
set_tests_properties(build.cuda_arch_90 build.cuda_arch_90_in_list PROPERTIES PASS_REGULAR_EXPRESSION "say 90a")
add_test(NAME build.cuda_arch_90a
  COMMAND ${CMAKE_COMMAND} "-DDN_CUDA_ARCHITECTURES=80-real\;90a-real\;120" ${script})
