// What a rank reads from the others over a wire: announcements, headers of messages, and data.
//
// A rank of three is real, and its peers echo what it sends them, which is what right peers would say. The bytes that
// are fuzzed change the echoes: one says which operation is called, then each echo takes one that says how many bytes
// change, and two for each change: where, and by what.
#include <ATen/ops/arange.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/core/backend_context.h"
#include "comm/core/operation.h"
#include "comm/wire/wire.h"
#include "comm/wire/wire_backend.h"
#include "fuzz/parsers.h"
#include "muster/store/store.h"

namespace muster::test {
namespace {

using comm::OpKind;
using comm::Wire;
using comm::WireKind;
using comm::WireTag;

constexpr int kPeers = 3;  // and this rank is 0

class EchoingWire final : public Wire {
 public:
  EchoingWire(std::string_view changes, bool& changed) : changes_(changes), changed_(changed) {}

  std::unique_ptr<Transfer> send(int peer, WireTag tag, const std::byte* data, size_t bytes) override {
    last_[{peer, tag.kind}].assign(data, data + bytes);
    return std::make_unique<Done>(peer);
  }
  std::unique_ptr<Transfer> receive(int peer, WireTag tag, std::byte* data, size_t bytes) override {
    return std::make_unique<Received>(*this, peer == kAnySource ? 1 : peer, tag.kind, data, bytes);
  }
  void on_gone(std::function<void(int)>) override {}
  int take(WireTag, std::byte* data, size_t bytes) override {
    fill(1, WireKind::kMessage, data, bytes);
    return 1;
  }
  std::vector<int> gone() override { return {}; }
  void close() override {}

 private:
  struct Done : Transfer {
    explicit Done(int peer) : peer(peer) {}
    int wait(Deadline) override { return peer; }
    const int peer;
  };
  // Echoes when it is waited for: the rank has sent by then.
  struct Received final : Done {
    Received(EchoingWire& wire, int peer, WireKind kind, std::byte* data, size_t bytes)
        : Done(peer), wire(wire), kind(kind), data(data), bytes(bytes) {}
    int wait(Deadline) override {
      wire.fill(peer, kind, data, bytes);
      return peer;
    }
    EchoingWire& wire;
    const WireKind kind;
    std::byte* const data;
    const size_t bytes;
  };

  void fill(int peer, WireKind kind, std::byte* data, size_t bytes) {
    const auto& echo = last_[{peer, kind}];
    std::fill_n(std::copy_n(echo.begin(), std::min(bytes, echo.size()), data), bytes - std::min(bytes, echo.size()),
                std::byte{0});
    for (int changes = next() % 8; changes > 0; --changes) {
      const size_t where = next();  // a header has 304 bytes, and its last 240 are payload
      const auto by = static_cast<std::byte>(next());
      data[where % bytes] ^= by;
      changed_ = changed_ || by != std::byte{0};
    }
  }
  uint8_t next() {
    if (changes_.empty()) return 0;
    const auto first = static_cast<uint8_t>(changes_[0]);
    changes_.remove_prefix(1);
    return first;
  }

  std::string_view changes_;
  bool& changed_;
  std::map<std::pair<int, WireKind>, std::vector<std::byte>> last_;
};

// 9 elements fit into an announcement; 81 do not, nor into the header of a message.
comm::Operation operation_of(uint8_t choice) {
  const bool large = choice % 2;
  const int64_t n = large ? 81 : 9;
  comm::Operation operation{.peer = choice & 32 ? 1 : 0, .tag = 7, .timeout = std::chrono::minutes(10)};
  const auto tensor = [&](int64_t count) { return at::arange(count, at::kFloat); };
  operation.tensor = tensor(n);
  switch (choice / 2 % 16) {
    case 0:
      operation.kind = OpKind::kAllReduce;
      break;
    case 1:
      operation.kind = OpKind::kReduce;
      break;
    case 2:
      operation.kind = OpKind::kBroadcast;
      break;
    case 3:
      operation.kind = OpKind::kScan;
      break;
    case 4:
      operation.kind = OpKind::kAllGather;
      operation.outputs = {tensor(kPeers * n)};
      break;
    case 5:
      operation.kind = OpKind::kGather;
      if (operation.peer == 0) operation.outputs = {tensor(kPeers * n)};
      break;
    case 6:
      operation.kind = OpKind::kScatter;
      if (operation.peer == 0) operation.inputs = {tensor(kPeers * n)};
      break;
    case 7:
      operation.kind = OpKind::kReduceScatter;
      operation.inputs = {tensor(kPeers * n)};
      break;
    case 8:
      operation.kind = OpKind::kAllToAll;
      operation.tensor = at::Tensor();
      operation.inputs = {tensor(kPeers * n)};
      operation.outputs = {tensor(kPeers * n)};
      break;
    case 9:
      operation.kind = OpKind::kSend;
      operation.peer = 1;
      break;
    case 10:  // of what a send before it has echoed
    case 11:
      operation.kind = OpKind::kRecv;
      operation.peer = choice / 2 % 16 == 10 ? 1 : kAnySource;
      break;
    default:
      operation.kind = OpKind::kBarrier;
      operation.tensor = at::Tensor();
  }
  return operation;
}

void parse_wire(std::string_view bytes) {
  if (bytes.empty()) return;
  comm::BackendContext context;
  context.group.name = "fuzzed";
  context.group.store_prefix = "fuzzed";
  context.group.store = make_memory_store();
  context.group.size = kPeers;
  for (const char* gone : {"fuzzed/left/1", "fuzzed/left/2"})  // so that nobody waits for their reports
    context.group.store->set(gone, "9223372036854775807");
  const auto choice = static_cast<uint8_t>(bytes[0]);
  bool changed = false;
  const auto backend =
      c10::make_intrusive<comm::WireBackend>(context, "echo", std::make_unique<EchoingWire>(bytes.substr(1), changed));
  try {
    comm::Operation operation = operation_of(choice);
    if (operation.kind == OpKind::kRecv) {
      comm::Operation before = operation_of(static_cast<uint8_t>(9 * 2 + choice % 2));
      backend->run(before);
    }
    backend->run(operation);
    if (choice & 64) backend->run(operation);  // what the ranks say of the one before
    if (operation.kind == OpKind::kRecv && operation.peer == kAnySource)
      if (const auto taken = backend->take_message(operation, 0); taken.work) taken.work->wait();
  } catch (const Mismatch&) {
    if (!changed) std::abort();
  } catch (const TimeoutError&) {
    std::abort();
  }
}

std::vector<std::string> wire_seeds() {
  std::vector<std::string> seeds;
  for (int choice = 0; choice < 128; ++choice) seeds.push_back(std::string(1, static_cast<char>(choice)));
  // An announcement's count, operation, part, times and line, and a header's bytes and dtype.
  for (const char where : {8, 20, 21, 24, 32, 35, 36, 40, 44})
    for (const char choice : {0, 8, 16, 64, 80}) seeds.push_back({choice, 1, where, static_cast<char>(0xff), 0, 0});
  for (const char where : {0, 7, 12, 16})
    for (const char choice : {20, 21, 22, 23}) seeds.push_back({choice, 1, where, static_cast<char>(0x81), 0, 0});
  return seeds;
}

}  // namespace

Parser wire_parser() { return {"wire", parse_wire, wire_seeds}; }

}  // namespace muster::test
