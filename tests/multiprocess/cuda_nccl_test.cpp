// The nccl backend gives on a CUDA device what other backends give on the CPU, and ends when a rank does.
#include <gtest/gtest.h>
#include <torch/cuda.h>

#include <csignal>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "base/text.h"
#include "multiprocess/cuda_fixture.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"
#include "muster/comm/objects.h"
#include "muster/comm/world.h"
#include "support/forked.h"
#include "support/patience.h"
#include "support/ranks.h"

namespace muster::test::cuda {
namespace {

using Nccl = Cuda;

// An operation, given tensors on a device; returns its results.
using Operation = std::function<Tensors(World&, const std::function<Tensor(std::vector<int64_t>)>&)>;

const std::map<std::string, Operation>& operations() {
  static const std::map<std::string, Operation> all = [] {
    std::map<std::string, Operation> map;
    for (const ReduceOp op : {ReduceOp::SUM, ReduceOp::AVG, ReduceOp::MIN, ReduceOp::MAX, ReduceOp::PRODUCT}) {
      const std::string name = text(static_cast<int>(op));
      map["all_reduce " + name] = [op](World&, const auto& given) {
        const Tensor x = given({3, 5});
        all_reduce(x, {.op = op});
        return Tensors{x};
      };
      map["reduce " + name] = [op](World& world, const auto& given) {
        const Tensor x = given({7});
        reduce(x, 1, {.op = op});
        return world.rank() == 1 ? Tensors{x} : Tensors{};
      };
      map["reduce_scatter " + name] = [op](World& world, const auto& given) {
        const Tensor one = given({4}), list = given({4});
        reduce_scatter_tensor(one, given({4L * world.world_size()}), {.op = op});
        Tensors parts;
        for (int r = 0; r < world.world_size(); ++r) parts.push_back(given({4}) + r);
        reduce_scatter(list, parts, {.op = op});
        return Tensors{one, list};
      };
    }
    map["all_reduce of a transposed tensor"] = [](World&, const auto& given) {
      const Tensor x = given({6, 4}).t();
      all_reduce(x);
      return Tensors{x};
    };
    map["all_reduce_async of several"] = [](World&, const auto& given) {
      const Tensors all{given({10}), given({1}), given({3, 3})};
      std::vector<Work> works;
      for (const Tensor& x : all) works.push_back(all_reduce_async(x));
      for (Work& work : works) work.wait();
      return all;
    };
    map["all_reduce_coalesced"] = [](World&, const auto& given) {
      const Tensors all{given({10}), given({1}), given({3, 3})};
      all_reduce_coalesced(all);
      return all;
    };
    map["broadcast"] = [](World&, const auto& given) {
      const Tensor x = given({2, 3}), y = given({4, 2}).t(), nothing = given({0});
      broadcast(x, 1);
      broadcast(y, 0);
      broadcast(nothing, 0);
      return Tensors{x, y, nothing};
    };
    map["all_gather"] = [](World& world, const auto& given) {
      const Tensor whole = given({world.world_size() * 6L});
      all_gather_into_tensor(whole, given({2, 3}));
      Tensors list;
      for (int r = 0; r < world.world_size(); ++r) list.push_back(given({5}));
      all_gather(list, given({5}));
      list.push_back(whole);
      return list;
    };
    map["gather and scatter"] = [](World& world, const auto& given) {
      Tensors all, parts;
      for (int r = 0; r < world.world_size(); ++r) {
        if (world.rank() == 1) all.push_back(given({3}));
        if (world.rank() == 0) parts.push_back(given({4}) * (r + 1));
      }
      gather(given({3}), all, 1);
      const Tensor part = given({4});
      scatter(part, parts, 0);
      all.push_back(part);
      return all;
    };
    map["all_to_all"] = [](World& world, const auto& given) {
      const int64_t n = world.world_size(), mine = world.rank() + 1;
      const Tensor equal = given({2 * n});
      all_to_all_single(equal, given({2 * n}));
      // Rank r gives r + 1 rows to each.
      std::vector<int64_t> rows;
      for (int64_t r = 0; r < n; ++r) rows.push_back(r + 1);
      const Tensor unequal = given({n * (n + 1) / 2, 3});
      all_to_all_single(unequal, given({n * mine, 3}),
                        {.output_splits = rows, .input_splits = std::vector<int64_t>(static_cast<size_t>(n), mine)});
      Tensors outputs, inputs;
      for (int64_t r = 0; r < n; ++r) {
        outputs.push_back(given({r + 1}));
        inputs.push_back(given({mine}));
      }
      all_to_all(outputs, inputs);
      outputs.insert(outputs.end(), {equal, unequal});
      return outputs;
    };
    map["messages"] = [](World& world, const auto& given) {
      const Tensor x = given({100}), got = given({100}) * 0;
      if (world.rank() == 0) send(x, 1);
      if (world.rank() == 1) recv(got, 0);
      const int next = (world.rank() + 1) % world.world_size(),
                last = (world.rank() + world.world_size() - 1) % world.world_size();
      const Tensor turned = given({4, 3}).t() * 0;
      for (Work& work : batch_isend_irecv({{P2POp::kSend, given({4, 3}).t() + 1, next}, {P2POp::kRecv, turned, last}}))
        work.wait();
      return Tensors{got, turned};
    };
    return map;
  }();
  return all;
}

TEST_F(Nccl, OperationsGiveWhatTheyGiveOnTheCpu) {
  on_ranks(2, [](World& world) {
    EXPECT_EQ(world.group().backend_name(), "nccl");
    for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kHalf, torch::kBFloat16, torch::kInt, torch::kLong})
      for (const auto& [name, operation] : operations()) {
        if (name.ends_with(text(static_cast<int>(ReduceOp::AVG))) && !c10::isFloatingType(dtype)) continue;
        const auto results = [&](const torch::Device& device) {
          int64_t number = 0;
          return operation(world, [&](const std::vector<int64_t>& sizes) {
            int64_t n = 1;
            for (const int64_t size : sizes) n *= size;
            return ((torch::arange(n) * 3 + world.rank() * 2 + ++number) % 5 + 1).to(dtype).reshape(sizes).to(device);
          });
        };
        const Tensors got = results(kCuda), wanted = results(torch::kCPU);
        ASSERT_EQ(got.size(), wanted.size());
        for (size_t i = 0; i < got.size(); ++i) {
          EXPECT_EQ(got[i].device(), kCuda);
          EXPECT_TRUE(torch::equal(got[i].cpu(), wanted[i]))
              << name << " of " << c10::toString(dtype) << ", result " << i << ":\n"
              << got[i] << "\n"
              << wanted[i];
        }
      }
    const Tensor scaled = torch::ones({3}, kCuda);
    all_reduce(scaled, {.op = ReduceOp::PREMUL_SUM, .factor = 0.25});
    expect_near(scaled, torch::full({3}, 0.5), 1e-6);
    EXPECT_GT(world.group().stats().operations, 100u);
  });
}

