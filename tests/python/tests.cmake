# The tests of the Python module: unittest, one program a test of ctest. Included by tests/CMakeLists.txt.
#
# They measure time and use several processes, so each runs alone.
if(NOT MUSTER_HAS_PYTHON)
  return()
endif()

# muster_python_test(name program [arguments…])
function(muster_python_test name program)
  add_test(NAME python.${name} COMMAND ${MUSTER_TORCH_PYTHON} -W ignore ${CMAKE_CURRENT_SOURCE_DIR}/python/${program} ${ARGN})
  set_tests_properties(python.${name} PROPERTIES
    LABELS python TIMEOUT 300 RUN_SERIAL ON SKIP_RETURN_CODE 77
    ENVIRONMENT "PYTHONPATH=${PROJECT_BINARY_DIR}/python;PYTHONDONTWRITEBYTECODE=1;OMP_NUM_THREADS=1;MUSTER_COMMAND=$<TARGET_FILE:muster_command>")
endfunction()
muster_python_test(backend backend_test.py)
muster_python_test(collectives collectives_test.py)
muster_python_test(training training_test.py)
muster_python_test(launchers launchers_test.py)
muster_python_test(trainers trainers_test.py)
muster_python_test(pytorch pytorch_tests.py)
muster_python_test(pytorch_8 pytorch_tests.py --ranks 8)
set_tests_properties(python.pytorch_8 PROPERTIES LABELS "python;long" TIMEOUT 900)
