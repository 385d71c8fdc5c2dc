# What the CUDA backend may be built for. A script of its own, so that a test can run it: cmake -DDN_CUDA_ARCHITECTURES=90
# -P architectures.cmake
if("${DN_CUDA_ARCHITECTURES}" MATCHES "(^|;)90(-real|-virtual)?(;|$)")
  message(FATAL_ERROR "DN_CUDA_ARCHITECTURES=${DN_CUDA_ARCHITECTURES}: say 90a instead of 90, for H100 and H200: the "
    "kernels for them need wgmma, which sm_90 without \"a\" does not have")
endif()
