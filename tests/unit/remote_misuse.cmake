# cmake -D COMPILER=… -D CCACHE=… -D BASE=… -D INCLUDES=… -D SOURCE=… -P: SOURCE must fail with all of these messages.
# One run of the compiler, because each takes seconds.
set(HEADER muster/remote/parallelize.h)
include(${CMAKE_CURRENT_LIST_DIR}/misuse.cmake)
execute_process(COMMAND ${COMPILER} ${flags} ${SOURCE} RESULT_VARIABLE failed ERROR_VARIABLE text)
if(NOT failed)
  message(FATAL_ERROR "${SOURCE} compiles")
endif()
foreach(says
    "more or fewer arguments than the function. Options come last"
    "an argument is not of its parameter's type"
    "std::vector of RemotePart of their types"
    "remote_sync_call<&function, Type>"
    "Give a reducer of your own"
    "the mean: not of integers"
    "can only be moved: use rpc::async"
    "call it through the object's RRef")
  string(FIND "${text}" "${says}" found)
  if(found EQUAL -1)
    message(FATAL_ERROR "the compiler does not say '${says}':\n${text}")
  endif()
endforeach()
