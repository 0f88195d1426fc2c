# Checks of the tree itself, and the test that an outside project can use Muster. Included by tests/CMakeLists.txt.

# Binaries whose ranks are threads: these also run under the sanitizers. The others are not built there.
set(MUSTER_SANITIZED_TESTS core_tests comm_tests train_tests)

# In the trees of the sanitizers the tests' names say so: "tsan/Store.Wait". Tests with Process, Fork or AnotherUser in their name
# stay out: a child forked while another thread allocates waits for ever for the lock of the allocator of GCC 12's sanitizers.
set(MUSTER_TEST_PREFIX "")
set(MUSTER_TEST_FILTER "")
if(MUSTER_SANITIZE)
  set(MUSTER_TEST_PREFIX asan/)
  # And the grid of all sizes and dtypes runs there for shm alone: gloo's part of it is libtorch's, which is not instrumented.
  set(MUSTER_TEST_FILTER
      "-*Process*:*process*:*Fork*:*AnotherUser*:Comm/Collectives.*gloo*:Comm/Collectives.*hier*:Comm/Values.*gloo*:Comm/Values.*hier*:Hosts.Every*")
endif()
if(MUSTER_SANITIZE STREQUAL "thread")
  set(MUSTER_TEST_PREFIX tsan/)
endif()

if(MUSTER_SANITIZE)
  return()
endif()
find_package(Python3 COMPONENTS Interpreter REQUIRED)
find_program(MUSTER_CLANG_FORMAT clang-format)

# muster_check(name command…)
function(muster_check name)
  add_test(NAME check.${name} COMMAND ${ARGN})
  set_tests_properties(check.${name} PROPERTIES LABELS checks TIMEOUT 120)
endfunction()
muster_check(layers Python3::Interpreter ${PROJECT_SOURCE_DIR}/tools/check_layers.py)
muster_check(layers_check Python3::Interpreter ${PROJECT_SOURCE_DIR}/tests/dev/check_layers_test.py)
muster_check(dev Python3::Interpreter ${PROJECT_SOURCE_DIR}/tests/dev/dev_test.py)
muster_check(model ${PROJECT_SOURCE_DIR}/tests/model/run.sh)
set_tests_properties(check.model PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT 600)
if(MUSTER_CLANG_FORMAT)
  muster_check(format ${PROJECT_SOURCE_DIR}/dev fmt --check)
endif()

# muster_consumer_test(way component [labels…]): builds tests/consumer as an outside project; see consumer.cmake there.
function(muster_consumer_test way component)
  set(name consumer.${way}_${component})
  add_test(NAME ${name}
           COMMAND ${CMAKE_COMMAND} -D WAY=${way} -D COMPONENT=${component} -D TORCH_DIR=${Torch_DIR}
                   -D MUSTER_SOURCE_DIR=${PROJECT_SOURCE_DIR} -D MUSTER_BINARY_DIR=${PROJECT_BINARY_DIR}
                   -D WORK_DIR=${CMAKE_CURRENT_BINARY_DIR}/${name} -D COMPILER=${CMAKE_CXX_COMPILER}
                   -D CCACHE=${CCACHE_PROGRAM}
                   -P ${PROJECT_SOURCE_DIR}/tests/consumer/consumer.cmake)
  set_tests_properties(${name} PROPERTIES LABELS "consumer;${ARGN}" TIMEOUT 1200)
endfunction()
muster_consumer_test(find_package core)
muster_consumer_test(add_subdirectory core)
if(TARGET muster)
  muster_consumer_test(find_package muster)
  muster_consumer_test(add_subdirectory muster long)  # compiles all of Muster once more
endif()
