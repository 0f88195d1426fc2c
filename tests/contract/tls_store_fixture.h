// What the tests of the store over TLS have in common: a server and a client of it.
#pragma once

#include <memory>
#include <string>

#include "contract/store_contract.h"
#include "store/served/addresses.h"
#include "store/table/shared_table.h"
#include "support/served.h"

namespace muster::test::tls_stores {

using test::eventually;
using test::TlsEnd;
using testing::internal::CaptureStderr;
using testing::internal::GetCapturedStderr;

inline constexpr const char* kHere = "tls://127.0.0.1:0";

// A server, a client of it with the right secret, and everything that is logged.
class TlsStore : public testing::Test {
 protected:
  TlsStore() { CaptureStderr(); }
  ~TlsStore() override {
    if (!log_taken_) GetCapturedStderr();
  }

  std::string log() {
    log_taken_ = true;
    return GetCapturedStderr();
  }
  std::shared_ptr<Store> connect(Deadline deadline = soon()) { return connect_store(address(), deadline, secret_); }
  const std::string& address() const { return server_->address(); }
  void expect_it_serves() {
    client_->set("still", "here");
    EXPECT_EQ(connect()->get("still", soon()), "here");
  }

  const Secret secret_ = Secret::generate();
  const std::shared_ptr<store::SharedTable> table_ = std::make_shared<store::SharedTable>();
  std::unique_ptr<StoreServer> server_ = store::serve_table(kHere, table_, secret_);
  std::shared_ptr<Store> client_ = connect();
  bool log_taken_ = false;
};

}  // namespace muster::test::tls_stores
