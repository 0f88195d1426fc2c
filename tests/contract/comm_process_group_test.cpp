// The backend as PyTorch's ProcessGroup uses it: without a World, with c10d's names and errors.
#include "muster/comm/process_group.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <future>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <tuple>

#include "base/text.h"
#include "comm/backends/registry.h"
#include "comm/core/backend.h"
#include "comm/core/members.h"
#include "muster/base/error.h"
#include "muster/store/store.h"
#include "shm/peer_watch.h"
#include "shm/spin.h"
#include "support/patience.h"
#include "support/ranks.h"

namespace muster::test {
namespace {

using namespace std::chrono_literals;
using test::message_of;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using Body = std::function<void(int, const BackendPtr&)>;

// Runs the body in n threads, each with its own backend, all with `store`.
void run(int n, const c10::intrusive_ptr<c10d::Store>& store, std::chrono::milliseconds timeout, const Body& body) {
  std::vector<std::exception_ptr> errors(static_cast<size_t>(n));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < n; ++rank)
    threads.emplace_back([&, rank] {
      try {
        body(rank, create_process_group_backend(store, rank, n, {.timeout = timeout, .name = "test"}));
      } catch (...) {
        errors[static_cast<size_t>(rank)] = std::current_exception();
      }
    });
  for (auto& thread : threads) thread.join();
  for (const auto& error : errors)
    if (error) std::rethrow_exception(error);
}
void run(int n, const Body& body) { run(n, c10::make_intrusive<c10d::HashStore>(), 20s, body); }

float all_reduced(const BackendPtr& backend, bool async = false) {
  std::vector<at::Tensor> tensors = {at::ones({2})};
  c10d::AllreduceOptions options;
  options.asyncOp = async;
  backend->allreduce(tensors, options)->wait();
  return tensors[0][0].item<float>();
}

TEST(ProcessGroup, ReducesAndHasPyTorchsName) {
  run(3, [](int, const BackendPtr& backend) {
    EXPECT_EQ(backend->getBackendName(), "muster");
    EXPECT_EQ(all_reduced(backend), 3);
    EXPECT_EQ(all_reduced(backend, true), 3);
  });
}

TEST(ProcessGroup, WrappedKnowsItsNameAndSequenceNumbers) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto group = create_process_group(store, 0, 1, {.name = "test"});
  EXPECT_EQ(group->getBackendName(), "muster");
  EXPECT_EQ(group->getBackend(c10::DeviceType::CPU)->getBackendName(), "muster");
  const auto before = group->getSequenceNumberForGroup();
  all_reduced(group->getBackend(c10::DeviceType::CPU));
  EXPECT_EQ(group->getSequenceNumberForGroup(), before + 1);
}

// PyTorch does not say how many ranks a host has. One that shares no core with another rank spins when it waits, also
// if its group has ranks on other hosts.
TEST(ProcessGroup, RanksOfOtherHostsDoNotCompeteForCores) {
  const CpuSet first(0b01), second(0b10);
  const std::vector<comm::Member> members = {{.host = 0, .cpus = first},
                                             {.host = 1, .cpus = first},
                                             {.host = 1, .cpus = first},
                                             {.host = 2, .cpus = first},
                                             {.host = 2, .cpus = second}};
  const auto spins = [&](int rank) {
    return shm::spin_for(comm::ranks_of_host(members, rank), comm::cores_of_host(members, rank)).count() > 0;
  };
  EXPECT_TRUE(spins(0));
  EXPECT_FALSE(spins(1));
  EXPECT_FALSE(spins(2));
  EXPECT_TRUE(spins(3));
  EXPECT_TRUE(spins(4));
  EXPECT_EQ(comm::ranks_of_host(members, 0), 1);
  EXPECT_EQ(comm::ranks_of_host(members, 2), 2);
}

TEST(ProcessGroup, AStoreServesOneGroupAfterAnother) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  for (int i = 0; i < 3; ++i)
    run(2, store, 20s, [](int, const BackendPtr& backend) { EXPECT_EQ(all_reduced(backend), 2); });
}

