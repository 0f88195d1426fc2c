// Erases many keys with one call, in stores that outlive their users (etcd, and parts of it). A store that a launcher
// or a test serves ends with its server.
//
// Thread-safety: as every Store.
#pragma once

#include <string_view>

#include "muster/store/store.h"

namespace muster::store {

// A store that supports it.
class EraseAll {
 public:
  virtual ~EraseAll() = default;
  // Erases every key that begins with `prefix`, which must not be empty. Errors as a Store's.
  virtual void erase_all(std::string_view prefix) = 0;
};

// Returns false if the store does not support it.
inline bool erase_all(Store& store, std::string_view prefix) {
  auto* const able = dynamic_cast<EraseAll*>(&store);
  if (able) able->erase_all(prefix);
  return able != nullptr;
}

}  // namespace muster::store
