// Many keys erased at once, in stores that outlive those who use them: etcd, and parts of it. What a launcher or a test
// serves ends with it.
//
// Thread-safety: as every Store.
#pragma once

#include <string_view>

#include "muster/store/store.h"

namespace muster::store {

// A store that can.
class EraseAll {
 public:
  virtual ~EraseAll() = default;
  // Every key that begins so. `prefix`: not empty. Errors as a Store's.
  virtual void erase_all(std::string_view prefix) = 0;
};

// False where the store cannot.
inline bool erase_all(Store& store, std::string_view prefix) {
  auto* const able = dynamic_cast<EraseAll*>(&store);
  if (able) able->erase_all(prefix);
  return able != nullptr;
}

}  // namespace muster::store