TEST(ProcessGroup, ThrowsC10dsErrors) {
  run(2, [](int rank, const BackendPtr& backend) {
    std::vector<at::Tensor> none, wrong = {at::ones({2 + rank})};
    EXPECT_THROW(backend->allreduce(none, {}), c10::ValueError);
    c10d::AllreduceOptions async;
    async.asyncOp = true;
    EXPECT_THROW(backend->allreduce(none, async), c10::ValueError);
    const auto work = backend->allreduce(wrong, async);
    EXPECT_CONTAINS(message_of<c10::DistBackendError>([&] { work->wait(); }), "not the same on all ranks");
    EXPECT_THROW(work->getFuture()->waitAndThrow(), c10::DistBackendError);
    EXPECT_THROW(all_reduced(backend), c10::DistBackendError);
  });
  const auto store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_THROW(create_process_group_backend(store, 2, 2), c10::ValueError);
  EXPECT_CONTAINS(
      message_of<c10::DistBackendError>([&] { create_process_group_backend(store, 0, 2, {.timeout = 100ms}); }),
      "Timed out waiting 100ms");
}

TEST(ProcessGroup, SaysWhoIsMissingInPyTorchsWords) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::atomic<int> failed{0};
  run(3, store, 20s, [&](int rank, const BackendPtr& backend) {
    c10d::BarrierOptions options;
    options.timeout = 0ms;
    EXPECT_CONTAINS(message_of<c10::DistBackendError>([&] { backend->monitoredBarrier(options, false); }),
                    text("Rank ", rank, " timed out in monitoredBarrier"));
    options.timeout = 200ms;
    if (rank == 0) {
      const auto words = message_of<c10::DistBackendError>([&] { backend->monitoredBarrier(options, true); });
      EXPECT_CONTAINS(words, "Ranks 1, 2 failed to pass monitoredBarrier in 200 ms");
      EXPECT_CONTAINS(words, " Timed out waiting 200ms");
      failed = 1;
      failed.notify_all();
    }
    failed.wait(0);
  });
}

TEST(ProcessGroup, APeerThatEndsIsAClosedConnection) {
  run(2, [](int rank, const BackendPtr& backend) {
    if (rank == 1) return backend->shutdown();
    const auto words = message_of<c10::DistBackendError>([&] { all_reduced(backend); });
    EXPECT_CONTAINS(words, "Connection closed by peer");
    EXPECT_CONTAINS(words, "rank 1 left group 'test'");
  });
}

TEST(ProcessGroup, AnAsynchronousWaitWithALimitThrowsAndGoesOn) {
  std::atomic<int> waited{0};
  run(2, [&](int rank, const BackendPtr& backend) {
    if (rank == 1) {
      waited.wait(0);
      EXPECT_EQ(all_reduced(backend), 2);
      return;
    }
    std::vector<at::Tensor> tensors = {at::ones({2})};
    const auto work = backend->allreduce(tensors, {});
    EXPECT_CONTAINS(message_of<c10::DistBackendError>([&] { work->wait(50ms); }), "Operation timed out!");
    waited = 1;
    waited.notify_all();
    work->wait();
    EXPECT_EQ(tensors[0][0].item<float>(), 2);
  });
}

TEST(ProcessGroup, LeavesAtTheEndWithTheCause) {
  run(1, [](int, const BackendPtr& backend) {
    leave_process_groups("ValueError: a mistake");
    EXPECT_THROW(all_reduced(backend), c10::DistBackendError);
  });
}

// A fork has a copy of a group, which it must not destroy.
TEST(ProcessGroup, ForkDoesNotEndItsParentsMembership) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  BackendPtr one = create_process_group_backend(store, 0, 1);
  const pid_t child = ::fork();
  if (child == 0) {
    one->shutdown();
    leave_process_groups("the child's end");
    one.reset();
    ::_exit(0);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(all_reduced(one), 1);
}

// To wait for a message is to move messages, and those of the parent are not the child's.
TEST(ProcessGroup, AForkCannotWaitForItsParentsMessages) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const BackendPtr one = create_process_group_backend(store, 0, 1);
  std::vector<at::Tensor> in = {at::zeros({100'000})}, out = {at::ones({100'000})};
  const auto work = one->recv(in, 0, 0);
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      work->wait();
    } catch (const std::exception& error) {
      ::_exit(contains(error.what(), "is a fork") ? 0 : 2);
    }
    ::_exit(1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  one->send(out, 0, 0)->wait();
  work->wait();
  EXPECT_TRUE(in[0].equal(out[0]));
}

