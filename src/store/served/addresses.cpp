#include "store/served/addresses.h"

#include <utility>

#include "base/text.h"
#include "muster/base/error.h"
#include "store/address/tcp_address.h"

namespace muster {
namespace store {
namespace {

Secret need_secret(std::string_view address, const std::optional<Secret>& given) {
  if (given) return *given;
  if (auto set = Secret::from_environment()) return *std::move(set);
  throw Unauthorized(text("the store at ", address, " needs the job's secret, and there is none in MUSTER_SECRET"),
                     "Set MUSTER_SECRET to the same text on all hosts; 'muster secret' makes one");
}

}  // namespace

std::unique_ptr<StoreServer> serve_table(std::string_view name, std::shared_ptr<SharedTable> table,
                                         const std::optional<Secret>& secret) {
  if (name.starts_with(kEtcdScheme))
    throw InvalidArgument(text("a store at ", name, " is served by etcd, not by Muster"),
                          "Start etcd, and pass its address to connect_store()");
  if (!name.starts_with(kTlsScheme)) return serve_unix(name, std::move(table));
  return serve_tls(name, need_secret(name, secret), std::move(table));
}

}  // namespace store

std::shared_ptr<Store> connect_store(std::string_view address, Deadline deadline, const std::optional<Secret>& secret) {
  if (address.starts_with(store::kTlsScheme))
    return store::connect_tls(address, store::need_secret(address, secret), deadline);
  if (address.starts_with(store::kEtcdScheme)) return store::connect_etcd(address, deadline);
  return store::connect_unix(address, deadline);
}

std::unique_ptr<StoreServer> serve_store(std::string_view name, const std::optional<Secret>& secret) {
  return store::serve_table(name, std::make_shared<store::SharedTable>(), secret);
}

}  // namespace muster
