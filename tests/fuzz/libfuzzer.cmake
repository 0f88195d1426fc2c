# The parsers of untrusted bytes under libFuzzer and AddressSanitizer, if clang is installed. Each has two tests:
#
#   <label>.libfuzzer_<parser>_briefly   in the gate: the same few seconds of inputs in each run
#   <label>.libfuzzer_<parser>           `full`: other inputs in each run, for MUSTER_FUZZ_SECONDS
#
# Both begin with the parser's corpus (fuzz/corpus/<parser>/ and <parser>.tar.xz). The inputs that the long one collects
# stay in the build folder, in corpus/<parser>; fuzz/pack_corpus.py makes the archive from them.
find_program(MUSTER_CLANG NAMES clang++-16 clang++)
add_custom_target(libfuzzers)
if(NOT MUSTER_CLANG OR MUSTER_SANITIZE)
  return()
endif()

set(libfuzzer_folder ${CMAKE_CURRENT_BINARY_DIR}/libfuzzer)
set(libfuzzer_flags -std=c++20 -O1 -g1 -fsanitize=fuzzer,address -Wno-everything)
set(libfuzzer_includes -I${PROJECT_SOURCE_DIR}/include -I${PROJECT_SOURCE_DIR}/src -I${CMAKE_CURRENT_SOURCE_DIR}
  -isystem ${torch_prefix}/include -isystem ${torch_prefix}/include/torch/csrc/api/include)
