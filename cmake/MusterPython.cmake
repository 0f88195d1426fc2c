# Finds the Python that belongs to the libtorch in use, for the module, the tests with torchrun and the benchmarks.
#
# Sets MUSTER_TORCH_PYTHON (empty if there is none) and MUSTER_PYTHON_PROBLEM (empty if an extension module can be built
# for it, otherwise the reason why not). If one can be built, sets MUSTER_PYTHON_INCLUDE and MUSTER_PYTHON_SUFFIX
# (".cpython-311-x86_64-linux-gnu.so").
get_filename_component(torch_prefix ${Torch_DIR}/../../.. ABSOLUTE)
find_program(MUSTER_TORCH_PYTHON python3 HINTS ${torch_prefix}/../../../../bin
             DOC "The Python interpreter whose torch is the libtorch in use")

set(MUSTER_PYTHON_PROBLEM "")
if(NOT MUSTER_TORCH_PYTHON)
  set(MUSTER_PYTHON_PROBLEM "there is no python3")
else()
  execute_process(COMMAND ${MUSTER_TORCH_PYTHON} -c "
import importlib.util, os, sysconfig
torch = importlib.util.find_spec('torch')
print(os.path.realpath(torch.submodule_search_locations[0]) if torch else '')
print(sysconfig.get_path('include'))
print(sysconfig.get_config_var('EXT_SUFFIX'))"
                  OUTPUT_VARIABLE answers OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
  string(REPLACE "\n" ";" answers "${answers}")
  get_filename_component(real_prefix ${torch_prefix} REALPATH)
  if(failed)
    set(MUSTER_PYTHON_PROBLEM "${MUSTER_TORCH_PYTHON} does not run")
  else()
    list(GET answers 0 its_torch)
    list(GET answers 1 MUSTER_PYTHON_INCLUDE)
    list(GET answers 2 MUSTER_PYTHON_SUFFIX)
    if(NOT its_torch STREQUAL real_prefix)
      set(MUSTER_PYTHON_PROBLEM "the torch of ${MUSTER_TORCH_PYTHON} is not the libtorch in use (set MUSTER_TORCH_PYTHON)")
    elseif(NOT EXISTS ${torch_prefix}/lib/libtorch_python.so)
      set(MUSTER_PYTHON_PROBLEM "${torch_prefix}/lib has no libtorch_python.so")
    elseif(NOT EXISTS ${MUSTER_PYTHON_INCLUDE}/Python.h)
      set(MUSTER_PYTHON_PROBLEM "there is no ${MUSTER_PYTHON_INCLUDE}/Python.h (on Debian: apt-get install python3-dev)")
    endif()
  endif()
endif()
set(MUSTER_PYTHON_TORCH_LIBRARY ${torch_prefix}/lib/libtorch_python.so)
