// Serves the caller's table, as serve_store() serves a new one.
//
// Thread-safety: a function.
#pragma once

#include <memory>
#include <string_view>

#include "muster/store/store.h"
#include "store/table/shared_table.h"

namespace muster::store {

// `name` as for serve_store().
std::unique_ptr<StoreServer> serve_table(std::string_view name, std::shared_ptr<SharedTable> table);

}  // namespace muster::store
