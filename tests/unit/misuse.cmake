# For the tests of what does not compile: sets `flags` for the compiler, with what all their sources include
# precompiled, which takes longer than they do. From COMPILER, CCACHE, BASE (the checkout), INCLUDES and HEADER.
set(flags -std=c++20 -w)
foreach(folder IN LISTS INCLUDES)
  list(APPEND flags -I${folder})  # not -isystem: /usr/include among them would hide the compiler's own
endforeach()
get_filename_component(once ${SOURCE} NAME_WE)
set(once ${CMAKE_CURRENT_BINARY_DIR}/${once}_once.h)
file(WRITE ${once} "#include \"${HEADER}\"\n")
set(ENV{CCACHE_BASEDIR} ${BASE})  # as in MusterBuild.cmake
set(ENV{CCACHE_NOHASHDIR} 1)
set(ENV{CCACHE_SLOPPINESS} pch_defines,time_macros,include_file_mtime,include_file_ctime)
execute_process(COMMAND ${CCACHE} ${COMPILER} ${flags} -x c++-header -c ${once} -o ${once}.gch COMMAND_ERROR_IS_FATAL ANY)
list(APPEND flags -fsyntax-only -include ${once})
