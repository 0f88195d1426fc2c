// How workers come together over the ucx transport, without UCX.
#include "contract/ucx_fixture.h"
#include "muster/base/error.h"
#include "muster/store/store.h"

namespace muster::test::ucx_peers {
namespace {

TEST(UcxMeeting, WhoDoesNotComeIsNamed) {
  const auto hub = std::make_shared<Hub>(1);
  const auto store = make_memory_store();
  Recorder receiver;
  auto options = options_of(0, 3, hub);
  options.names = {"alice", "bob", "carol"};
  store->set("test/ucx/1", UcxEntry{transport::ucx::make_key(), 3, 1, 1000, "0"}.text());
  try {
    transport::make_ucx_transport(options, directory_of(store), receiver, Deadline::after(milliseconds(50)));
    ADD_FAILURE() << "it did not wait for carol";
  } catch (const TimeoutError& error) {
    EXPECT_THAT(error.message(), HasSubstr("carol"));
    EXPECT_EQ(error.missing(), std::vector<int>{2});
  }
}

TEST(UcxMeeting, WhoDoesNotSayHelloIsNamed) {
  const auto hub = std::make_shared<Hub>(1);
  const auto store = make_memory_store();
  Recorder receiver;
  auto options = options_of(0, 2, hub);
  options.names = {"alice", "bob"};
  store->set("test/ucx/1", UcxEntry{transport::ucx::make_key(), 2, 1, 1000, "0"}.text());  // rank 0 itself
  try {
    transport::make_ucx_transport(options, directory_of(store), receiver, Deadline::after(milliseconds(50)));
    ADD_FAILURE() << "it did not wait for bob";
  } catch (const TimeoutError& error) {
    EXPECT_THAT(error.message(), HasSubstr("workers have not connected in time: bob"));
    EXPECT_EQ(error.missing(), std::vector<int>{1});
  }
}

TEST(UcxMeeting, OtherVersionsSizesAndNonsenseAreRefused) {
  const auto hub = std::make_shared<Hub>(1);
  Recorder receiver;
  const auto meet = [&](const std::string& entry) {
    const auto store = make_memory_store();
    store->set("test/ucx/1", entry);
    transport::make_ucx_transport(options_of(0, 2, hub), directory_of(store), receiver, in_time());
  };
  const std::string good = UcxEntry{transport::ucx::make_key(), 2, 1, 1000, "0"}.text();
  EXPECT_THROW(meet(UcxEntry{transport::ucx::make_key(), 3, 1, 1000, "0"}.text()), Mismatch);
  EXPECT_THROW(meet("muster-ucx2" + good.substr(11)), Mismatch);
  EXPECT_THROW(meet(""), CorruptError);
  EXPECT_THROW(meet(good.substr(0, 20)), CorruptError);
  EXPECT_THROW(meet(good + "f"), CorruptError);
  EXPECT_THROW(meet(UcxEntry{transport::ucx::make_key(), 2, 1, 1000, "999"}.text()), Unavailable);  // no such fabric
}

TEST(UcxMeeting, OptionsAreChecked) {
  const auto hub = std::make_shared<Hub>(1);
  Recorder receiver;
  const auto make = [&](auto change) {
    auto options = options_of(0, 2, hub);
    change(options);
    transport::make_ucx_transport(options, directory_of(make_memory_store()), receiver, in_time());
  };
  EXPECT_THROW(make([](auto& options) { options.rank = 2; }), InvalidArgument);
  EXPECT_THROW(make([](auto& options) { options.peers = {0}; }), InvalidArgument);
  EXPECT_THROW(make([](auto& options) { options.peers = {1, 1}; }), InvalidArgument);
  EXPECT_THROW(make([](auto& options) { options.heartbeat = milliseconds(1); }), InvalidArgument);
}

}  // namespace
}  // namespace muster::test::ucx_peers
