# The CUDA module: kernels (csrc/kernels), cuBLASLt GEMM (csrc/gemm), handlers (csrc/ffi/cuda). cuBLASLt and the driver
# are loaded at run time (the copies that jax already has in the process), so nothing here links against them.
if(NOT CMAKE_CUDA_COMPILER)
  find_program(TE_JAX_NVCC nvcc HINTS /usr/local/cuda/bin $ENV{CUDA_HOME}/bin REQUIRED)
  set(CMAKE_CUDA_COMPILER ${TE_JAX_NVCC})
endif()
set(CMAKE_CUDA_ARCHITECTURES OFF)  # given as -gencode: sm_90a has no portable spelling
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)

# cuBLASLt's headers: the toolkit's, or those of the nvidia-cublas wheel beside the building Python.
find_path(TE_JAX_CUBLAS_INCLUDE_DIR cublasLt.h
  HINTS ${CUDAToolkit_INCLUDE_DIRS} ${Python_SITELIB}/nvidia/cu${CUDAToolkit_VERSION_MAJOR}/include
  DOC "Directory of cublasLt.h" REQUIRED)
set(CMAKE_CUDA_STANDARD 17)

file(GLOB TE_JAX_CUDA_KERNELS CONFIGURE_DEPENDS csrc/kernels/*.cu)
file(GLOB TE_JAX_GEMM_SOURCES CONFIGURE_DEPENDS csrc/gemm/*.cc)
file(GLOB TE_JAX_CUDA_SOURCES CONFIGURE_DEPENDS csrc/ffi/cuda/*.cc csrc/kernels/*.cc)

add_library(te_jax_kernels STATIC ${TE_JAX_CUDA_KERNELS})
target_include_directories(te_jax_kernels PUBLIC ${CMAKE_CURRENT_SOURCE_DIR})
target_compile_options(te_jax_kernels PRIVATE
  $<$<COMPILE_LANGUAGE:CUDA>:-gencode=arch=compute_90a,code=sm_90a -O3 -lineinfo --Werror=all-warnings
  -Xcompiler=-Wall,-Wextra,-Werror>)
set_target_properties(te_jax_kernels PROPERTIES CUDA_RUNTIME_LIBRARY Static CUDA_VISIBILITY_PRESET hidden)

add_library(te_jax_gemm STATIC ${TE_JAX_GEMM_SOURCES})
target_include_directories(te_jax_gemm SYSTEM PUBLIC ${CUDAToolkit_INCLUDE_DIRS} ${TE_JAX_CUBLAS_INCLUDE_DIR})
target_link_libraries(te_jax_gemm PUBLIC te_jax_flags te_jax_kernels CUDA::cudart_static ${CMAKE_DL_LIBS})

file(GLOB TE_JAX_COMM_CUDA_SOURCES CONFIGURE_DEPENDS csrc/comm/cuda/*.cc)
add_library(te_jax_comm_cuda STATIC ${TE_JAX_COMM_CUDA_SOURCES})
target_link_libraries(te_jax_comm_cuda PUBLIC te_jax_comm te_jax_gemm)

te_jax_module(_te_jax_cuda ${TE_JAX_CUDA_SOURCES})
target_compile_definitions(_te_jax_cuda PRIVATE TE_JAX_CUDA_ARCHITECTURES="sm_90a")
target_link_libraries(_te_jax_cuda PRIVATE te_jax_ffi te_jax_comm_cuda)

if(TE_JAX_TESTS)  # programs that need a GPU: built, run by hand or by ctest -L gpu
  file(GLOB TE_JAX_CUDA_TESTS CONFIGURE_DEPENDS csrc/tests/cuda/*_test.cc)
  foreach(source ${TE_JAX_CUDA_TESTS})
    get_filename_component(name ${source} NAME_WE)
    add_executable(${name} ${source})
    target_link_libraries(${name} PRIVATE te_jax_comm_cuda Threads::Threads)
    add_test(NAME ${name} COMMAND ${name})
    set_tests_properties(${name} PROPERTIES LABELS gpu)
  endforeach()
endif()

# benchmarks/native: built on demand, `cmake --build ... --target collective_bench`.
add_executable(collective_bench EXCLUDE_FROM_ALL benchmarks/native/collective_bench.cc)
target_link_libraries(collective_bench PRIVATE te_jax_comm_cuda)
