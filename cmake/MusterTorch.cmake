# Finds libtorch and makes the target Muster::torch, which all of Muster links. Muster's own build uses this file, and
# so does find_package(Muster) after the installation, so both follow the same rules.
#
#   muster_find_torch(ERROR)   # ERROR: empty, or one sentence that says what is wrong and what to do
#
# Looks at Torch_DIR, at CMAKE_PREFIX_PATH (both as CMake or environment variables), at MUSTER_TORCH_HINT, and last at a
# Python torch, which is a libtorch too. Sets Torch_DIR and MUSTER_TORCH_VERSION.
#
# Why not find_package(Torch): with a build for CUDA (which pip may install) it stops the configuration if there is no
# CUDA toolkit, although code for the CPU needs none; and its targets are not visible to a project that contains ours. A
# libtorch is a folder with include/ and lib/. A project may also call find_package(Torch): the libraries are the same
# files.

set(MUSTER_TORCH_MINIMUM 2.11)

function(muster_find_torch error)
  set(${error} "" PARENT_SCOPE)
  if(TARGET Muster::torch)
    return()
  endif()

  find_path(Torch_DIR TorchConfig.cmake
            HINTS ENV Torch_DIR ${CMAKE_PREFIX_PATH} ENV CMAKE_PREFIX_PATH ${MUSTER_TORCH_HINT}
            PATH_SUFFIXES share/cmake/Torch Torch libtorch/share/cmake/Torch
            DOC "Folder of libtorch's TorchConfig.cmake")
  if(NOT Torch_DIR)
    find_program(MUSTER_PYTHON NAMES python3 python)
    if(MUSTER_PYTHON)  # find_spec finds the package without importing it: 30 ms, not 3 s
      execute_process(
        COMMAND ${MUSTER_PYTHON} -c
                "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
        OUTPUT_VARIABLE python_torch OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
      find_path(Torch_DIR TorchConfig.cmake PATHS ${python_torch}/share/cmake/Torch NO_DEFAULT_PATH)
    endif()
  endif()
  if(NOT Torch_DIR)
    set(${error} "Muster needs libtorch ${MUSTER_TORCH_MINIMUM} or later: put it on CMAKE_PREFIX_PATH or set Torch_DIR"
        PARENT_SCOPE)
    return()
  endif()

  get_filename_component(prefix ${Torch_DIR}/../../.. ABSOLUTE)
  foreach(file IN ITEMS ${Torch_DIR}/TorchConfig.cmake ${prefix}/include/ATen/ATen.h
                        ${prefix}/lib/libtorch.so ${prefix}/lib/libtorch_cpu.so ${prefix}/lib/libc10.so)
    if(NOT EXISTS ${file})
      set(${error} "Torch_DIR is ${Torch_DIR}, but there is no ${file}: set it to the folder share/cmake/Torch of a libtorch"
          PARENT_SCOPE)
      return()
    endif()
  endforeach()

  set(PACKAGE_FIND_VERSION ${MUSTER_TORCH_MINIMUM})
  include(${Torch_DIR}/TorchConfigVersion.cmake OPTIONAL)
  if(NOT PACKAGE_VERSION OR PACKAGE_VERSION VERSION_LESS MUSTER_TORCH_MINIMUM)
    set(${error} "Muster needs libtorch ${MUSTER_TORCH_MINIMUM} or later; ${prefix} is ${PACKAGE_VERSION}" PARENT_SCOPE)
    return()
  endif()
  file(STRINGS ${Torch_DIR}/TorchConfig.cmake old_abi REGEX "_GLIBCXX_USE_CXX11_ABI=0")
  if(old_abi)
    set(${error} "the libtorch in ${prefix} was built with the old C++ ABI (_GLIBCXX_USE_CXX11_ABI=0): take one with the new ABI"
        PARENT_SCOPE)
    return()
  endif()

  # How libtorch itself was configured, e.g. USE_C10D_GLOO: its headers use these definitions.
  set(definitions "")
  file(STRINGS ${prefix}/share/cmake/Caffe2/Caffe2Targets.cmake lines REGEX "INTERFACE_COMPILE_DEFINITIONS \"[A-Z0-9_;]+\"")
  foreach(line IN LISTS lines)
    string(REGEX REPLACE ".*\"(.*)\".*" "\\1" line "${line}")
    list(APPEND definitions ${line})
  endforeach()
  list(REMOVE_DUPLICATES definitions)

  add_library(Muster::torch INTERFACE IMPORTED GLOBAL)
  target_include_directories(Muster::torch SYSTEM INTERFACE ${prefix}/include ${prefix}/include/torch/csrc/api/include)
  target_compile_definitions(Muster::torch INTERFACE ${definitions})
  # libtorch.so contains no code of libtorch; it loads the device libraries, to which nothing else refers. In versions
  # with CUDA it contains functions of std::filesystem that crash, so the C++ library is searched before it.
  target_link_libraries(Muster::torch INTERFACE -lstdc++ -Wl,--push-state,--no-as-needed,${prefix}/lib/libtorch.so,--pop-state
                        ${prefix}/lib/libtorch_cpu.so ${prefix}/lib/libc10.so)
  if(EXISTS ${prefix}/lib/libtorch_cuda.so)  # the program finds CUDA's own libraries when it starts; the linker does not
    target_link_options(Muster::torch INTERFACE -Wl,--allow-shlib-undefined)
  endif()
  set(MUSTER_TORCH_VERSION ${PACKAGE_VERSION} PARENT_SCOPE)
endfunction()
