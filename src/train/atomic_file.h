// write_file: a file that is there whole or not at all.
//
// The bytes go to a temporary file beside the target, which then takes the target's name (rename(2) replaces
// atomically).
//
// Thread-safety: all of it; of several writers of one path, one wins.
#pragma once

#include <filesystem>
#include <string_view>

namespace muster::train {

// Unavailable, naming the path, where it cannot be written; the file that was there before then still is.
void write_file(const std::filesystem::path& path, std::string_view bytes);

}  // namespace muster::train
