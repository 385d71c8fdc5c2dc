# The HTTP layer against real and hostile clients: a small server on it (http_echo) and Python, curl, h2load.
add_executable(http_echo ${CMAKE_SOURCE_DIR}/tests/clients/http_echo.c)
target_link_libraries(http_echo PRIVATE dn_http)
