// Muster on a CUDA device: the nccl backend, data parallelism, optimizers, precision, snapshots and remote calls. All
// ranks are on one device, which NCCL allows if it takes them for ranks of several hosts (NCCL_HOSTID).
//
// Ranks are forked, and the parent never touches CUDA, because a process cannot use it after a fork.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/cuda.h>
#include <torch/nn.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/text.h"
#include "muster/autograd/context.h"
#include "muster/checkpoint/safetensors.h"
#include "muster/checkpoint/snapshot.h"
#include "muster/comm/objects.h"
#include "muster/muster.h"
#include "muster/optim/autocast.h"
#include "muster/optim/grad_scaler.h"
#include "muster/optim/optimizers.h"
#include "muster/parallel/activation_checkpoint.h"
#include "muster/parallel/averaged_model.h"
#include "muster/parallel/comm_hooks.h"
#include "muster/parallel/fsdp.h"
#include "muster/parallel/hogwild.h"
#include "muster/parallel/sync_batch_norm.h"
#include "muster/parallel/zero_redundancy_optimizer.h"
#include "muster/rpc/call.h"
#include "muster/rpc/rref.h"
#include "muster/rpc/worker.h"
#include "support/forked.h"
#include "support/models.h"
#include "support/patience.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

namespace muster::test {
namespace {

using Tensors = std::vector<Tensor>;

const torch::Device kCuda(torch::kCUDA, 0);

class Cuda : public testing::Test {
 protected:
  void SetUp() override {
    if (::access("/dev/nvidiactl", F_OK) != 0) GTEST_SKIP() << "no NVIDIA device here";
  }
};
using Nccl = Cuda;
using CudaDdp = Cuda;
using CudaOptim = Cuda;
using CudaRpc = Cuda;

void begin_rank(int rank) {
  ::setenv("NCCL_HOSTID", text("host", rank).c_str(), 1);
  ::setenv("NCCL_SOCKET_IFNAME", "lo", 0);
}

void on_ranks(int n, const std::function<void(World&)>& body, WorldOptions options = {.backend = "nccl"}) {
  const ForkedJob job;
  options.timeout = kPatience;
  ForkedRanks ranks(n, [&](int rank) -> std::string {
    begin_rank(rank);
    World world = job.join(rank, n, options);
    const World::Scope scope(world);
    batches_on = kCuda;
    body(world);
    return "";
  });
  for (const auto& end : ranks.wait_all(patience()))
    EXPECT_TRUE(end.exited && end.status == 0) << "signal " << end.signal << ": " << end.said;
}
void alone(const std::function<void()>& body) {
  on_ranks(1, [&](World&) { body(); });
}

void expect_near(const Tensor& got, const Tensor& wanted, double tolerance, const std::string& what = "") {
  ASSERT_EQ(got.sizes(), wanted.sizes()) << what;
  const Tensor a = got.detach().to(torch::kCPU, torch::kDouble), b = wanted.detach().to(torch::kCPU, torch::kDouble);
  EXPECT_TRUE(torch::allclose(a, b, tolerance, tolerance)) << what << " is up to " << largest(a - b) << " apart";
}

// --- the backend ---

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
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { send(x, 7); }), "outside a group of 2");
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

// --- data parallelism ---

using Wrap = std::function<void(DdpOptions&)>;

// Trains on two ranks, and on this one alone with the parts of both.
template <typename Net, typename Setup>
void expect_as_alone(World& world, const DdpOptions& options, const Setup& setup, double tolerance = 1e-9) {
  torch::manual_seed(7);
  const auto net = std::make_shared<Net>(), copy = std::make_shared<Net>();
  {
    const torch::NoGradGuard no_grad;
    const auto from = net->named_parameters();
    for (auto& item : copy->named_parameters()) item.value().copy_(from[item.key()]);
  }
  net->to(kCuda);
  copy->to(kCuda);
  DistributedDataParallel ddp(net, options);
  setup(ddp);
  muster::SGD ours(net->parameters(), {.lr = 0.05, .momentum = 0.9}),
      theirs(copy->parameters(), {.lr = 0.05, .momentum = 0.9});
  for (int step = 0; step < 3; ++step) {
    ours.zero_grad();
    theirs.zero_grad();
    ddp.forward(world.rank(), step).backward();
    for (int r = 0; r < world.world_size(); ++r) (copy->forward(r, step) / world.world_size()).backward();
    ours.step();
    theirs.step();
  }
  const auto wanted = copy->named_parameters();
  for (const auto& item : net->named_parameters()) {
    EXPECT_EQ(item.value().device(), kCuda);
    expect_near(item.value(), wanted[item.key()], tolerance, item.key());
    const Tensor of_rank_0 = item.value().detach().clone();
    broadcast(of_rank_0, 0);
    EXPECT_TRUE(torch::equal(of_rank_0, item.value())) << item.key();
  }
}
template <typename Net>
void expect_as_alone(World& world, const DdpOptions& options = {}, double tolerance = 1e-9) {
  expect_as_alone<Net>(
      world, options, [](auto&) {}, tolerance);
}

