# How Muster's own targets are compiled. A project that uses Muster inherits none of this.
find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM AND NOT CMAKE_CXX_COMPILER_LAUNCHER AND PROJECT_IS_TOP_LEVEL)
  # Precompiled headers need this sloppiness (ccache's manual, "Precompiled headers"). With the base directory, one
  # checkout uses what another has compiled (the manual, "Compiling in different directories"): ccache compares paths
  # below it as relative paths. A compiler option that names a path of the checkout would defeat this; include folders
  # do not.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1
      CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime ${CCACHE_PROGRAM})
endif()

find_program(MOLD_PROGRAM mold)
find_program(LLD_PROGRAM ld.lld)

# With MUSTER_UNITY the sources of a target are compiled 24 at a time: a source spends most of its time in headers, and
# in the templates that several sources instantiate alike (24 take a sixth less than twice twelve). CMake's own unity
# builds include sources by absolute names, so ccache could not share them between checkouts. Ours include them by names
# relative to the checkout.
function(muster_unity target)
  get_target_property(sources ${target} SOURCES)
  set(batches 0)
  set(in_batch 0)
  set(text "")
  set(included "")
  foreach(source IN LISTS sources)
    set(own "")  # options of a source that others do not have
    foreach(property SKIP_UNITY_BUILD_INCLUSION COMPILE_DEFINITIONS COMPILE_OPTIONS INCLUDE_DIRECTORIES GENERATED)
      get_source_file_property(value ${source} ${property})
      if(value)
        set(own ${value})
      endif()
    endforeach()
    if(own OR NOT source MATCHES "\\.cpp$")
      continue()
    endif()
    get_filename_component(path ${source} ABSOLUTE)
    file(RELATIVE_PATH path ${PROJECT_SOURCE_DIR} ${path})
    string(APPEND text "#include \"${path}\"\n")
    list(APPEND included ${source})
    math(EXPR in_batch "${in_batch} + 1")
    if(in_batch EQUAL 24)
      set(batch_${batches} "${text}")
      math(EXPR batches "${batches} + 1")
      set(in_batch 0)
      set(text "")
    endif()
  endforeach()
  list(LENGTH included count)
  if(count LESS 2)
    return()
  endif()
  if(in_batch)
    set(batch_${batches} "${text}")
    math(EXPR batches "${batches} + 1")
  endif()
  math(EXPR last "${batches} - 1")
  foreach(number RANGE ${last})
    set(unity ${CMAKE_CURRENT_BINARY_DIR}/${target}_unity_${number}.cpp)
    file(CONFIGURE OUTPUT ${unity} CONTENT "${batch_${number}}" @ONLY)
    target_sources(${target} PRIVATE ${unity})
  endforeach()
  set_source_files_properties(${included} PROPERTIES HEADER_FILE_ONLY ON)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR})
endfunction()

function(muster_compile_options target)
  if(MUSTER_UNITY)  # when the directory's sources have their properties
    cmake_language(EVAL CODE "cmake_language(DEFER CALL muster_unity ${target})")
  endif()
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wno-unused-parameter -Wno-missing-field-initializers
                         $<$<CXX_COMPILER_ID:GNU>:-fno-gnu-unique -fpch-preprocess>
                         # Otherwise a tenth of the time goes to garbage collections that free little.
                         "$<$<CXX_COMPILER_ID:GNU>:SHELL:--param ggc-min-expand=400>")
  # -O3 takes a fifth longer than -O2. Only kernels gain by it; they ask for it, source by source (src/CMakeLists.txt).
  if(NOT MUSTER_SANITIZE)
    target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O2>)
  endif()
  # With AddressSanitizer, GCC warns of values in libtorch's headers without a reason.
  if(MUSTER_WERROR AND NOT MUSTER_SANITIZE MATCHES "address")
    target_compile_options(${target} PRIVATE -Werror)
  endif()
  # If our code mishandles bytes from outside, the process ends instead of overwriting its memory. Sanitizers find more.
  if(NOT MUSTER_SANITIZE)
    target_compile_options(${target} PRIVATE -fstack-protector-strong -D_GLIBCXX_ASSERTIONS
                           $<$<CONFIG:Release,RelWithDebInfo>:-U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=2>)
    target_link_options(${target} PRIVATE LINKER:-z,relro,-z,now)
  endif()
  if(MUSTER_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${MUSTER_SANITIZE} -fno-omit-frame-pointer -g1
                           $<$<CXX_COMPILER_ID:GNU>:-Wno-error=tsan -Wno-tsan
                           -Wno-mismatched-new-delete>)  # which GCC says of msgpack's headers without a reason
    target_link_options(${target} PRIVATE -fsanitize=${MUSTER_SANITIZE})
    if(MUSTER_SANITIZE MATCHES "address")
      target_compile_options(${target} PRIVATE -Wno-maybe-uninitialized)
    endif()
    # A quarter (ThreadSanitizer) to a third less compilation than -O2; the tests take as long.
    target_compile_options(${target} PRIVATE -O1)
  endif()
  if(MOLD_PROGRAM)
    target_link_options(${target} PRIVATE -fuse-ld=mold)
  elseif(LLD_PROGRAM)
    target_link_options(${target} PRIVATE -fuse-ld=lld)
  endif()
endfunction()

# For tests and examples. Their time goes to the libraries that they call, so optimizing their own code would only make
# compilation take longer. Those that use libtorch (TORCH) share one precompiled header; the first one compiles it. GCC
# accepts it for another program if the options are equal, and the macros that its headers look at.
#
# It saves parsing. But GCC instantiates the templates that a header needs in every file that includes it, precompiled
# or not: torch/nn.h would cost each file 2.5 s more. So the list has what most files include anyway.
function(muster_compile_quickly target)
  cmake_parse_arguments(arg "TORCH" "" "" ${ARGN})
  muster_compile_options(${target})
  target_compile_options(${target} PRIVATE -Og
                         $<$<CXX_COMPILER_ID:GNU>:-Wno-mismatched-new-delete>)  # GCC says it of msgpack without a reason
  if(NOT arg_TORCH)
    return()
  endif()
  target_compile_definitions(${target} PRIVATE GTEST_HAS_PTHREAD=1)  # as GTest's own targets define it
  get_property(owner GLOBAL PROPERTY MUSTER_PRECOMPILED)
  if(owner)
    target_precompile_headers(${target} REUSE_FROM ${owner})
    return()
  endif()
  set_property(GLOBAL PROPERTY MUSTER_PRECOMPILED ${target})
  target_precompile_headers(${target} PRIVATE <msgpack.hpp> <torch/csrc/autograd/autograd.h>
    <torch/csrc/distributed/c10d/Backend.hpp> <torch/nn/modules/linear.h> <torch/optim/adam.h> <torch/optim/sgd.h>)
  if(MUSTER_BUILD_TESTS)
    target_precompile_headers(${target} PRIVATE <gmock/gmock.h> <gtest/gtest.h>)
  endif()
endfunction()
