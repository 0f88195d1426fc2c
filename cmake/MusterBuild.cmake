# How Muster's own targets are compiled. An outside project that uses Muster inherits none of it.
find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM AND NOT CMAKE_CXX_COMPILER_LAUNCHER AND PROJECT_IS_TOP_LEVEL)
  # Precompiled headers need this sloppiness (ccache's manual, "Precompiled headers"). The base directory lets one checkout
  # use what another has compiled (the manual, "Compiling in different directories"): paths below it are compared as
  # relative ones. A compiler option that names a place of the checkout would defeat this; folders of headers do not.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1
      CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime ${CCACHE_PROGRAM})
endif()

find_program(MOLD_PROGRAM mold)
find_program(LLD_PROGRAM ld.lld)

function(muster_compile_options target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wno-unused-parameter -Wno-missing-field-initializers
                         $<$<CXX_COMPILER_ID:GNU>:-fno-gnu-unique -fpch-preprocess>)
  if(MUSTER_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
  if(MUSTER_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${MUSTER_SANITIZE} -fno-omit-frame-pointer -g1
                           $<$<CXX_COMPILER_ID:GNU>:-Wno-error=tsan -Wno-tsan>)
    target_link_options(${target} PRIVATE -fsanitize=${MUSTER_SANITIZE})
  endif()
  if(MOLD_PROGRAM)
    target_link_options(${target} PRIVATE -fuse-ld=mold)
  elseif(LLD_PROGRAM)
    target_link_options(${target} PRIVATE -fuse-ld=lld)
  endif()
endfunction()