TEST_F(CudaDdp, RealModelsTrainAsInOneProcess) {
  on_ranks(2, [](World& world) {
    torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
    expect_as_alone<ResNet18>(world);
    expect_as_alone<WideConvolutions>(world);
    expect_as_alone<Transformer>(world);
    expect_as_alone<Recurrent>(world);
    expect_as_alone<Mixed>(world, {.find_unused_parameters = true});
    expect_as_alone<Transformer>(world, {.bucket_cap_mb = 0.01, .first_bucket_cap_mb = 0.001});
    expect_as_alone<Transformer>(world, {.check_divergence_every = 1});
  });
}

TEST_F(CudaDdp, CommunicationHooks) {
  on_ranks(2, [](World& world) {
    torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
    const auto with = [&](auto hook, double tolerance) {
      expect_as_alone<Transformer>(
          world, {}, [&](auto& ddp) { ddp.register_comm_hook(hook); }, tolerance);
    };
    with(comm_hooks::all_reduce, 1e-9);
    with(comm_hooks::bf16_compress, 2e-2);
    with(comm_hooks::fp16_compress, 2e-2);
    with(comm_hooks::PowerSgd({.matrix_approximation_rank = 4, .start_iter = 2}), 0.2);
    with(comm_hooks::TopK({.ratio = 0.5}), 0.2);
  });
}

struct Perceptron : nn::Module {
  Tensor forward(const Tensor& x) { return b(torch::tanh(a(x))); }
  nn::Linear a = register_module("a", nn::Linear(8, 600)), b = register_module("b", nn::Linear(600, 4));
};

TEST_F(CudaDdp, NoSyncGradientPenaltiesAndUnusedParameters) {
  on_ranks(2, [](World& world) {
    torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
    torch::manual_seed(1);
    const auto net = std::make_shared<Perceptron>();
    net->to(kCuda);
    const auto copy = std::make_shared<Perceptron>();
    copy->to(kCuda);
    {
      const torch::NoGradGuard no_grad;
      for (size_t i = 0; i < net->parameters().size(); ++i) copy->parameters()[i].copy_(net->parameters()[i]);
    }
    DistributedDataParallel ddp(net);
    const auto x = [&](int rank, int step) { return drawn(rank, step, {16, 8}).to(kCuda).requires_grad_(); };
    const auto penalty = [](auto& model, const Tensor& input) {
      const Tensor y = model.forward(input).square().sum();
      return torch::autograd::grad({y}, {input}, {}, true, true)[0].square().mean();
    };
    const auto expect_equal_gradients = [&] {
      for (size_t i = 0; i < net->parameters().size(); ++i)
        expect_near(net->parameters()[i].grad(), copy->parameters()[i].grad(), 1e-9, text(i));
      net->zero_grad();
      copy->zero_grad();
    };
    for (int step = 0; step < 2; ++step) {
      {
        const auto guard = ddp.no_sync();
        ddp.forward(x(world.rank(), step)).square().mean().backward();
      }
      ddp.forward(x(world.rank(), step + 10)).square().mean().backward();
      for (int r = 0; r < 2; ++r)
        for (const int of : {step, step + 10}) (copy->forward(x(r, of)).square().mean() / 2).backward();
      expect_equal_gradients();
    }
    penalty(ddp, x(world.rank(), 3)).backward();
    for (int r = 0; r < 2; ++r) (penalty(*copy, x(r, 3)) / 2).backward();
    expect_equal_gradients();
    // create_graph: the gradients are functions of the parameters, and so are their averages.
    ddp.forward(x(world.rank(), 4)).square().mean().backward({}, std::nullopt, /*create_graph=*/true);
    Tensor norm = torch::zeros({}, kCuda);
    for (const Tensor& parameter : net->parameters()) norm = norm + parameter.grad().square().sum();
    const Tensors second = torch::autograd::grad({norm}, net->parameters());
    Tensor loss;
    for (int r = 0; r < 2; ++r) {
      const Tensor one = copy->forward(x(r, 4)).square().mean() / 2;
      loss = loss.defined() ? loss + one : one;
    }
    const Tensors first = torch::autograd::grad({loss}, copy->parameters(), {}, true, true);
    Tensor theirs = torch::zeros({}, kCuda);
    for (const Tensor& gradient : first) theirs = theirs + gradient.square().sum();
    const Tensors wanted = torch::autograd::grad({theirs}, copy->parameters());
    for (size_t i = 0; i < second.size(); ++i) {
      Tensor mine = second[i].clone();
      all_reduce(mine, {.op = ReduceOp::AVG});
      expect_near(mine, wanted[i], 1e-9, text("second ", i));
    }
    net->zero_grad();
    // A parameter without a gradient is named.
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { net->a->weight.square().sum().backward(); }), "b.weight");
  });
}

