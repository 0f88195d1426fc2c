// Device maps of remote calls, with a fake device (support/fake_device.h): over shared memory and TCP, between threads
// and processes.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <array>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "base/byte_stream.h"
#include "muster/autograd/context.h"
#include "muster/base/error.h"
#include "muster/rpc/call.h"
#include "muster/rpc/rref.h"
#include "muster/rpc/worker.h"
#include "rpc/kit/devices.h"
#include "rpc/values/tensor_table.h"
#include "support/fake_device.h"
#include "support/patience.h"
#include "support/ranks.h"

namespace muster::test {
namespace {

using namespace std::chrono_literals;
using at::Tensor;
using rpc::DeviceMap;
using rpc::RRef;
using Maps = std::map<std::string, DeviceMap>;
using Tensors = std::vector<Tensor>;

class RpcDevices : public CommContract {
 protected:
  // Starts each rank with its maps. Runs the body in rank 0 while the others serve.
  void trainer(const std::vector<Maps>& maps, const std::function<void()>& body) const {
    const size_t before = fake_device_counts().unblocked_copies;
    run(static_cast<int>(maps.size()), [&](World& world) {
      rpc::init({.device_maps = maps[static_cast<size_t>(world.rank())]});
      if (world.rank() == 0) body();
      rpc::shutdown();
    });
    EXPECT_EQ(fake_device_counts().unblocked_copies, before);
  }
};

// Between threads only: the engine's threads for devices do not start in a forked process (libtorch 2.13: "Invalid
// thread pool").
class RpcDeviceGradients : public RpcDevices {};
std::vector<Setup> thread_setups() {
  std::vector<Setup> all = rpc_setups();
  std::erase_if(all, [](const Setup& setup) { return setup.ranks != RanksAre::kThreads; });
  return all;
}

DeviceMap pairs(std::initializer_list<std::pair<int, int>> indices) {
  DeviceMap map;
  for (const auto& [here, there] : indices) map.push_back({.here = fake(here), .there = fake(there)});
  return map;
}
Tensor leaf(std::vector<double> values, int device) {
  return at::tensor(values, at::kDouble).to(fake(device)).set_requires_grad(true);
}
void expect_same(const Tensor& got, const Tensor& wanted) {
  EXPECT_EQ(got.device(), wanted.device());
  EXPECT_EQ(got.sizes(), wanted.sizes());
  EXPECT_EQ(got.scalar_type(), wanted.scalar_type());
  EXPECT_TRUE(at::equal(got.cpu(), wanted.cpu()));
}

// --- the functions that are called ---

Tensor echo(Tensor x) { return x; }
Tensors echo_all(Tensors all) { return all; }
std::string device_of(const Tensor& x) { return x.device().str(); }
Tensor made_on(int index) { return at::arange(4).to(fake(index)); }
Tensor twice(const Tensor& x) { return x * 2; }
int first(int number, const std::vector<Tensor>&, const std::string&) { return number; }
// Checks that two tensors share memory and see each other's writes.
bool shared(Tensor a, const Tensor& b) {
  if (a.storage().unsafeGetStorageImpl() != b.storage().unsafeGetStorageImpl()) return false;
  a.fill_(7);
  return b.flatten()[0].item<int64_t>() == 7;
}

struct Server {
  explicit Server(Tensor start) : value(std::move(start)) {}
  Tensor pull() { return value; }
  std::string where() { return value.device().str(); }
  Tensor value;
};

// --- there and back ---

TEST_P(RpcDevices, ThereAndBackWithOtherIndices) {
  trainer({{{"worker1", pairs({{0, 1}, {2, 0}})}}, {}}, [] {
    for (const auto& [here, there] : {std::pair(0, 1), std::pair(2, 0)}) {
      for (const int64_t n : {0, 1, 100, 5000, 1'000'000}) {
        const Tensor x = at::rand({n}).to(fake(here));
        EXPECT_EQ(rpc::sync<&device_of>(1, x), fake(there).str());
        expect_same(rpc::sync<&echo>(1, x), x);
        expect_same(rpc::sync<&twice>(1, x), x * 2);
      }
    }
    EXPECT_EQ(rpc::sync<&made_on>(1, 1).device(), fake(0));  // applies to tensors that the callee makes, too
    EXPECT_EQ(rpc::sync<&device_of>(1, at::ones({2})), "cpu");
    EXPECT_EQ(rpc::sync<&echo>(1, at::ones({2})).device(), at::Device(at::kCPU));
    EXPECT_FALSE(rpc::sync<&echo>(1, Tensor()).defined());
  });
}

TEST_P(RpcDevices, NoMemoryOfADeviceIsKept) {
  run_threads_only(2, [](World& world) {
    const size_t before = fake_device_counts().blocks;
    rpc::init({.device_maps = {{"worker" + std::to_string(1 - world.rank()), pairs({{0, 1}})}}});
    if (world.rank() == 0)
      for (int i = 0; i < 20; ++i) rpc::sync<&twice>(1, at::ones({1000}).to(fake(0)));
    rpc::shutdown();
    if (world.rank() == 0) {
      EXPECT_EQ(fake_device_counts().blocks, before);
    }
  });
}

TEST_P(RpcDevices, EveryKindOfTensor) {
  trainer({{{"worker1", pairs({{0, 2}})}}, {}}, [] {
    const Tensor whole = at::arange(120, at::kFloat).reshape({2, 3, 4, 5}).to(fake(0));
    Tensors all{at::tensor(3.5).to(fake(0)),
                at::empty({0, 3}).to(fake(0)),
                whole,
                whole.transpose(0, 3),
                whole.contiguous(at::MemoryFormat::ChannelsLast),
                whole.select(1, 1),
                whole.slice(3, 0, 5, 2),
                whole.narrow(0, 1, 1),
                at::ones({3}).to(fake(0)).expand({4, 3}),
                at::ones({2}, at::kBool).to(fake(0)),
                at::arange(5, at::kChar).to(fake(0)),
                at::arange(6, at::kBFloat16).to(fake(0)),
                at::randn({3}, at::kComplexFloat).to(fake(0)),
                at::ones({4}),
                Tensor()};
    const Tensors got = rpc::sync<&echo_all>(1, all);
    ASSERT_EQ(got.size(), all.size());
    for (size_t i = 0; i + 1 < all.size(); ++i) {
      expect_same(got[i], all[i]);
      if (all[i].is_non_overlapping_and_dense()) {
        EXPECT_EQ(got[i].strides(), all[i].strides()) << i;
      }
      EXPECT_FALSE(got[i].requires_grad());
    }
    EXPECT_FALSE(got.back().defined());
    const at::NoGradGuard no_grad;
    EXPECT_TRUE(rpc::sync<[](const Tensor& x) { return x.requires_grad() && x.is_leaf(); }>(1, leaf({1}, 0)));
  });
}

TEST_P(RpcDevices, WhatSharesMemorySharesItThere) {
  trainer({{{"worker1", pairs({{0, 1}, {1, 0}})}}, {}}, [] {
    const Tensor base = at::arange(100).to(fake(0));
    EXPECT_TRUE(rpc::sync<&shared>(1, base.narrow(0, 10, 5), base.narrow(0, 10, 20)));
    EXPECT_TRUE(rpc::sync<&shared>(1, base, base));
    EXPECT_FALSE(rpc::sync<&shared>(1, base, base.clone()));
    EXPECT_FALSE(rpc::sync<&shared>(1, base.narrow(0, 0, 5), base.narrow(0, 50, 5)));
    EXPECT_EQ(base[10].item<int64_t>(), 10);  // the callee's change of an argument is not visible here
    const Tensors back = rpc::sync<&echo_all>(1, Tensors{base, base.reshape({10, 10}).transpose(0, 1)});
    EXPECT_EQ(back[0].storage().unsafeGetStorageImpl(), back[1].storage().unsafeGetStorageImpl());
    expect_same(back[1], base.reshape({10, 10}).t());
  });
}

TEST_P(RpcDevices, EachWorkerHasItsOwnMaps) {
  static constexpr auto calls_back = [](int worker) {
    const Tensor x = at::ones({3}).to(fake(2));
    return rpc::sync<&device_of>(worker, x) + " " + rpc::sync<&twice>(worker, x).device().str();
  };
  // The maps are not inverses of each other, and one is for calls of the worker to itself.
  trainer({{{"worker1", pairs({{0, 1}})}, {"worker2", pairs({{0, 2}})}, {"worker0", pairs({{1, 0}})}},
           {{"worker0", pairs({{2, 2}})}},
           {}},
          [] {
            const Tensor x = at::ones({3}).to(fake(0));
            EXPECT_EQ(rpc::sync<&device_of>(1, x), fake(1).str());
            EXPECT_EQ(rpc::sync<&device_of>(2, x), fake(2).str());
            EXPECT_EQ(rpc::sync<&device_of>(0, x.to(fake(1))), fake(0).str());
            expect_same(rpc::sync<&echo>(0, x.to(fake(1))), x.to(fake(1)));
            EXPECT_EQ(rpc::sync<calls_back>(1, 0), fake(2).str() + " " + fake(2).str());
          });
}

TEST_P(RpcDevices, TheCpuMayBeMappedToo) {
  const c10::Device cpu(at::kCPU);
  const Maps to_cpu{{"worker1", {{.here = fake(1), .there = cpu}}}},
      from_cpu{{"worker1", {{.here = cpu, .there = fake(1)}}}};
  trainer({to_cpu, {}}, [] {
    const Tensor x = at::rand({5000}).to(fake(1));
    EXPECT_EQ(rpc::sync<&device_of>(1, x), "cpu");
    expect_same(rpc::sync<&twice>(1, x), x * 2);
    EXPECT_EQ(rpc::sync<&device_of>(1, x.cpu()), "cpu");
  });
  trainer({from_cpu, {}}, [] {
    const Tensor x = at::rand({5000});
    EXPECT_EQ(rpc::sync<&device_of>(1, x), fake(1).str());
    expect_same(rpc::sync<&twice>(1, x), x * 2);
  });
}

TEST_P(RpcDevices, ObjectsAndTheirCopies) {
  trainer({{{"worker1", pairs({{0, 1}})}}, {}}, [] {
    const Tensor x = at::rand({3000}).to(fake(0));
    const auto server = rpc::remote<Server>(1, x);
    EXPECT_EQ(server.sync<&Server::where>(), fake(1).str());
    expect_same(server.sync<&Server::pull>(), x);
    const RRef<Tensor> result = rpc::remote<&twice>(1, x);
    expect_same(result.to_here(), x * 2);
    const RRef<Tensor> elsewhere = rpc::remote<&made_on>(1, 2);
    EXPECT_CONTAINS(message_of<RemoteError>([&] { elsewhere.to_here(); }), fake(2).str());
  });
}

// --- errors ---

TEST_P(RpcDevices, ADeviceWithoutAMapIsRefused) {
  trainer({{{"worker1", pairs({{0, 1}})}}, {}}, [] {
    const Tensor on_1 = at::ones({3}).to(fake(1)), on_0 = at::ones({3}).to(fake(0));
    const auto said = message_of<InvalidArgument>([&] {
      rpc::sync<&first>(1, 5, Tensors{at::ones({1}), on_0, on_1}, "word");
    });
    EXPECT_CONTAINS(said, "argument 2 of ");
    EXPECT_CONTAINS(said, "first(int");
    EXPECT_CONTAINS(said, fake(1).str());
    EXPECT_CONTAINS(said, "worker \"worker1\"");
    EXPECT_CONTAINS(said, "device_maps[\"worker1\"]");
    EXPECT_EQ(rpc::census().pending_calls, 0u);
    EXPECT_EQ(rpc::sync<&first>(1, 5, Tensors{at::ones({1}), on_0}, "word"), 5);
    // Results.
    const auto result = message_of<RemoteError>([] { rpc::sync<&made_on>(1, 2); });
    EXPECT_CONTAINS(result, "made_on(int)");
    EXPECT_CONTAINS(result, fake(2).str());
    EXPECT_CONTAINS(result, "device_maps[\"worker1\"]");
    // A worker without device maps.
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { rpc::sync<&echo>(0, on_0); }), "argument 1 of ");
    EXPECT_THROW(rpc::remote<Server>(0, on_0), InvalidArgument);
    EXPECT_THROW(rpc::sync<&echo>(1, at::empty({3}, at::kMeta)), InvalidArgument);
    const auto end = patience();  // tensors are released by message
    while (rpc::census().owned_objects != 0 && !end.passed()) std::this_thread::yield();
    EXPECT_EQ(rpc::census().owned_objects, 0u);
  });
}

