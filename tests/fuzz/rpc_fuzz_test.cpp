// A worker that says to another what no worker says: messages of the agents that were real and then changed. The other
// must drop them or do what they say, answer the next call, and come to an end.
//
// How often: as in frame_fuzz_test.cpp.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <future>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/text.h"
#include "comm/world/world_parts.h"
#include "muster/comm/world.h"
#include "muster/rpc/call.h"
#include "muster/rpc/rref.h"
#include "muster/rpc/worker.h"
#include "rpc/objects/agent_messages.h"
#include "support/dice.h"
#include "support/fuzz.h"
#include "support/patience.h"
#include "support/sanitized.h"
#include "transport/shm/shm_transport.h"

namespace muster::test {
namespace {

using namespace std::chrono_literals;

constexpr int kEvil = 0, kGood = 1;

int64_t measured(at::Tensor tensor, std::string text, std::vector<std::pair<std::string, double>> list) {
  return tensor.numel() + static_cast<int64_t>(text.size() + list.size());
}
struct Pot {
  int put(int n) { return content += n; }
  std::atomic<int> content{0};
};

struct Said {
  std::string body;
  std::vector<std::string> pieces;
};

// Speaks to the agent of kGood in its own words, and keeps what that says.
class EvilWorker final : public transport::Receiver {
 public:
  // As Agent::start(), of the first RPC in a World.
  explicit EvilWorker(const World& world) {
    const auto& parts = world.parts();
    const auto store = world.shared_store();
    const std::string prefix = text(parts.prefix, "/rpc/1");
    const auto deadline = patience();
    const std::string good = store->get(text(prefix, "/name/", kGood), deadline);  // its transports, and the name
    store->set(text(prefix, "/name/", kEvil), text(good.substr(0, good.find(' ')), " evil"));
    transport_ =
        transport::make_shm_transport({.rank = kEvil,
                                       .workers = {kEvil, kGood},
                                       .names = {"evil", "good"},
                                       .pids = {},
                                       .heap = parts.arena,
                                       .watch = parts.watch,
                                       .prefix = text(prefix, "/shm/", kEvil)},
                                      {[store](const auto& key, const auto& value) { store->set(key, value); },
                                       [store](const auto& key, Deadline until) { return store->get(key, until); }},
                                      *this, deadline);
    store->set(text(prefix, "/ready/", kEvil), "");
    store->get(text(prefix, "/ready/", kGood), deadline);
  }
  ~EvilWorker() { transport_->close(Deadline::after(0s)); }

  void on_message(int, std::string_view body, std::vector<transport::Piece>& pieces) override {
    Said said{std::string(body), {}};
    for (const auto& piece : pieces) said.pieces.emplace_back(reinterpret_cast<const char*>(piece.data), piece.bytes);
    rpc::Header header;
    if (body.size() >= sizeof header) std::memcpy(&header, body.data(), sizeof header);
    if (header.call == kProbe && header.kind == rpc::MessageKind::kReply) answered_ = true;
    heard.push_back(std::move(said));
  }
  void on_lost(int, const std::string& cause) override { lost = cause; }

  void say(Said said) {
    transport::Message message{std::move(said.body), {}};
    for (const auto& piece : said.pieces) {
      const auto bytes = std::make_shared<std::string>(piece);
      message.pieces.push_back({reinterpret_cast<std::byte*>(bytes->data()), bytes->size(), bytes, false});
    }
    transport_->send(kGood, std::move(message));
  }

  // Hears until `done`.
  template <typename Done>
  bool listen(Done done) {
    for (const auto end = patience(); !end.passed() && lost.empty();) {
      if (done()) return true;
      if (!transport_->poll()) std::this_thread::yield();
    }
    return done();
  }

  // Whether the other still does what it is asked.
  bool answers(const Said& call) {
    Said probe = call;
    rpc::Header header;
    std::memcpy(&header, probe.body.data(), sizeof header);
    header.call = kProbe;
    std::memcpy(probe.body.data(), &header, sizeof header);
    answered_ = false;
    say(std::move(probe));
    return listen([this] { return answered_; });
  }

  std::vector<Said> heard;
  std::string lost;

 private:
  static constexpr uint64_t kProbe = 0x70726f6265;
  bool answered_ = false;
  std::shared_ptr<transport::PolledTransport> transport_;
};

TEST(RpcFuzz, AWorkerSurvivesWhatAnotherSays) {
  std::promise<void> over;
  run_threads(2, [&](World& world) {
    if (world.rank() == kGood) {
      rpc::init({.name = "good", .timeout = kPatience});
      // One of each kind, for the other to learn from.
      const at::Tensor tensor = at::arange(12, at::kFloat).reshape({3, 4}).t();
      const auto call =
          rpc::async<&measured>(kEvil, tensor, "some text", std::vector{std::pair<std::string, double>{}});
      const auto large =
          rpc::async<&measured>(kEvil, at::ones({5000}), "", std::vector<std::pair<std::string, double>>());
      const auto pot = rpc::remote<Pot>(kEvil);
      const auto put = pot.async<&Pot::put>(1);
      const auto mine = rpc::make_rref(std::make_shared<Pot>());
      const auto handed = rpc::async<[](rpc::RRef<Pot>) {}>(kEvil, mine);
      over.get_future().wait();
      rpc::shutdown(rpc::Shutdown::kAbrupt);
      return;
    }
    struct Over {
      std::promise<void>& promise;
      ~Over() { promise.set_value(); }
    } end{over};
    EvilWorker evil(world);
    ASSERT_TRUE(evil.listen([&] { return evil.heard.size() >= 5; }));
    const std::vector<Said> real = evil.heard;
    ASSERT_TRUE(evil.answers(real[0]));
    testing::internal::CaptureStderr();  // a line for each message that is dropped
    const int64_t rounds = repeat(kSanitized ? 500 : 3000, [&](uint64_t number) {
      Dice dice(number);
      for (int i = 0; i < 8; ++i) {
        Said said = real[dice.below(real.size())];
        if (dice.one_in(3)) said.body[0] = static_cast<char>(dice.below(12));  // another kind
        if (!dice.one_in(4)) said.body = mutated(said.body, dice);
        if (dice.one_in(3) && !said.pieces.empty()) said.pieces[0].resize(dice.below(50));
        if (dice.one_in(6)) said.pieces.push_back(dice.bytes(dice.below(40)));
        evil.say(std::move(said));
      }
      EXPECT_TRUE(evil.answers(real[0])) << evil.lost;
      evil.heard.clear();
    });
    EXPECT_NE(testing::internal::GetCapturedStderr().find("was dropped"), std::string::npos);
    EXPECT_TRUE(evil.answers(real[0])) << "after " << rounds << " rounds: " << evil.lost;
  });
}

}  // namespace
}  // namespace muster::test
