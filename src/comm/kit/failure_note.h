// Writes an Error as a note that other ranks can read and throw again.
//
// Thread-safety: pure functions.
#pragma once

#include <exception>
#include <string>

#include "muster/base/error.h"

namespace muster::comm {

std::string write_failure(const Error& error);
// Returns the exception that the note describes; a CorruptError if `note` is not such a note.
std::exception_ptr read_failure(const std::string& note);

}  // namespace muster::comm