set(libfuzzer_objects)  # that have a rule
file(GLOB libfuzzer_kept CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/fuzz/corpus/*)

# Adds the program libfuzzer_<name> of these SOURCES of src/ and of fuzz/libfuzzer_<name>.cpp.
function(muster_libfuzzer name)
  cmake_parse_arguments(arg "" "" "SOURCES;LIBRARIES;AFTER" ${ARGN})
  set(program ${CMAKE_CURRENT_BINARY_DIR}/libfuzzer_${name})
  list(TRANSFORM arg_SOURCES PREPEND ${PROJECT_SOURCE_DIR}/src/ OUTPUT_VARIABLE sources)
  list(APPEND sources ${CMAKE_CURRENT_SOURCE_DIR}/fuzz/libfuzzer_${name}.cpp)
  set(objects)
  foreach(source IN LISTS sources)
    cmake_path(NORMAL_PATH source)
    cmake_path(RELATIVE_PATH source BASE_DIRECTORY ${PROJECT_SOURCE_DIR} OUTPUT_VARIABLE place)
    set(object ${libfuzzer_folder}/${place}.o)
    list(APPEND objects ${object})
    if(object IN_LIST libfuzzer_objects)
      continue()
    endif()
    list(APPEND libfuzzer_objects ${object})
    cmake_path(GET object PARENT_PATH folder)
    file(MAKE_DIRECTORY ${folder})
    add_custom_command(OUTPUT ${object}
      COMMAND ${CMAKE_CXX_COMPILER_LAUNCHER} ${MUSTER_CLANG} ${libfuzzer_flags} ${libfuzzer_includes} -MD -MF ${object}.d
              -c ${source} -o ${object}
      DEPENDS ${source} DEPFILE ${object}.d COMMENT "Compiling ${place} with clang for libFuzzer")
  endforeach()
  set(libfuzzer_objects ${libfuzzer_objects} PARENT_SCOPE)
  add_custom_command(OUTPUT ${program}
    COMMAND ${MUSTER_CLANG} ${libfuzzer_flags} ${objects} ${arg_LIBRARIES} -o ${program}
    DEPENDS ${objects} ${arg_AFTER} COMMENT "Linking libfuzzer_${name} with clang")
  add_custom_target(build_libfuzzer_${name} ALL DEPENDS ${program})
  add_dependencies(libfuzzers build_libfuzzer_${name})
endfunction()

# Adds the two tests of a parser, which is in the program libfuzzer_<program>.
function(muster_libfuzzer_tests parser program label seconds)
  set(test ${label}.libfuzzer_${parser})
  set(kept ${CMAKE_CURRENT_SOURCE_DIR}/fuzz/corpus/${parser})
  set(folders)
  if(kept IN_LIST libfuzzer_kept)
    list(APPEND folders ${kept})
  endif()
  if("${kept}.tar.xz" IN_LIST libfuzzer_kept)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${kept}.tar.xz)
    set(unpacked ${libfuzzer_folder}/kept/${parser})
    file(REMOVE_RECURSE ${unpacked})
    file(ARCHIVE_EXTRACT INPUT ${kept}.tar.xz DESTINATION ${unpacked})
    list(APPEND folders ${unpacked})
  endif()
  # The first folder is where libFuzzer writes new inputs, and the program the parser's seeds.
  set(brief ${libfuzzer_folder}/brief/${parser})
  set(long ${CMAKE_CURRENT_BINARY_DIR}/corpus/${parser})
  file(MAKE_DIRECTORY ${brief} ${long})
  set(command ${CMAKE_CURRENT_BINARY_DIR}/libfuzzer_${program} -max_len=65536 -rss_limit_mb=2048 -print_final_stats=1)
  add_test(NAME ${test}_briefly COMMAND sh -c "rm -rf \"$0\" && mkdir -p \"$0\" && exec \"$@\""
    ${brief} ${command} -seed=1 -max_total_time=2 ${brief} ${folders})
  add_test(NAME ${test} COMMAND sh -c "exec \"$@\" -max_total_time=\${MUSTER_FUZZ_SECONDS:-${seconds}}"
    sh ${command} ${long} ${folders})
  set_tests_properties(${test}_briefly PROPERTIES TIMEOUT ${MUSTER_TEST_TIMEOUT} LABELS ${label})
  set_tests_properties(${test} PROPERTIES TIMEOUT 4500 LABELS "${label};full")
  set_property(TEST ${test} ${test}_briefly APPEND PROPERTY ENVIRONMENT MUSTER_FUZZ_PARSER=${parser})
endfunction()

muster_libfuzzer(frame SOURCES transport/tcp/frame.cpp transport/piece.cpp base/error.cpp)
muster_libfuzzer_tests(frame frame transport 600)

# The archives contain the sources that the fuzzer instruments, too. The linker takes the first definition, which is ours.
set(torch_libraries $<TARGET_FILE:muster> $<TARGET_FILE:muster_core> -Wl,--allow-multiple-definition -L${torch_prefix}/lib
  -ltorch_cpu -lc10 -ltorch -Wl,-rpath,${torch_prefix}/lib $<TARGET_FILE:hwy::hwy> -lssl -lcrypto -lz)
muster_libfuzzer(rpc
  SOURCES rpc/values/staging.cpp rpc/values/read_tensors.cpp rpc/values/write_tensors.cpp rpc/values/quantized.cpp rpc/values/payload.cpp rpc/values/errors.cpp base/error.cpp
  LIBRARIES ${torch_libraries} AFTER muster muster_core)
muster_libfuzzer_tests(rpc rpc rpc 600)

# One program for all other parsers.
muster_libfuzzer(parsers
  SOURCES base/cores.cpp checkpoint/container.cpp checkpoint/safetensors.cpp checkpoint/tensor_header.cpp
          checkpoint/torch_pickle.cpp checkpoint/unpickler.cpp comm/kit/failure_note.cpp comm/core/members.cpp
          comm/wire/wire_collectives.cpp comm/wire/wire_messages.cpp comm/world/meeting.cpp data/idx.cpp
          launch/black_box/black_box_sources.cpp launch/ranks/error_file.cpp launch/jobs/ledger_line.cpp launch/rendezvous/rendezvous_plan.cpp
          shm/black_box_reader.cpp store/etcd/etcd_answers.cpp store/served/protocol.cpp transport/tcp/hello.cpp
          ../tests/fuzz/core_parsers.cpp ../tests/fuzz/torch_parsers.cpp ../tests/fuzz/wire_parser.cpp
  LIBRARIES ${torch_libraries} AFTER muster muster_core)
foreach(parser IN ITEMS store exchange workers cpus etcd black_box black_box_file plan error_file ledger members
                       failure_note object idx snapshot safetensors torch_pickle wire)
  muster_libfuzzer_tests(${parser} parsers core 120)
endforeach()