TEST_F(CudaDdp, WhatTakesModulesOnTheCpuSaysSo) {
  on_ranks(2, [](World& world) {
    const auto net = std::make_shared<Perceptron>();
    net->to(kCuda);
    const auto expect_refused = [&](const std::function<void()>& make, const std::string& word) {
      const std::string said = message_of<InvalidArgument>(make);
      EXPECT_CONTAINS(said, "CPU");
      EXPECT_CONTAINS(said, word);
    };
    expect_refused([&] { DistributedDataParallel(net, {.reproducible = {.shards = 2}}); }, "a.weight");
    expect_refused([&] { DistributedDataParallel(net, {.mixed_precision = {.param_dtype = torch::kBFloat16}}); },
                   "a.weight");
    expect_refused([&] { DistributedDataParallel(net, {.mixed_precision = {.reduce_dtype = torch::kHalf}}); },
                   "mixed_precision");
    expect_refused([&] { fully_shard(net); }, "a.weight");
    expect_refused([&] { Hogwild hogwild(net); }, "a.weight");
    const auto divided = std::make_shared<Perceptron>();
    divided->b->to(kCuda);
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { DistributedDataParallel{divided}; }),
                    "a.weight is on cpu, and b.weight on cuda:0");
    const auto forgotten = std::make_shared<Perceptron>();
    if (world.rank() == 0) forgotten->to(kCuda);
    EXPECT_THROW(DistributedDataParallel{forgotten}, Mismatch);
    const Group cpu = world.new_group({0, 1}, {.backend = "shm"});
    expect_refused([&] { DistributedDataParallel(net, {.group = cpu}); }, "shm");
  });
}

TEST_F(CudaDdp, SyncBatchNormIsThatOfTheWholeBatch) {
  on_ranks(2, [](World& world) {
    torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
    torch::manual_seed(3);
    nn::Sequential net(nn::Conv2d(3, 6, 3), nn::BatchNorm2d(6), nn::ReLU());
    const Tensor whole = torch::randn({5, 3, 9, 9});
    net->to(kCuda);
    const auto copy = std::dynamic_pointer_cast<nn::SequentialImpl>(net->clone());
    convert_sync_batchnorm(*net);
    const Tensor x = (world.rank() == 0 ? whole.slice(0, 0, 2) : whole.slice(0, 2)).to(kCuda).requires_grad_(),
                 all = whole.to(kCuda).requires_grad_();
    const Tensor y = net->forward(x), of_all = copy->forward(all);
    expect_near(y, world.rank() == 0 ? of_all.slice(0, 0, 2) : of_all.slice(0, 2), 1e-9);
    y.square().sum().backward();
    of_all.square().sum().backward();
    expect_near(x.grad(), world.rank() == 0 ? all.grad().slice(0, 0, 2) : all.grad().slice(0, 2), 1e-9);
    for (size_t i = 0; i < net->parameters().size(); ++i) {
      const Tensor gradient = net->parameters()[i].grad().clone();
      all_reduce(gradient);
      expect_near(gradient, copy->parameters()[i].grad(), 1e-9, text(i));
    }
    for (size_t i = 0; i < net->buffers().size(); ++i) expect_near(net->buffers()[i], copy->buffers()[i], 1e-9);
  });
}

