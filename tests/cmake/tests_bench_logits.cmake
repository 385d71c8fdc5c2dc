# Measurement, not a test: logits [MODELS] --device cpu|cuda, against what transformers computes
if(TARGET dn_cli)
  add_executable(logits ${CMAKE_SOURCE_DIR}/tests/bench/logits.c)
  target_include_directories(logits PRIVATE ${CMAKE_SOURCE_DIR}/tests)
  target_compile_definitions(logits PRIVATE DN_BUILD_DIR="${CMAKE_BINARY_DIR}" DN_SOURCE_DIR="${CMAKE_SOURCE_DIR}"
    DN_SHARED_DATA="${DN_SHARED_DATA}")
  target_link_libraries(logits PRIVATE dn_cli)
  if(NOT TARGET dunlin-cuda) # else it travels with the GPU's tests: tests/gpu/carry.sh
    set_target_properties(logits PROPERTIES EXCLUDE_FROM_ALL ON)
  endif()
  set_target_properties(logits PROPERTIES ENABLE_EXPORTS ON)
endif()