TEST_P(RpcDevices, BadMapsAreToldToAllAtTheStart) {
  const c10::Device cpu(at::kCPU), no_index(c10::DeviceType::PrivateUse1);
  const std::vector<std::pair<Maps, std::string>> bad{
      {{{"nobody", pairs({{0, 0}})}}, R"("worker1" for "nobody" is for a worker that does not exist)"},
      {{{"worker0", pairs({{7, 0}})}}, R"(fake:7, which is not on worker "worker1")"},
      {{{"worker0", pairs({{0, 3}})}}, R"(fake:3, which is not on worker "worker0")"},
      {{{"worker0", pairs({{0, 1}, {0, 2}})}}, "fake:0 here twice"},
      {{{"worker0", pairs({{0, 1}, {2, 1}})}}, "fake:1 there twice"},
      {{{"worker0", {{.here = no_index, .there = fake(0)}}}}, "without an index"},
      {{{"worker0", {{.here = fake(0), .there = at::kMeta}}}}, "meta"},
      {{{"worker0", {{.here = fake(0), .there = c10::Device(at::kXPU, 0)}}}}, "xpu:0"},
      {{{"worker0", {{.here = cpu, .there = fake(0)}, {.here = c10::Device(at::kCPU, 0), .there = fake(1)}}}}, "twice"},
  };
  run(3, [&](World& world) {
    for (const auto& [maps, said] : bad) {
      const auto init = [&] { rpc::init({.device_maps = world.rank() == 1 ? maps : Maps()}); };
      EXPECT_CONTAINS(message_of<InvalidArgument>(init), said);
      EXPECT_FALSE(rpc::is_running());
    }
    rpc::init({.device_maps = {{"worker2", pairs({{0, 1}})}}});  // a map of the last worker for itself
    EXPECT_EQ(rpc::sync<&device_of>(2, at::ones({1}).to(fake(0))), fake(1).str());
    rpc::shutdown();
  });
}

