# Everything Muster takes from outside. A missing piece says which Debian package brings it.
set(CMAKE_FIND_PACKAGE_TARGETS_GLOBAL ON)  # a project that contains ours links our static libraries, and so these too

find_package(Threads REQUIRED)

include(MusterTorch)
muster_find_torch(MUSTER_TORCH_ERROR)
if(MUSTER_TORCH_ERROR)
  message(FATAL_ERROR "${MUSTER_TORCH_ERROR}. Or run ./dev build, which installs one.")
endif()
message(STATUS "libtorch ${MUSTER_TORCH_VERSION}: ${Torch_DIR}")
set(TORCH_LIBRARIES Muster::torch)

# muster_require_header(NAME header.h debian-package): sets MUSTER_<NAME>_INCLUDE, the folder of a header-only library.
function(muster_require_header name header package)
  find_path(MUSTER_${name}_INCLUDE ${header})
  if(NOT MUSTER_${name}_INCLUDE)
    message(FATAL_ERROR "Muster needs <${header}>: apt-get install ${package}")
  endif()
endfunction()
muster_require_header(ASIO asio.hpp libasio-dev)
muster_require_header(CLI11 CLI/CLI.hpp libcli11-dev)
muster_require_header(JSON nlohmann/json.hpp nlohmann-json3-dev)
muster_require_header(CURL curl/curl.h libcurl4-openssl-dev)  # store/etcd/http.h loads the library for etcd
muster_require_header(ELFUTILS elfutils/libdwfl.h libdw-dev)  # the launcher loads the library when a rank has crashed
muster_require_header(HWLOC hwloc.h libhwloc-dev)  # the launcher loads the library when it pins ranks to cores
muster_require_header(XXHASH xxhash.h libxxhash-dev)
muster_require_header(MSGPACK msgpack.hpp libmsgpack-cxx-dev)  # only for what muster.h names

find_package(OpenSSL 3.0 QUIET)  # OpenSSL::SSL, OpenSSL::Crypto
if(NOT OPENSSL_FOUND)
  message(FATAL_ERROR "Muster needs OpenSSL 3: apt-get install libssl-dev")
endif()

find_package(hwy CONFIG QUIET)  # hwy::hwy
if(NOT hwy_FOUND)
  message(FATAL_ERROR "Muster needs Highway: apt-get install libhwy-dev")
endif()
set(MUSTER_HWY_LIBRARY hwy::hwy)

find_package(ZLIB QUIET)  # ZLIB::ZLIB
if(NOT ZLIB_FOUND)
  message(FATAL_ERROR "Muster needs zlib: apt-get install zlib1g-dev")
endif()

# What the optional backends need: Gloo's headers (the library is libtorch's), an MPI, libtorch's NCCL.
get_target_property(torch_definitions Muster::torch INTERFACE_COMPILE_DEFINITIONS)
if("USE_C10D_GLOO" IN_LIST torch_definitions)
  find_path(MUSTER_GLOO_INCLUDE gloo/context.h)
endif()
if("USE_C10D_NCCL" IN_LIST torch_definitions)
  # A torch for CUDA that pip installed has these headers in the folder nvidia/ beside its own.
  file(GLOB MUSTER_CUDA_WHEELS ${Torch_DIR}/../../../../nvidia/*/include)
  find_path(MUSTER_NCCL_INCLUDE nccl.h HINTS ${MUSTER_CUDA_WHEELS})
  find_path(MUSTER_CUDA_INCLUDE cusparse.h HINTS ENV CUDA_HOME PATHS /usr/local/cuda ${MUSTER_CUDA_WHEELS} PATH_SUFFIXES include)
  # Separate packages: nvidia-cuda-crt, and nvidia-cuda-cccl, which has its own folder in a toolkit since CUDA 13.
  find_path(MUSTER_CUDA_CRT_INCLUDE crt/host_config.h HINTS ${MUSTER_CUDA_INCLUDE} ${MUSTER_CUDA_WHEELS})
  find_path(MUSTER_CUDA_CCCL_INCLUDE nv/target HINTS ${MUSTER_CUDA_INCLUDE} ${MUSTER_CUDA_WHEELS} PATH_SUFFIXES cccl)
  find_library(MUSTER_TORCH_CUDA torch_cuda PATHS ${Torch_DIR}/../../../lib NO_DEFAULT_PATH)
  if(MUSTER_NCCL_INCLUDE AND MUSTER_CUDA_INCLUDE AND MUSTER_CUDA_CRT_INCLUDE AND MUSTER_CUDA_CCCL_INCLUDE AND MUSTER_TORCH_CUDA)
    set(MUSTER_HAS_NCCL TRUE)
    set(MUSTER_NCCL_INCLUDES ${MUSTER_NCCL_INCLUDE} ${MUSTER_CUDA_INCLUDE} ${MUSTER_CUDA_CRT_INCLUDE} ${MUSTER_CUDA_CCCL_INCLUDE})
    if(MUSTER_CUDA_INCLUDE IN_LIST MUSTER_CUDA_WHEELS)  # CUDA 12's are a folder for each of its libraries
      list(APPEND MUSTER_NCCL_INCLUDES ${MUSTER_CUDA_WHEELS})
    endif()
    list(REMOVE_DUPLICATES MUSTER_NCCL_INCLUDES)
    list(REMOVE_ITEM MUSTER_NCCL_INCLUDES ${CMAKE_CXX_IMPLICIT_INCLUDE_DIRECTORIES})  # CMake does this for a target, but not for a file
  else()
    message(STATUS "No nccl backend, though this libtorch has NCCL: headers are missing (docs/backends.md)")
  endif()
endif()
if(NOT MUSTER_SANITIZE)  # its tests are jobs of processes
  set(MPI_CXX_SKIP_MPICXX ON)  # the functions of C
  # pip's Intel MPI puts a wrapper on the PATH that names folders that do not exist. FindMPI stops the configuration then.
  find_program(MUSTER_MPI_WRAPPER mpicxx)
  if(MUSTER_MPI_WRAPPER)
    execute_process(COMMAND ${MUSTER_MPI_WRAPPER} -show OUTPUT_VARIABLE shown ERROR_QUIET)
    if(shown MATCHES "I_MPI_SUBSTITUTE_INSTALLDIR")
      find_program(MPI_CXX_COMPILER NAMES mpicxx mpic++ PATHS /usr/bin /usr/local/bin NO_DEFAULT_PATH)
      if(NOT MPI_CXX_COMPILER)
        set(CMAKE_DISABLE_FIND_PACKAGE_MPI TRUE)
      endif()
    endif()
  endif()
  find_package(MPI 3.0 COMPONENTS CXX QUIET)
endif()
find_package(ucx CONFIG QUIET)  # ucx::ucp, ucx::ucs, for the ucx transport (libucx-dev); there is none where it is not found
