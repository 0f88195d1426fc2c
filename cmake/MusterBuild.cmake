# How Muster's own targets are compiled. A project that uses Muster inherits none of this.
find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM AND NOT CMAKE_CXX_COMPILER_LAUNCHER AND PROJECT_IS_TOP_LEVEL)
  # Precompiled headers need this sloppiness (ccache's manual, "Precompiled headers"). With the base directory, one checkout
  # uses what another has compiled (the manual, "Compiling in different directories"): ccache compares paths below it as
  # relative paths. A compiler option that names a path of the checkout would defeat this; include folders do not.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1
      CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime ${CCACHE_PROGRAM})
endif()

find_program(MOLD_PROGRAM mold)
find_program(LLD_PROGRAM ld.lld)

# With MUSTER_UNITY the sources of a target are compiled twelve at a time: a source spends most of its time in headers.
# CMake's own unity builds include sources by absolute names, so ccache could not share them between checkouts. Ours include
# them by names relative to the checkout.
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
    if(in_batch EQUAL 12)
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
                         $<$<CXX_COMPILER_ID:GNU>:-fno-gnu-unique -fpch-preprocess>)
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
  endif()
  if(MOLD_PROGRAM)
    target_link_options(${target} PRIVATE -fuse-ld=mold)
  elseif(LLD_PROGRAM)
    target_link_options(${target} PRIVATE -fuse-ld=lld)
  endif()
endfunction()
