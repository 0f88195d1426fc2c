# The tests of the Python module, which use unittest. One process runs several files, because importing torch takes
# seconds. Included by tests/CMakeLists.txt.
if(NOT MUSTER_HAS_PYTHON)
  return()
endif()

# muster_python_test(name [full] FILES names… | COMMAND program [arguments…]) adds a test. With `full`, ./dev test
# leaves it out.
function(muster_python_test name)
  cmake_parse_arguments(arg "full" "" "COMMAND;FILES" ${ARGN})
  if(arg_FILES)
    set(arg_COMMAND -m unittest -v ${arg_FILES})
  endif()
  add_test(NAME python.${name} COMMAND ${MUSTER_TORCH_PYTHON} -W ignore ${arg_COMMAND}
           WORKING_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR}/python)
  set_tests_properties(python.${name} PROPERTIES
    LABELS "python$<$<BOOL:${arg_full}>:;full>" TIMEOUT ${MUSTER_TEST_TIMEOUT} SKIP_RETURN_CODE 77
    ENVIRONMENT "PYTHONPATH=${PROJECT_BINARY_DIR}/python;OMP_NUM_THREADS=1;MUSTER_COMMAND=$<TARGET_FILE:muster_command>;MUSTER_BUILD_DIR=${PROJECT_BINARY_DIR}")
endfunction()
muster_python_test(operations FILES backend_test collectives_test interface_test lost_test processes_test)
muster_python_test(models FILES models_test ways_test training_test)
muster_python_test(launchers COMMAND launchers_test.py)
# See --slow in discover.py. The second one begins later, when the first has
# compiled most of torch's modules.
set_tests_properties(python.models PROPERTIES COST 100)
set_tests_properties(python.launchers PROPERTIES COST 90)
muster_python_test(wheel full COMMAND wheel_test.py)
muster_python_test(trainers full COMMAND trainers_test.py)
muster_python_test(pytorch full COMMAND pytorch_tests.py)
muster_python_test(pytorch_8 full COMMAND pytorch_tests.py --ranks 8)
