// Words in columns.
//
// Thread-safety: pure functions.
#pragma once

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
// Without control characters; UTF-8 is kept.
std::string printable(std::string_view words);

}  // namespace muster::launch
