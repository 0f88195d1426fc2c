// Muster for code that speaks c10d: a c10d::Backend, or a c10d::ProcessGroup, of the ranks that share a c10d::Store.
//
//   #include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
//   #include <torch/csrc/distributed/c10d/TCPStore.hpp>
//
//   auto group = muster::create_process_group(c10::make_intrusive<c10d::TCPStore>(host, tcp_options), rank, size);
//   std::vector<at::Tensor> tensors = {gradient};
//   group->allreduce(tensors)->wait();
//
// There is no World. A program that has one needs none of this: Group::c10d_backend() is the backend of a Group.
// torch.distributed gets its groups here when a job calls init_process_group("muster") (python/README.md).
//
// The groups differ from a World's in this: the backend is called "muster", chosen as by "auto" (docs/backends.md), and
// it throws c10d's errors: c10::ValueError for what is InvalidArgument elsewhere, c10::DistBackendError for the rest.
//
// The ranks meet through the store. A group on one host does not use it afterwards; a group over several hosts also
// writes its failures and departures to it. A store may be used for one group after another: each rank counts the
// groups that it makes from the store, so keys of an earlier group are not mistaken for those of the next.
//
// One watch over peers serves all of a process's groups. A fork of the process (a DataLoader's worker) has copies of
// its groups, which it cannot use and must not destroy, because the memberships belong to its parent. The copies stay
// in the fork's memory.
//
// Thread-safety: all functions. Ranks may be threads of one process, with a HashStore.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "muster/comm/heap.h"

namespace c10d {
class Backend;
class ProcessGroup;
class Store;
}  // namespace c10d

namespace muster {

struct ProcessGroupOptions {
  std::chrono::milliseconds timeout{300'000};  // of the start, and of each operation without a timeout of its own
  std::string name = "world";                  // for messages
  // By rank in the group: the rank in the job, by which messages name it. Empty: the same.
  std::vector<int> global_ranks = {};
};

// Waits for all ranks. Throws c10::ValueError and c10::DistBackendError.
c10::intrusive_ptr<c10d::Backend> create_process_group_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                               int size, const ProcessGroupOptions& options = {});

// A ProcessGroup for CPU tensors around such a backend. PyTorch's own class would call itself "custom" (in DDP's
// logging, in messages), and would have no sequence numbers.
c10::intrusive_ptr<c10d::ProcessGroup> create_process_group(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                            int size, const ProcessGroupOptions& options = {});

// The heap of this process, which all of these groups map. It is made by the first call, and a fork gets one of its
// own.
std::shared_ptr<Heap> process_heap();

// Group::straggler_report() of such a backend. c10::ValueError for a backend that is not Muster's.
std::string straggler_report(const c10d::Backend& backend, std::chrono::nanoseconds at_least = {});

// For the end of the process: leaves all of these groups that still exist. Peers that need this rank later get `cause`,
// or the news that it left. Does nothing in a fork.
void leave_process_groups(const std::string& cause = {});

}  // namespace muster