TEST_F(Nccl, GroupsAndWhatRanksTellEachOther) {
  on_ranks(2, [](World& world) {
    const Group alone = world.group().split(world.rank());
    const Tensor x = torch::ones({2}, kCuda);
    all_reduce(x, {.group = alone});
    expect_near(x, torch::ones({2}), 0);
    const Group both = world.new_group({1, 0});
    all_reduce(x, {.group = both});
    expect_near(x, torch::full({2}, 2), 0);
    EXPECT_EQ(broadcast_object(std::string(world.rank() == 0 ? "hello" : ""), 0), "hello");
    if (world.rank() == 1) world.store().set("has come", "yes");
    barrier();
    EXPECT_TRUE(world.store().try_get("has come").has_value());
    barrier({.group = both});
    monitored_barrier();
  });
}

TEST_F(Nccl, WhatNcclLacksIsRefused) {
  on_ranks(2, [](World& world) {
    const Tensor x = torch::ones({4}, torch::TensorOptions(kCuda).dtype(torch::kInt));
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { scan(x); }), "scan: NCCL has no such operation");
    EXPECT_THROW(recv(x, kAnySource), InvalidArgument);
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { all_reduce(x, {.op = ReduceOp::BAND}); }), "BAND");
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { all_reduce(torch::ones({3}, kCuda).to_sparse()); }), "sparse");
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { all_gather_into_tensor(torch::ones({8}, torch::kInt), x); }),
                    "a tensor is on cpu, and another on a CUDA device");
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { send(x, 7); }), "rank: expected 0 to 1 in a group of 2, got 7");
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] {
                      all_reduce_coalesced({torch::ones({3}, kCuda), torch::ones({3})});
                    }),
                    "a batch has tensors on cuda:0 and on cpu");
    EXPECT_THROW(world.new_group({0, 1}, {.backend = "nccl:nccl"}), InvalidArgument);
    all_reduce(x);  // the group still works
    EXPECT_EQ(x[0].item<int>(), 2);
  });
}

TEST_F(Nccl, ADeadPeerEndsTheWait) {
  const ForkedJob job;
  ForkedRanks ranks(2, [&](int rank) -> std::string {
    begin_rank(rank);
    World world = job.join(rank, 2, {.backend = "nccl", .timeout = kPatience});
    const World::Scope scope(world);
    const Tensor x = torch::ones({1000}, kCuda);
    all_reduce(x);
    torch::cuda::synchronize();
    if (rank == 1) ::raise(SIGKILL);
    const auto tries = [&] {
      for (;;) {
        all_reduce(x);
        torch::cuda::synchronize();
      }
    };
    return message_of<PeerLost>(tries);
  });
  const auto survivor = ranks.wait(0, patience());
  EXPECT_TRUE(survivor.exited && survivor.status == 0) << survivor.signal << survivor.said;
  EXPECT_CONTAINS(survivor.said, "rank 1");
}

TEST_F(Nccl, AnErrorOfOneRankReachesTheOthers) {
  const ForkedJob job;
  ForkedRanks ranks(2, [&](int rank) -> std::string {
    begin_rank(rank);
    World world = job.join(rank, 2, {.backend = "nccl", .timeout = kPatience});
    const World::Scope scope(world);
    const Tensor x = torch::ones({1000}, kCuda);
    all_reduce(x);
    if (rank == 1) {
      world.abort("the data are wrong");
      return "";
    }
    return message_of<Aborted>([&] {
      for (;;) {
        all_reduce(x);
        torch::cuda::synchronize();
      }
    });
  });
  for (const auto& end : ranks.wait_all(patience())) {
    EXPECT_TRUE(end.exited && end.status == 0) << end.signal << end.said;
    if (!end.said.empty()) {
      EXPECT_CONTAINS(end.said, "the data are wrong");
    }
  }
}

}  // namespace
}  // namespace muster::test::cuda
