// The module muster._muster: what muster/__init__.py needs of C++. Only torch's own types cross the border, which
// torch's Python registers.
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/process_group.h"

namespace {

namespace py = pybind11;
using std::chrono::milliseconds;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

BackendPtr create_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, milliseconds timeout,
                          const std::string& name) {
  return muster::comm::create_process_group_backend(store, rank, size, {.timeout = timeout, .name = name});
}

c10::intrusive_ptr<c10d::ProcessGroup> create_process_group(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                            int size, milliseconds timeout, const std::string& name) {
  return muster::comm::create_process_group(store, rank, size, {.timeout = timeout, .name = name});
}

void monitored_barrier(const BackendPtr& backend, milliseconds timeout, bool wait_all_ranks) {
  c10d::BarrierOptions options;
  options.timeout = timeout;
  backend->monitoredBarrier(options, wait_all_ranks);
}

}  // namespace

PYBIND11_MODULE(_muster, module) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  module.def("create_backend", &create_backend, py::arg("store"), py::arg("rank"), py::arg("size"),
             py::arg("timeout") = milliseconds(300'000), py::arg("name") = "world", no_gil);
  module.def("create_process_group", &create_process_group, py::arg("store"), py::arg("rank"), py::arg("size"),
             py::arg("timeout"), py::arg("name"), no_gil);
  module.def("monitored_barrier", &monitored_barrier, py::arg("backend"), py::arg("timeout"),
             py::arg("wait_all_ranks") = false, no_gil);
  module.def("leave_process_groups", &muster::comm::leave_process_groups, py::arg("cause"), no_gil);
}
