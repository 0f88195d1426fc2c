// The module muster._muster: what muster/__init__.py needs from C++. Arguments and results have only torch's own types,
// which torch's Python registers.
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/thread.h"
#include "comm/core/descriptor.h"
#include "muster/base/error.h"
#include "muster/comm/process_group.h"

namespace {

namespace py = pybind11;
using std::chrono::milliseconds;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

BackendPtr create_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, milliseconds timeout,
                          const std::string& name, const std::vector<int>& global_ranks) {
  return muster::create_process_group_backend(store, rank, size,
                                              {.timeout = timeout, .name = name, .global_ranks = global_ranks});
}

c10::intrusive_ptr<c10d::ProcessGroup> create_process_group(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                            int size, milliseconds timeout, const std::string& name,
                                                            const std::vector<int>& global_ranks) {
  return muster::create_process_group(store, rank, size,
                                      {.timeout = timeout, .name = name, .global_ranks = global_ranks});
}

void monitored_barrier(const BackendPtr& backend, milliseconds timeout, bool wait_all_ranks) {
  c10d::BarrierOptions options;
  options.timeout = timeout;
  backend->monitoredBarrier(options, wait_all_ranks);
}

std::string straggler_report(const BackendPtr& backend, milliseconds at_least) {
  return muster::straggler_report(*backend, at_least);
}

at::Tensor empty(const std::vector<int64_t>& size, at::ScalarType dtype) {
  try {
    return muster::process_heap()->empty(size, dtype);
  } catch (const muster::Unavailable& error) {
    throw c10::OutOfMemoryError({__func__, __FILE__, __LINE__}, error.what());
  }
}

bool is_on_heap(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() && tensor.is_cpu() &&
         muster::Heap::allocated(tensor.storage().data_ptr());
}

std::string& torch_folder() {
  static auto* const folder = new std::string;
  return *folder;
}

// The call site in Python, for example "train.py:17": the innermost frame of this thread that is not torch's own. "" on
// a thread that does not belong to Python.
std::string calling_line() {
  if (!Py_IsInitialized() || !PyGILState_GetThisThreadState()) return {};
  const py::gil_scoped_acquire gil;
  PyFrameObject* const innermost = PyEval_GetFrame();
  auto frame = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(innermost));
  while (frame) {
    auto* const here = reinterpret_cast<PyFrameObject*>(frame.ptr());
    const auto code = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(here)));
    const auto file = py::cast<std::string>(code.attr("co_filename"));
    if (torch_folder().empty() || !file.starts_with(torch_folder()))
      return file.substr(file.find_last_of('/') + 1) + ":" + std::to_string(PyFrame_GetLineNumber(here));
    frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(here)));
  }
  return {};
}

}  // namespace

PYBIND11_MODULE(_muster, module) {
  muster::comm::set_site_finder(&calling_line);
  muster::set_interpreter_lock(
      []() -> void* { return Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr; },
      [](void* held) { PyEval_RestoreThread(static_cast<PyThreadState*>(held)); });
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  module.def("create_backend", &create_backend, py::arg("store"), py::arg("rank"), py::arg("size"),
             py::arg("timeout") = milliseconds(300'000), py::arg("name") = "world",
             py::arg("global_ranks") = std::vector<int>(), no_gil);
  module.def("create_process_group", &create_process_group, py::arg("store"), py::arg("rank"), py::arg("size"),
             py::arg("timeout"), py::arg("name"), py::arg("global_ranks") = std::vector<int>(), no_gil);
  module.def("empty", &empty, py::arg("size"), py::arg("dtype"), no_gil);
  module.def("is_on_heap", &is_on_heap, py::arg("tensor"));
  module.def(
      "set_torch_folder", [](std::string folder) { torch_folder() = std::move(folder); }, py::arg("folder"));
  module.attr("torch_version") = TORCH_VERSION;
  module.def("monitored_barrier", &monitored_barrier, py::arg("backend"), py::arg("timeout"),
             py::arg("wait_all_ranks") = false, no_gil);
  module.def("straggler_report", &straggler_report, py::arg("backend"), py::arg("at_least"), no_gil);
  module.def("leave_process_groups", &muster::leave_process_groups, py::arg("cause"), no_gil);
}
