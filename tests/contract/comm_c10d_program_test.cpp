// A C++ program that speaks c10d, without a World. Like such a program, this includes only public headers of Muster.
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <exception>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "muster/comm/process_group.h"

namespace {

// What two ranks, threads of this process, do. Throws what a rank threw.
template <typename Body>
void on_two_ranks(const Body& body) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::exception_ptr errors[2];
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank)
    ranks.emplace_back([&, rank] {
      try {
        body(rank, store);
      } catch (...) {
        errors[rank] = std::current_exception();
      }
    });
  for (auto& rank : ranks) rank.join();
  for (const auto& error : errors)
    if (error) std::rethrow_exception(error);
}

TEST(C10dProgram, ReducesInAProcessGroup) {
  on_two_ranks([](int rank, const c10::intrusive_ptr<c10d::Store>& store) {
    const auto group = muster::create_process_group(store, rank, 2, {.name = "program"});
    EXPECT_EQ(group->getRank(), rank);
    EXPECT_EQ(group->getSize(), 2);
    EXPECT_EQ(group->getBackendName(), "muster");
    std::vector<at::Tensor> tensors = {muster::process_heap()->empty({3}).fill_(rank + 1)};
    group->allreduce(tensors)->wait();
    EXPECT_TRUE(at::equal(tensors[0], at::full({3}, 3.0F)));
  });
}

TEST(C10dProgram, GetsC10dsErrorsFromABackend) {
  on_two_ranks([](int rank, const c10::intrusive_ptr<c10d::Store>& store) {
    const auto backend = muster::create_process_group_backend(store, rank, 2);
    EXPECT_EQ(muster::straggler_report(*backend), "");
    std::vector<at::Tensor> none;
    EXPECT_THROW(backend->allreduce(none), c10::ValueError);
    std::vector<at::Tensor> unequal = {at::full({2 + rank}, 1.0F)};
    EXPECT_THROW(backend->allreduce(unequal)->wait(), c10::DistBackendError);
  });
}

}  // namespace
