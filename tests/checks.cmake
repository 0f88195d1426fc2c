# Checks of the tree itself, and the test that an outside project can use Muster. Included by tests/CMakeLists.txt.

# The tests that the sanitizers' trees run. Their names have a prefix: "tsan/Store.Wait".
set(MUSTER_TEST_PREFIX "")
set(MUSTER_TEST_FILTER "")
if(MUSTER_SANITIZE)
  set(MUSTER_TEST_PREFIX asan/)
  # Tests that fork are left out: a child that is forked while another thread allocates waits forever for the
  # allocator's lock in GCC 12's sanitizers. Such a test has Fork in its name, or its suite ends in Process, or its
  # parameter in _processes. The grid of all sizes and dtypes runs only for shm: gloo's code is part of libtorch, which
  # is not instrumented.
  set(MUSTER_TEST_FILTER
      "-*Process.*:*_processes:SecretTest.TheCommand*:*Fork*:*AnotherUser*:Comm/Collectives.*gloo*:Comm/Collectives.*hier*:Comm/Values.*gloo*:Comm/Values.*hier*:Hosts.Every*")
endif()
if(MUSTER_SANITIZE STREQUAL "thread")
  set(MUSTER_TEST_PREFIX tsan/)
endif()

if(MUSTER_SANITIZE)
  return()
endif()
find_program(MUSTER_CLANG_FORMAT clang-format)

# muster_check(name [labels…] COMMAND command…)
function(muster_check name)
  cmake_parse_arguments(arg "" "" "COMMAND" ${ARGN})
  add_test(NAME check.${name} COMMAND ${arg_COMMAND})
  set_tests_properties(check.${name} PROPERTIES LABELS "checks;${arg_UNPARSED_ARGUMENTS}" TIMEOUT ${MUSTER_TEST_TIMEOUT})
endfunction()
muster_check(layers COMMAND Python3::Interpreter ${PROJECT_SOURCE_DIR}/tools/check_layers.py)
muster_check(layers_check COMMAND Python3::Interpreter ${PROJECT_SOURCE_DIR}/tests/dev/check_layers_test.py)
muster_check(includes COMMAND Python3::Interpreter ${PROJECT_SOURCE_DIR}/tools/check_includes.py)
muster_check(includes_check COMMAND Python3::Interpreter ${PROJECT_SOURCE_DIR}/tests/dev/check_includes_test.py)
muster_check(words COMMAND Python3::Interpreter ${PROJECT_SOURCE_DIR}/tools/check_words.py)
muster_check(words_check COMMAND Python3::Interpreter ${PROJECT_SOURCE_DIR}/tests/dev/check_words_test.py)
muster_check(names_in_docs COMMAND Python3::Interpreter ${PROJECT_SOURCE_DIR}/tests/dev/names_in_docs_test.py)
muster_check(figures COMMAND Python3::Interpreter ${PROJECT_SOURCE_DIR}/tests/dev/figures_test.py)
muster_check(bench_rounds COMMAND Python3::Interpreter ${PROJECT_SOURCE_DIR}/tests/dev/bench_rounds_test.py)
muster_check(pack_corpus COMMAND Python3::Interpreter ${PROJECT_SOURCE_DIR}/tests/dev/pack_corpus_test.py)
muster_check(dev COMMAND Python3::Interpreter ${PROJECT_SOURCE_DIR}/tests/dev/dev_test.py)
muster_check(model COMMAND ${PROJECT_SOURCE_DIR}/tests/model/run.sh --quick)
muster_check(model_whole full COMMAND ${PROJECT_SOURCE_DIR}/tests/model/run.sh)
set_tests_properties(check.model check.model_whole PROPERTIES SKIP_RETURN_CODE 77 COST 100)  # see --slow in discover.py
# The gate builds no tree with AddressSanitizer, so at least its configuration must not break unseen.
muster_check(asan_tree COMMAND ${CMAKE_COMMAND} --preset asan --fresh -S ${PROJECT_SOURCE_DIR}
                               -B ${CMAKE_CURRENT_BINARY_DIR}/asan_tree -D Torch_DIR=${Torch_DIR}
                               -D CMAKE_CXX_COMPILER=${CMAKE_CXX_COMPILER})
if(MUSTER_CLANG_FORMAT)
  muster_check(format COMMAND ${PROJECT_SOURCE_DIR}/dev fmt --check)
endif()

# muster_consumer_test(way component [labels…]): builds tests/consumer as an outside project; see consumer.cmake there.
function(muster_consumer_test way component)
  set(name consumer.${way}_${component})
  add_test(NAME ${name}
           COMMAND ${CMAKE_COMMAND} -D WAY=${way} -D COMPONENT=${component} -D TORCH_DIR=${Torch_DIR}
                   -D MUSTER_SOURCE_DIR=${PROJECT_SOURCE_DIR} -D MUSTER_BINARY_DIR=${PROJECT_BINARY_DIR}
                   -D WORK_DIR=${CMAKE_CURRENT_BINARY_DIR}/${name} -D COMPILER=${CMAKE_CXX_COMPILER}
                   "-DLAUNCHER=${CMAKE_CXX_COMPILER_LAUNCHER}"
                   -P ${PROJECT_SOURCE_DIR}/tests/consumer/consumer.cmake)
  set_tests_properties(${name} PROPERTIES LABELS "consumer;${ARGN}" TIMEOUT 1800)
endfunction()
muster_consumer_test(find_package core)
muster_consumer_test(add_subdirectory core full)  # compiles everything that needs no libtorch once more
if(TARGET muster)
  muster_consumer_test(find_package muster)
  muster_consumer_test(add_subdirectory muster full)  # compiles all of Muster once more
endif()
