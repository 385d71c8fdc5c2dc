# The specs of the template compiler (lua/dunlin/jinja) under busted. The renderings of real templates need the test material.
find_program(BUSTED_PROGRAM busted REQUIRED)
find_program(LUAJIT_PROGRAM luajit REQUIRED)
file(GLOB template_specs CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/templates/*_spec.lua)
foreach(spec ${template_specs})
  get_filename_component(name ${spec} NAME_WE)
  string(REGEX REPLACE "_spec$" "" unit ${name})
  add_test(NAME templates.${unit} WORKING_DIRECTORY ${CMAKE_SOURCE_DIR}
    COMMAND ${BUSTED_PROGRAM} --lua=${LUAJIT_PROGRAM} --output=plainTerminal ${spec})
  set(path "${CMAKE_SOURCE_DIR}/lua/?.lua;${CMAKE_SOURCE_DIR}/lua/?/init.lua;${CMAKE_CURRENT_SOURCE_DIR}/templates/?.lua;;")
  string(REPLACE ";" "\\;" path "${path}")
  set_tests_properties(templates.${unit} PROPERTIES LABELS "lua;templates" TIMEOUT 300 SKIP_REGULAR_EXPRESSION "SKIPPED: "
    ENVIRONMENT "LUA_PATH=${path};DN_SHARED_DATA=${DN_SHARED_DATA};DN_BUILD_DIR=${CMAKE_BINARY_DIR}")
endforeach()
