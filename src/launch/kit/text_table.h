// Words in columns, and numbers as people read them.
//
// Thread-safety: pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace muster::launch {

// One line per row, two spaces between columns, each column as wide as its widest cell. `right`: whether a column is
// aligned to the right, as numbers are. Rows have as many cells as `right`.
std::string aligned(const std::vector<std::vector<std::string>>& rows, const std::vector<bool>& right);

// "3.1"
std::string fixed(double number, int digits);
// "12,345"
std::string with_commas(double number);
// "12:31", "3:00:12", "5d 3:00:12"
std::string clock_time(double seconds);
std::string human_bytes(uint64_t bytes);          // "512 B", "1.2 MiB"
std::string human_time(uint64_t ns);              // "780 ns", "45.6 us", "12.3 ms", "3.1 s"
std::string human_ranks(std::vector<int> ranks);  // "0-3, 5", sorted
// Without control characters; UTF-8 is kept.
std::string printable(std::string_view words);
std::string printable_lines(std::string_view lines);  // the same, and newlines are kept

}  // namespace muster::launch