// --- gradients ---

Tensor cubed(const Tensor& x, const Tensor& y) { return x * x * x * y; }
Tensor cubed_there(int worker, const Tensor& x, const Tensor& y) { return rpc::sync<&cubed>(worker, x * 2, y) * y; }
// Backward runs on the callee. The gradients of the arguments go back to the caller.
void backward_there(const Tensor& x, const Tensor& y) { (x * x * y).sum().backward(); }
struct Layer {
  explicit Layer(int index) : weight(leaf({2, 3}, index)) {}
  Tensor forward(const Tensor& x) { return x * weight * weight; }
  Tensor grad() { return weight.grad(); }
  Tensor context_grad() { return autograd::gradient(weight); }
  Tensor weight;
};

using Function = std::function<Tensor(const Tensor&, const Tensor&)>;
Tensors derivatives(const Function& function, const Tensor& x, const Tensor& y) {
  const Tensor value = function(x, y);
  const Tensors one = torch::autograd::grad({value.sum()}, {x, y}, {}, true, true);
  const Tensors two = torch::autograd::grad({(one[0] * one[1].to(one[0].device())).sum()}, {x, y}, {}, true, true);
  return {value.detach(), one[0].detach(), one[1].detach(), two[0].detach(), two[1].detach()};
}

TEST_P(RpcDeviceGradients, OfTwoOrders) {
  trainer({{{"worker1", pairs({{0, 1}, {2, 0}})}, {"worker2", pairs({{0, 0}, {2, 2}})}},
           {{"worker2", pairs({{1, 2}, {0, 0}})}, {"worker0", pairs({{1, 0}, {0, 2}})}},
           {}},
          [] {
            const Tensor x = leaf({1, -2}, 0), y = leaf({0.5, 3}, 0), other = leaf({0.5, 3}, 2);
            const auto expect_all = [&](const Function& remote, const Function& local, const Tensor& second) {
              const Tensors got = derivatives(remote, x, second);
              const Tensors wanted =
                  derivatives(local, x.detach().cpu().requires_grad_(), second.detach().cpu().requires_grad_());
              for (size_t i = 0; i < got.size(); ++i) {
                EXPECT_EQ(got[i].device(), i == 2 || i == 4 ? second.device() : x.device()) << i;
                EXPECT_TRUE(at::allclose(got[i].cpu(), wanted[i])) << i;
              }
            };
            const auto nested = [](const Tensor& a, const Tensor& b) { return cubed(a * 2, b) * b; };
            expect_all([](const Tensor& a, const Tensor& b) { return rpc::sync<&cubed>(1, a, b); }, &cubed, y);
            expect_all([](const Tensor& a, const Tensor& b) { return rpc::sync<&cubed_there>(1, 2, a, b); }, nested, y);
            // The nested call comes back to this worker, whose devices wait for no other.
            expect_all([](const Tensor& a, const Tensor& b) { return rpc::sync<&cubed_there>(1, 0, a, b); }, nested, y);
            // Arguments on several devices.
            expect_all(
                [](const Tensor& a, const Tensor& b) {
                  return rpc::sync<[](const Tensor& p, const Tensor& q) { return cubed(p, q.to(p.device())); }>(1, a,
                                                                                                                b);
                },
                &cubed, other);
          });
}