TEST_F(CudaDdp, DividedOptimizerStates) {
  on_ranks(2, [](World& world) {
    torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
    torch::manual_seed(5);
    const auto net = std::make_shared<Transformer>(), copy = std::make_shared<Transformer>();
    {
      const torch::NoGradGuard no_grad;
      const auto from = net->named_parameters();
      for (auto& item : copy->named_parameters()) item.value().copy_(from[item.key()]);
    }
    net->to(kCuda);
    copy->to(kCuda);
    DistributedDataParallel ddp(net), theirs(copy);
    ZeroRedundancyOptimizer<muster::AdamW> divided(net->parameters(), muster::AdamW::Options{.lr = 1e-2});
    muster::AdamW whole(copy->parameters(), {.lr = 1e-2});
    for (int step = 0; step < 3; ++step) {
      divided.zero_grad();
      whole.zero_grad();
      ddp.forward(world.rank(), step).backward();
      theirs.forward(world.rank(), step).backward();
      divided.step();
      whole.step();
    }
    const auto wanted = copy->named_parameters();
    for (const auto& item : net->named_parameters()) expect_near(item.value(), wanted[item.key()], 1e-9, item.key());
  });
}

// --- optimizers and precision ---

TEST_F(CudaOptim, StepsAsOnTheCpu) {
  alone([] {
    const auto steps = [](auto type, torch::ScalarType dtype, const torch::Device& device) {
      using O = typename decltype(type)::type;
      typename O::Options options;
      options.lr = 0.02;
      if constexpr (requires { options.momentum; }) options.momentum = 0.9;
      if constexpr (requires { options.amsgrad; }) options.amsgrad = true;
      if constexpr (requires { options.weight_decay; }) options.weight_decay = 0.01;
      Tensors all;
      for (const auto& sizes : {std::vector<int64_t>{5, 7}, {40, 30}, {1, 1}})
        all.push_back(
            (torch::arange(sizes[0] * sizes[1], dtype) * 0.37).sin().reshape(sizes).to(device).requires_grad_());
      Tensors listed = all;
      listed.push_back(all[1]);  // steps twice
      O optimizer(listed, options);
      for (int step = 0; step < 10; ++step) {
        for (size_t i = 0; i < all.size(); ++i) {
          const Tensor g = (torch::arange(all[i].numel(), dtype) * (0.11 + 0.01 * step)).cos().reshape(all[i].sizes());
          all[i].mutable_grad() = step % 3 == 1 && i == 1 ? Tensor() : g.to(device);
        }
        optimizer.step();
      }
      return all;
    };
    int number = 0;
    AllOptimizers::for_each([&](auto type) {
      ++number;
      const bool is_muon = std::is_same_v<decltype(type), std::type_identity<muster::Muon>>;
      for (const auto& [dtype, exact] : {std::pair(torch::kDouble, 1e-9), std::pair(torch::kFloat, 2e-4)}) {
        const double tolerance = is_muon ? 1e-2 : exact;  // it computes in bfloat16
        const Tensors got = steps(type, dtype, kCuda), wanted = steps(type, dtype, torch::kCPU);
        for (size_t i = 0; i < got.size(); ++i)
          expect_near(got[i].detach(), wanted[i].detach(), tolerance, text("class ", number, " parameter ", i));
      }
    });
    // In 16 bits, as the fused kernels of CUDA do.
    const Tensor x = torch::ones({100}, torch::TensorOptions(kCuda).dtype(torch::kBFloat16)).requires_grad_();
    muster::AdamW adamw({x}, {.lr = 0.1});
    x.mutable_grad() = torch::ones_like(x);
    adamw.step();
    EXPECT_LT(x[0].item<float>(), 0.95);
  });
}

