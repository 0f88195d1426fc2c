// An Error as a note that other ranks can read and throw again.
//
// Thread-safety: pure functions.
#pragma once

#include <exception>
#include <string>

#include "muster/base/error.h"

namespace muster::comm {

std::string write_failure(const Error& error);
// Corrupt, as the exception it returns, for what is no such note.
std::exception_ptr read_failure(const std::string& note);

}  // namespace muster::comm
