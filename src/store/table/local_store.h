// A Store directly on a SharedTable: what make_memory_store() and a server's local() return.
//
// Thread-safety: all methods; a thread that waits does not block others.
#pragma once

#include <memory>

#include "muster/store/store.h"
#include "store/table/shared_table.h"

namespace muster::store {

std::shared_ptr<Store> make_local_store(std::shared_ptr<SharedTable> table);

}  // namespace muster::store