TEST_F(CudaOptim, AutocastAndGradScaler) {
  on_ranks(2, [](World& world) {
    torch::manual_seed(2);
    const auto net = std::make_shared<Perceptron>();
    net->to(kCuda);
    DistributedDataParallel ddp(net);
    muster::AdamW adamw(net->parameters(), {.lr = 1e-2});
    GradScaler scaler({.init_scale = 1024});
    double first = 0, last = 0;
    const Tensor input = drawn(world.rank(), 1, {64, 8}).to(kCuda), target = input.slice(1, 0, 4).sin();
    for (int step = 0; step < 60; ++step) {
      adamw.zero_grad();
      Tensor loss;
      {
        const Autocast autocast(torch::kHalf, torch::kCUDA);
        const Tensor y = ddp.forward(input);
        EXPECT_EQ(y.scalar_type(), torch::kHalf);
        loss = (y.to(torch::kFloat) - target).square().mean();
      }
      scaler.scale(loss).backward();
      if (step == 5 && world.rank() == 1) net->a->bias.mutable_grad().fill_(INFINITY);
      const bool stepped = scaler.step(adamw);
      EXPECT_EQ(stepped, step != 5);
      scaler.update();
      (step == 0 ? first : last) = loss.item<double>();
    }
    EXPECT_LT(last, 0.2 * first);
    for (const Tensor& parameter : net->parameters()) {
      const Tensor other = parameter.detach().clone();
      broadcast(other, 0);
      EXPECT_TRUE(torch::equal(other, parameter));
    }
  });
}

TEST_F(CudaOptim, Averages) {
  alone([] {
    const auto net = std::make_shared<Perceptron>();
    net->to(kCuda);
    AveragedModel average(net, {.decay = 0.9});
    muster::SGD sgd(net->parameters(), {.lr = 0.1});
    const Tensor start = net->a->weight.detach().clone();
    for (int step = 0; step < 2; ++step) {
      for (auto& parameter : net->parameters()) parameter.mutable_grad() = torch::ones_like(parameter);
      sgd.step();
      average.update();
    }
    const auto in_use = average.in_use();
    expect_near(net->a->weight.detach(), start - 0.1 * (0.9 * 1 + 0.1 * 2), 1e-5);
  });
}

// --- checkpoints ---

TEST_F(CudaOptim, ActivationCheckpointsDrawTheSameNumbersAgain) {
  alone([] {
    const auto net = std::make_shared<nn::SequentialImpl>(nn::Linear(8, 64), nn::Dropout(0.5), nn::Linear(64, 1));
    net->to(kCuda);
    const Tensor x = torch::randn({32, 8}).to(kCuda).requires_grad_();
    const auto gradients = [&](bool checkpointed) {
      net->zero_grad();
      x.mutable_grad() = Tensor();
      torch::manual_seed(9);
      const Tensor y =
          checkpointed ? activation_checkpoint([&](const Tensor& in) { return net->forward(in); }, x) : net->forward(x);
      const Tensor between = torch::rand({10}, kCuda);  // draws before the second call
      (y.sum() + between.sum()).backward();
      Tensors all{x.grad().clone(), torch::rand({3}, kCuda)};
      for (const Tensor& parameter : net->parameters()) all.push_back(parameter.grad().clone());
      return all;
    };
    const Tensors wanted = gradients(false), got = gradients(true);
    for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(torch::equal(got[i], wanted[i])) << i;
  });
}

