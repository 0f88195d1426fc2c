// The kinds of addresses of stores. connect_store() and serve_store() choose by the scheme.
//
// Thread-safety: functions.
#pragma once

#include <memory>
#include <optional>
#include <string_view>

#include "muster/base/secret.h"
#include "muster/store/store.h"
#include "store/table/shared_table.h"

namespace muster::store {

inline constexpr std::string_view kEtcdScheme = "etcd://";

std::shared_ptr<Store> connect_unix(std::string_view address, Deadline deadline);
std::shared_ptr<Store> connect_etcd(std::string_view address, Deadline deadline);
std::shared_ptr<Store> connect_tls(std::string_view address, const Secret& secret, Deadline deadline);

// `name`, `address`: as for serve_store().
std::unique_ptr<StoreServer> serve_unix(std::string_view name, std::shared_ptr<SharedTable> table);
std::unique_ptr<StoreServer> serve_tls(std::string_view address, const Secret& secret,
                                       std::shared_ptr<SharedTable> table);

// Serves the caller's table, as serve_store() serves a new one.
std::unique_ptr<StoreServer> serve_table(std::string_view name, std::shared_ptr<SharedTable> table,
                                         const std::optional<Secret>& secret = {});

}  // namespace muster::store