TEST_P(RpcDeviceGradients, OfParametersThereAndArgumentsHere) {
  trainer({{{"worker1", pairs({{0, 1}})}}, {}}, [] {
    const Tensor x = leaf({1, 2}, 0);
    const auto layer = rpc::remote<Layer>(1, 1);
    layer.sync<&Layer::forward>(x).sum().backward();
    expect_same(x.grad(), at::tensor({4.0, 9.0}, at::kDouble).to(fake(0)));
    expect_same(layer.sync<&Layer::grad>(), at::tensor({4.0, 12.0}, at::kDouble).to(fake(0)));
    {
      autograd::Context context;
      autograd::backward(context, {layer.sync<&Layer::forward>(x).sum()});
      expect_same(context.gradient(x), at::tensor({4.0, 9.0}, at::kDouble).to(fake(0)));
      expect_same(layer.sync<&Layer::context_grad>(), at::tensor({4.0, 12.0}, at::kDouble).to(fake(0)));
    }
    // A handler's own backward().
    const Tensor a = leaf({1, 2}, 0), b = leaf({3, 5}, 0);
    rpc::sync<&backward_there>(1, a, b);
    expect_same(a.grad(), at::tensor({6.0, 20.0}, at::kDouble).to(fake(0)));
    expect_same(b.grad(), at::tensor({1.0, 4.0}, at::kDouble).to(fake(0)));
    autograd::Context context;
    rpc::sync<&backward_there>(1, a, b);
    expect_same(context.gradient(a), at::tensor({6.0, 20.0}, at::kDouble).to(fake(0)));
  });
}