TEST_F(CudaOptim, SnapshotsAndFiles) {
  alone([] {
    const TemporaryFolder folders;
    const auto train = [](Perceptron& net, muster::AdamW& adamw, int steps) {
      for (int step = 0; step < steps; ++step) {
        adamw.zero_grad();
        const Tensor x = torch::randn({16, 8}, kCuda);
        torch::dropout(net.forward(x), 0.3, true).square().mean().backward();
        adamw.step();
      }
    };
    for (const bool asynchronous : {false, true}) {
      const auto folder = folders / (asynchronous ? "asynchronous" : "synchronous");
      const auto net = std::make_shared<Perceptron>();
      net->to(kCuda);
      muster::AdamW adamw(net->parameters(), {.lr = 1e-2});
      auto generator = at::globalContext().defaultGenerator(kCuda);
      train(*net, adamw, 3);
      {
        Snapshot snapshot({.folder = folder, .asynchronous = asynchronous});
        snapshot.add("net", net).add("adamw", adamw).add("cuda", generator);
        snapshot.save(3);
        if (asynchronous) snapshot.wait();
      }
      train(*net, adamw, 3);
      const auto again = std::make_shared<Perceptron>();
      again->to(kCuda);
      muster::AdamW other(again->parameters());
      torch::rand({5}, kCuda);
      Snapshot snapshot({.folder = folder});
      snapshot.add("net", again).add("adamw", other).add("cuda", generator);
      EXPECT_EQ(snapshot.restore(), 3);
      train(*again, other, 3);
      for (size_t i = 0; i < net->parameters().size(); ++i)
        EXPECT_TRUE(torch::equal(net->parameters()[i], again->parameters()[i])) << i;
    }
    const auto net = std::make_shared<Perceptron>(), again = std::make_shared<Perceptron>();
    net->to(kCuda);
    again->to(kCuda);
    const auto file = folders / "net.safetensors";
    save_safetensors(file, *net);
    SafetensorsFile(file).load_into(*again);
    for (size_t i = 0; i < net->parameters().size(); ++i)
      EXPECT_TRUE(torch::equal(net->parameters()[i], again->parameters()[i])) << i;
  });
}

// --- remote calls ---

Tensor twice(const Tensor& x) { return x * 2; }
std::string device_of(const Tensor& x) { return x.device().str(); }
struct Layer {
  explicit Layer(Tensor start) : weight(start.detach().clone().requires_grad_()) {}
  Tensor forward(const Tensor& x) { return torch::tanh(x.matmul(weight)); }
  Tensor grad() { return weight.grad(); }
  Tensor weight;
};

void on_workers(const std::function<void()>& trainer) {
  on_ranks(2,
           [&](World& world) {
             rpc::Options options;
             if (world.rank() == 0) options.device_maps = {{"worker1", {{.here = kCuda, .there = kCuda}}}};
             rpc::init(options);
             if (world.rank() == 0) trainer();
             rpc::shutdown();
           },
           {.backend = "shm"});
}

TEST_F(CudaRpc, TensorsGoThereAndBack) {
  on_workers([] {
    for (const int64_t n : {0, 1, 1000, 3'000'000}) {
      const Tensor x = torch::rand({n}, kCuda);
      EXPECT_EQ(rpc::sync<&device_of>(1, x), "cuda:0");
      const Tensor y = rpc::sync<&twice>(1, x);
      EXPECT_EQ(y.device(), kCuda);
      EXPECT_TRUE(torch::equal(y, x * 2));
    }
    // What a kernel is still writing when the call begins.
    Tensor x = torch::ones({2000, 2000}, kCuda);
    for (int i = 0; i < 20; ++i) x = x.matmul(x).div(2000);
    EXPECT_TRUE(torch::allclose(rpc::sync<&twice>(1, x), x * 2));
    std::vector<rpc::Future<Tensor>> futures;
    for (int i = 0; i < 50; ++i) futures.push_back(rpc::async<&twice>(1, torch::full({10'000}, i, kCuda)));
    for (int i = 0; i < 50; ++i) EXPECT_EQ(futures[static_cast<size_t>(i)].get()[17].item<float>(), 2.0f * i);
  });
}

TEST_F(CudaRpc, GradientsOfTwoOrders) {
  on_workers([] {
    torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
    const Tensor start = (torch::arange(12) * 0.3).sin().reshape({4, 3}).to(kCuda);
    const auto layer = rpc::remote<Layer>(1, start);
    Layer local(start);
    const Tensor x = (torch::arange(8) * 0.7).cos().reshape({2, 4}).to(kCuda).requires_grad_(),
                 same = x.detach().clone().requires_grad_();
    const auto penalized = [](const Tensor& y, const Tensor& of) {
      return y.square().sum() + torch::autograd::grad({y.sum()}, {of}, {}, true, true)[0].square().sum();
    };
    penalized(layer.sync<&Layer::forward>(x), x).backward();
    penalized(local.forward(same), same).backward();
    expect_near(x.grad(), same.grad(), 1e-9);
    expect_near(layer.sync<&Layer::grad>(), local.grad(), 1e-9);
    EXPECT_EQ(x.grad().device(), kCuda);
  });
}

}  // namespace
}  // namespace muster::test
