// Finds the caller's mistakes before anything is sent: devices, layouts, dtypes, shapes, ranks. The checks are the same
// for every backend of CPU tensors.
#pragma once

#include "comm/core/backend.h"

namespace muster::comm {

// Throws InvalidArgument, which says what is wrong and what to do.
void validate(const Operation& operation, int rank, int size, std::string_view backend);

// Throws InvalidArgument, which names the option, if floating-point numbers cannot be converted to `dtype` and computed
// with.
void validate_float(std::string_view option, at::ScalarType dtype);

}  // namespace muster::comm