// A result depends on a third worker's argument, for which these two workers have no maps.
TEST_P(RpcDeviceGradients, ByAThirdWorker) {
  static constexpr auto backward_of = [](const RRef<Tensor>& value) { value.to_here().sum().backward(); };
  trainer({{{"worker1", pairs({{0, 1}})}}, {}, {{"worker1", pairs({{2, 1}})}}}, [] {
    const Tensor x = leaf({1, 2}, 0);
    const RRef<Tensor> value = rpc::remote<&twice>(1, x);
    rpc::sync<backward_of>(2, value);
    expect_same(x.grad(), at::tensor({2.0, 2.0}, at::kDouble).to(fake(0)));
  });
}

MUSTER_RPC_CONTRACT(Rpc, RpcDevices);
INSTANTIATE_TEST_SUITE_P(Rpc, RpcDeviceGradients, testing::ValuesIn(thread_setups()), setup_name);

// --- untrusted bytes ---

using rpc::detail::read_tensors;
using rpc::detail::write_tensors;

struct Wire {
  std::string body;
  std::vector<transport::Piece> pieces;
};
Wire written(Tensors tensors, rpc::detail::Places places) {
  Wire wire;
  write_tensors(tensors, wire.body, wire.pieces, places);
  return wire;
}
Tensors read(Wire wire, rpc::detail::Places places) {
  WireReader reader(wire.body);
  Tensors tensors = read_tensors(reader, wire.pieces, places);
  reader.expect_done();
  return tensors;
}

TEST(RpcDeviceTable, OnlyPlacesThatTheReceiverGives) {
  const std::array three{fake(0), fake(1), fake(2)}, other{fake(2), fake(0), fake(1)};
  const Tensors sent{at::ones({3}).to(fake(1)), at::ones({2}), at::ones({0}).to(fake(2))};
  const Tensors got = read(written(sent, three), other);
  EXPECT_EQ(got[0].device(), fake(0));
  EXPECT_EQ(got[1].device(), at::Device(at::kCPU));
  EXPECT_EQ(got[2].device(), fake(1));
  EXPECT_THROW(read(written(sent, three), std::span(other).first(1)), CorruptError);
  EXPECT_THROW(read(written({sent[2]}, three), std::span(other).first(2)),
               CorruptError);  // a tensor without elements, too
  EXPECT_THROW(read(written(sent, three), {}), CorruptError);
  EXPECT_THROW(written(sent, {}), InvalidArgument);
  EXPECT_THROW(written(sent, std::span(three).first(1)), InvalidArgument);
  Wire undefined = written({Tensor()}, three);
  undefined.body.back() = 8;  // the undefined tensor gets an index
  EXPECT_THROW(read(undefined, three), CorruptError);
}

