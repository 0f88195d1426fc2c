// The caller's mistakes, found before anything is sent: devices, layouts, dtypes, shapes, ranks. The same for every
// backend of CPU tensors.
#pragma once

#include "comm/backend.h"

namespace muster::comm {

// Throws InvalidArgument with what is wrong and what to do.
void validate(const Operation& operation, int rank, int size, std::string_view backend);

}  // namespace muster::comm
