# Tests of the CUDA backend: tests/gpu/test_*.c, each a Criterion program. Without a GPU they skip and say so.
if(TARGET dunlin-cuda)
  file(GLOB gpu_tests CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/tests/gpu/test_*.c)
  foreach(source ${gpu_tests})
    get_filename_component(name ${source} NAME_WE)
    set(target gpu_${name})
    add_executable(${target} ${source})
    target_include_directories(${target} PRIVATE ${CMAKE_SOURCE_DIR}/tests)
    target_compile_definitions(${target} PRIVATE DN_BUILD_DIR="${CMAKE_BINARY_DIR}" DN_SOURCE_DIR="${CMAKE_SOURCE_DIR}"
      DN_SHARED_DATA="${DN_SHARED_DATA}")
    target_link_libraries(${target} PRIVATE dn_engine dn_kernels PkgConfig::CRITERION)
    add_dependencies(${target} dunlin-cuda)
    add_test(NAME gpu.${name} COMMAND ${target} --jobs 1 --timeout 240)
    set_tests_properties(gpu.${name} PROPERTIES LABELS "gpu" TIMEOUT 300 RUN_SERIAL ON)
  endforeach()
  # The engine's own tests of what every backend knows, on this one.
  foreach(unit forward_kimi kimi)
    add_test(NAME gpu.engine_${unit} COMMAND engine_test_${unit} --jobs 1 --timeout 240
      --filter "*/@(head_sizes|batch|weights_in|logits|greedy|the_ref)*")
    set_tests_properties(gpu.engine_${unit} PROPERTIES LABELS "gpu" TIMEOUT 300 RUN_SERIAL ON
      ENVIRONMENT "DN_TEST_LIBRARY=$<TARGET_FILE:dunlin-cuda>")
  endforeach()
endif()