TEST(RpcDeviceTable, FuzzedPlacesAreCorruptAtWorst) {
  std::mt19937 random(17);
  const std::array places{fake(0), c10::Device(at::kCPU), fake(2)};
  const Tensor image = at::zeros({2, 2, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast).to(fake(0));
  const Wire good = written({image, Tensor(), at::zeros({5}).requires_grad_(), at::empty({0, 2}).to(fake(2)), image[0],
                             at::zeros({3}, at::kDouble).to(fake(2))},
                            places);
  const size_t before = fake_device_counts().blocks;
  for (int round = 0; round < 20'000; ++round) {
    Wire wire = good;
    for (size_t change = random() % 4 + 1; change > 0 && !wire.body.empty(); --change) {
      const size_t at = random() % wire.body.size();
      if (random() % 3 == 0) {
        wire.body.erase(at, random() % 9);
      } else {
        wire.body[at] = static_cast<char>(random() % 2 ? random() : wire.body[at] ^ (1 << random() % 8));
      }
    }
    try {
      for (const Tensor& tensor : read(wire, places)) {
        if (!tensor.defined()) continue;
        EXPECT_NE(tensor.device(), fake(1));
        tensor.cpu().clone();  // reads every byte that the tensor claims to have
      }
    } catch (const CorruptError&) {
    } catch (const c10::NotImplementedError&) {  // of opaque bits, which libtorch does not copy between devices
    }
  }
  EXPECT_EQ(fake_device_counts().blocks, before);
}

TEST(RpcDeviceTable, MapsOfOthersAreChecked) {
  const std::vector<rpc::WorkerInfo> workers{{.name = "a", .id = 0}, {.name = "b", .id = 1}};
  const auto meet = [&](const std::string& posted) {
    const auto store = make_memory_store();
    store->set("d/map/1", posted);
    store->set("d/found/1", WireWriter().put(std::string_view()).put(std::string_view()).bytes());
    rpc::Devices devices;
    devices.meet({}, {.store = *store,
                      .prefix = "d",
                      .deadline = patience(),
                      .self = 0,
                      .workers = workers,
                      .has_maps = {false, true}});
    return std::vector(devices.calls_from(1).begin(), devices.calls_from(1).end());
  };
  const auto map = [](uint32_t maps, std::string_view name, uint32_t pairs, std::vector<int8_t> numbers) {
    WireWriter writer;
    writer.put(maps).put(name).put(pairs);
    for (const int8_t number : numbers) writer.put(number);
    return writer.take();
  };
  const auto type = static_cast<int8_t>(c10::DeviceType::PrivateUse1);
  EXPECT_EQ(meet(map(1, "a", 1, {type, 9, type, 2})), std::vector{fake(2)});  // device 9 is b's, and not checked here
  EXPECT_TRUE(meet(map(1, "b", 1, {type, 0, type, 2})).empty());
  EXPECT_THROW(meet(map(1, "a", 1, {type, 0, type, 3})), InvalidArgument);
  EXPECT_THROW(meet(map(1, "a", 1, {type, 0, type, -1})), InvalidArgument);
  EXPECT_THROW(meet(map(1, "a", 1, {type, 0, type, -2})), CorruptError);
  EXPECT_THROW(meet(map(1, "a", 1, {type, 0, 100, 0})), CorruptError);
  EXPECT_THROW(meet(map(1, "a", 1, {type, 0, -1, 0})), CorruptError);
  EXPECT_THROW(meet(map(1, "a", UINT32_MAX, {type, 0, type, 1})), CorruptError);
  EXPECT_THROW(meet(map(UINT32_MAX, "a", 1, {type, 0, type, 1})), CorruptError);
  EXPECT_THROW(meet(map(1, "a", 1, {type, 0, type, 1, 0})), CorruptError);
  EXPECT_THROW(meet(""), CorruptError);
}

}  // namespace
}  // namespace muster::test
