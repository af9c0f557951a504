# The CUDA device, as a library next to charonia_engine. A program links one of three: charonia_cuda, whose kernels nvcc
# compiles; charonia_cuda_on_host (engine/tests), the same sources as plain C++, for tests without a GPU; or
# charonia_no_cuda, which reports that this build has no CUDA device. Sets charonia_cuda_library.
set(charonia_cuda_library charonia_no_cuda)
add_library(charonia_no_cuda STATIC engine/src/ops/cuda/no_cuda.cpp)
target_link_libraries(charonia_no_cuda PUBLIC charonia_engine)

file(GLOB cuda_kernels CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/engine/src/ops/cuda/kernels/*.cu)
file(GLOB_RECURSE cuda_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/engine/src/ops/cuda/*.cpp)
# The libraries, which the emulated device replaces (engine/tests/emulator/libraries.cpp).
set(cuda_libraries ${cuda_sources})
list(FILTER cuda_libraries INCLUDE REGEX "/(nccl|blas|gemm_timer)\\.cpp$")
# Not in the group: sources with names that others have too.
set(cuda_alone ${cuda_sources})
list(FILTER cuda_alone INCLUDE REGEX "/(cuda_ops|step_upload|w8a8_gemm|sampler)\\.cpp$")
list(FILTER cuda_sources EXCLUDE REGEX "/no_cuda\\.cpp$")
list(REMOVE_ITEM cuda_sources ${cuda_libraries} ${cuda_alone})

if(CHARONIA_CUDA OR CHARONIA_CUDA_CHECK)
  set(CMAKE_CUDA_ARCHITECTURES ${CHARONIA_CUDA_ARCHITECTURES})
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  enable_language(CUDA)
  if(CMAKE_VERSION VERSION_LESS 3.26)  # older versions do not know that nvcc supports C++20
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
  endif()
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  set(CMAKE_CUDA_EXTENSIONS OFF)
  set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
    message(FATAL_ERROR "nvcc ${CMAKE_CUDA_COMPILER_VERSION} was found; 12.8 or newer is needed")
  endif()
  find_package(CUDAToolkit REQUIRED)
  find_path(cublas_include cublasLt.h HINTS ${CHARONIA_CUDA_HEADERS} ${CUDAToolkit_INCLUDE_DIRS} NO_CACHE)
  find_path(nccl_include nccl.h HINTS ${CHARONIA_CUDA_HEADERS} ${CUDAToolkit_INCLUDE_DIRS} NO_CACHE)
  if(NOT cublas_include OR NOT nccl_include)
    message(FATAL_ERROR "cublasLt.h or nccl.h was not found: pass -DCHARONIA_CUDA_HEADERS=$(scripts/get_cuda_headers.sh)")
  endif()
  set(sources "")
  add_group(sources cuda "" ${cuda_sources})
  add_library(charonia_cuda STATIC EXCLUDE_FROM_ALL ${sources} ${cuda_alone} ${cuda_libraries} ${cuda_kernels}
    engine/src/ops/cuda/device/gpu/runtime.cu)
  target_link_libraries(charonia_cuda PUBLIC charonia_engine CUDA::cudart_static ${CMAKE_DL_LIBS})
  target_compile_options(charonia_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-lineinfo --expt-relaxed-constexpr -Xptxas=-v>
    $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${CHARONIA_WERROR}>>:-Werror=all-warnings>)
  target_include_directories(charonia_cuda PUBLIC engine/src/ops/cuda/device/gpu)
  target_include_directories(charonia_cuda SYSTEM PRIVATE ${cublas_include} ${nccl_include} ${CUDAToolkit_INCLUDE_DIRS})
  list(TRANSFORM common_headers REPLACE "(.+)" "$<$<COMPILE_LANGUAGE:CXX>:\\1$<ANGLE-R>>" OUTPUT_VARIABLE headers_of_cxx)
  target_precompile_headers(charonia_cuda PRIVATE ${headers_of_cxx})
  # scripts/check_machine_code.py reads ptxas's output, which is stored next to each object.
  set(launcher ${PROJECT_SOURCE_DIR}/scripts/keep_ptxas_output.sh ${CMAKE_CUDA_COMPILER_LAUNCHER})
  set_target_properties(charonia_cuda PROPERTIES CUDA_COMPILER_LAUNCHER "${launcher}")
endif()
if(CHARONIA_CUDA)
  set(charonia_cuda_library charonia_cuda)
endif()