c10::intrusive_ptr<comm::Backend> backend_of(const std::string& name, const std::shared_ptr<Store>& store, int rank) {
  return comm::create_backend(
      name,
      {.group = {.name = "test", .store_prefix = "test", .store = store, .rank = rank, .size = 2, .timeout = kPatience},
       .host = {.watch = std::make_shared<shm::PeerWatch>()}});
}

// A callback of a future may release the last reference to the backend, in one of the backend's own threads. Then the
// membership ends inside the callback, the peer sees that, and the callback goes on.
class LastReference : public testing::TestWithParam<std::tuple<std::string, c10d::OpType>> {};

TEST_P(LastReference, MayBeReleasedInACallback) {
  const auto& [name, type] = GetParam();
  const auto store = make_memory_store();
  const auto submit = [&type = type](comm::Backend& backend, at::Tensor& tensor) {
    if (type == c10d::OpType::ALLREDUCE) return backend.submit({.kind = comm::OpKind::kAllReduce, .tensor = tensor});
    const bool sends = backend.getRank() == 1;
    return backend.submit(
        {.kind = sends ? comm::OpKind::kSend : comm::OpKind::kRecv, .peer = 1 - backend.getRank(), .tensor = tensor});
  };
  std::promise<void> hooked, released;
  std::thread peer([&, &name = name] {
    const auto backend = backend_of(name, store, 1);
    at::Tensor tensor = at::ones({1000});
    hooked.get_future().wait();
    submit(*backend, tensor)->wait();
    released.get_future().wait();
    EXPECT_THROW(backend->run({.kind = comm::OpKind::kBarrier}), PeerLost);
  });
  at::Tensor tensor = at::ones({1000});
  std::vector<c10::intrusive_ptr<comm::Backend>> owners = {backend_of(name, store, 0)};
  std::thread::id ran_in;
  {
    const auto work = submit(*owners[0], tensor);
    work->getFuture()->addCallback([&](c10::ivalue::Future& done) {
      EXPECT_FALSE(done.hasError());
      ran_in = std::this_thread::get_id();
      owners.clear();
      released.set_value();
    });
  }
  hooked.set_value();
  peer.join();
  EXPECT_NE(ran_in, std::this_thread::get_id()) << "the callback was to run in a thread of the backend";
}

INSTANTIATE_TEST_SUITE_P(Backends, LastReference,
                         testing::Combine(testing::Values("shm", "gloo"),
                                          testing::Values(c10d::OpType::ALLREDUCE, c10d::OpType::RECV)),
                         [](const auto& info) {
                           return std::get<0>(info.param) +
                                  (std::get<1>(info.param) == c10d::OpType::RECV ? "_recv" : "_all_reduce");
                         });

// A message may hold the last reference to its tensor, whose memory is the user's. What the user does when it is
// released may need the backend.
class LastTensor : public testing::TestWithParam<std::string> {};

TEST_P(LastTensor, MayUseTheBackendWhenItIsReleased) {
  const auto store = make_memory_store();
  std::promise<void> posted;
  std::thread peer([&] {
    const auto backend = backend_of(GetParam(), store, 1);
    posted.get_future().wait();
    backend->run({.kind = comm::OpKind::kSend, .peer = 0, .tensor = at::ones({1000})});
    const at::Tensor answer = at::zeros({1});
    backend->run({.kind = comm::OpKind::kRecv, .peer = 0, .tensor = answer});
    EXPECT_EQ(answer.item<float>(), 7);
  });
  const auto backend = backend_of(GetParam(), store, 0);
  std::vector<float> memory(1000);
  std::promise<std::thread::id> released_in;
  {
    const auto release = [&](void*) {
      released_in.set_value(std::this_thread::get_id());
      backend->submit({.kind = comm::OpKind::kSend, .peer = 1, .tensor = at::full({1}, memory[999] * 7)});
    };
    backend->submit({.kind = comm::OpKind::kRecv, .peer = 1, .tensor = at::from_blob(memory.data(), {1000}, release)});
  }
  posted.set_value();
  peer.join();
  EXPECT_NE(released_in.get_future().get(), std::this_thread::get_id())
      << "a thread of the backend was to release the tensor";
}

INSTANTIATE_TEST_SUITE_P(Backends, LastTensor, testing::Values("shm", "gloo"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace muster::test
