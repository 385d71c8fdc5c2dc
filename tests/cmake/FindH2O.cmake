# libh2o-evloop: Debian's (2.2.5, shared) or an operator's own upstream build (H2O_ROOT, shared or static).
# The version comes from h2o/version.h: upstream's pkg-config file does not know it.
find_path(H2O_INCLUDE_DIR h2o.h HINTS ${H2O_ROOT} ENV H2O_ROOT PATH_SUFFIXES include)
find_library(H2O_LIBRARY NAMES h2o-evloop HINTS ${H2O_ROOT} ENV H2O_ROOT PATH_SUFFIXES lib lib64)
if(H2O_INCLUDE_DIR AND EXISTS ${H2O_INCLUDE_DIR}/h2o/version.h)
  file(STRINGS ${H2O_INCLUDE_DIR}/h2o/version.h line REGEX "define H2O_VERSION ")
  string(REGEX REPLACE ".*\"(.*)\".*" "\\1" H2O_VERSION "${line}")
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(H2O REQUIRED_VARS H2O_LIBRARY H2O_INCLUDE_DIR VERSION_VAR H2O_VERSION)
if(H2O_FOUND AND NOT TARGET H2O::h2o)
  find_package(OpenSSL REQUIRED) # h2o's headers include it; no OpenSSL code handles our traffic
  find_package(ZLIB REQUIRED)
  add_library(H2O::h2o UNKNOWN IMPORTED)
  set_target_properties(H2O::h2o PROPERTIES IMPORTED_LOCATION ${H2O_LIBRARY}
    INTERFACE_INCLUDE_DIRECTORIES ${H2O_INCLUDE_DIR} INTERFACE_COMPILE_DEFINITIONS H2O_USE_LIBUV=0)
  if(H2O_LIBRARY MATCHES "\\.a$")
    set_property(TARGET H2O::h2o APPEND PROPERTY INTERFACE_COMPILE_DEFINITIONS DN_H2O_STATIC=1)
    set_property(TARGET H2O::h2o APPEND PROPERTY INTERFACE_LINK_OPTIONS
      "-Wl,--wrap=h2o_socket_write,--wrap=h2o_socket_notify_write,--wrap=h2o_socket_sendvec")
  endif()
  set_property(TARGET H2O::h2o APPEND PROPERTY INTERFACE_LINK_LIBRARIES OpenSSL::SSL OpenSSL::Crypto ZLIB::ZLIB m ${CMAKE_DL_LIBS})
endif()
