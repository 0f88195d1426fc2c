# cmake -D COMPILER=… -D CCACHE=… -D BASE=… -D INCLUDES=… -D SOURCE=… -P: each variant of SOURCE must fail with its
# message, and the plain one compile.
set(HEADER muster/rpc/call.h)
include(${CMAKE_CURRENT_LIST_DIR}/misuse.cmake)

function(compile variant says)
  execute_process(COMMAND ${COMPILER} ${flags} -D${variant} ${SOURCE} RESULT_VARIABLE failed ERROR_VARIABLE text)
  if(NOT says)
    if(failed)
      message(FATAL_ERROR "what can be sent does not compile:\n${text}")
    endif()
  elseif(NOT failed)
    message(FATAL_ERROR "${variant} compiles")
  elseif(NOT text MATCHES "${says}")
    message(FATAL_ERROR "${variant} does not say '${says}':\n${text}")
  endif()
endfunction()

compile(PLAIN "")
compile(ARGUMENT "MSGPACK_DEFINE\\(its, members\\)")
compile(DECODED "MSGPACK_DEFINE\\(its, members\\)")
compile(OUT_PARAMETER "return the value instead")
compile(OBJECT "call it on an RRef")
compile(COUNT "more or fewer arguments")
