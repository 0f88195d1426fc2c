// A rank's side of the messages between it and its launcher, with a store that is silent.
#include <gtest/gtest.h>

#include <future>
#include <memory>

#include "muster/base/error.h"
#include "store/kit/outage.h"
#include "support/forwarding_store.h"
#include "train/elastic_launcher.h"

namespace muster::test {
namespace {

// Every call waits for its deadline, which is made to pass immediately. One without a deadline waits for ever.
class SilentStore final : public ForwardingStore {
 public:
  SilentStore() : ForwardingStore(make_memory_store()) {}
  void set(std::string_view, std::string_view) override { wait_for(store::CallsBy::of_this_thread()); }
  Versioned watch(std::string_view, uint64_t, Deadline deadline) override {
    wait_for(deadline);
    return {};
  }

 private:
  static void wait_for(Deadline deadline) {
    if (deadline.is_never()) std::promise<void>().get_future().wait();
    throw TimeoutError("the store is silent");
  }
};

TEST(ElasticLauncher, EndsWhileTheStoreIsSilent) {
  elastic::Launcher launcher(std::make_shared<SilentStore>(), 0);
  EXPECT_FALSE(launcher.stops());
}

}  // namespace
}  // namespace muster::test
