#include "launch/kit/text_table.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <iomanip>

#include "base/text.h"

namespace muster::launch {

std::string aligned(const std::vector<std::vector<std::string>>& rows, const std::vector<bool>& right) {
  const auto width_of = [](const std::string& cell) {  // in characters, of UTF-8
    return static_cast<size_t>(
        std::count_if(cell.begin(), cell.end(), [](char byte) { return (byte & 0xc0) != 0x80; }));
  };
  std::vector<size_t> widths(right.size());
  for (const auto& row : rows)
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], width_of(row[i]));
  std::string out;
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string padding(widths[i] - width_of(row[i]), ' ');
      line += (i == 0 ? "" : "  ") + (right[i] ? padding + row[i] : row[i] + padding);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + '\n';
  }
  return out;
}

std::string fixed(double number, int digits) {
  PlainOutput out;
  out << std::fixed << std::setprecision(digits) << number;
  return std::move(out).str();
}

std::string with_commas(double number) {
  auto digits = fixed(std::isfinite(number) ? number : 0, 0);
  const int first = digits.starts_with('-') ? 1 : 0;
  for (auto at = static_cast<int>(digits.size()) - 3; at > first; at -= 3)
    digits.insert(static_cast<size_t>(at), 1, ',');
  return digits;
}

std::string clock_time(double seconds) {
  const auto whole = static_cast<int64_t>(std::clamp(std::round(seconds), 0.0, 1e10));
  const auto days = whole / 86400, hours = whole / 3600 % 24, minutes = whole / 60 % 60;
  char buffer[64];
  if (whole >= 3600)
    std::snprintf(buffer, sizeof buffer, "%d:%02d:%02d", static_cast<int>(hours), static_cast<int>(minutes),
                  static_cast<int>(whole % 60));
  else
    std::snprintf(buffer, sizeof buffer, "%d:%02d", static_cast<int>(minutes), static_cast<int>(whole % 60));
  return days == 0 ? std::string(buffer) : text(days, "d ", buffer);
}

std::string human_bytes(uint64_t bytes) {
  if (bytes < 1024) return text(bytes, " B");
  static constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  auto number = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  for (; number >= 1023.5; ++unit) number /= 1024;
  auto digits = fixed(number, number < 9.95 ? 1 : 0);
  if (digits.ends_with(".0")) digits.resize(digits.size() - 2);
  return text(digits, ' ', kUnits[unit]);
}

std::string human_time(uint64_t ns) {
  if (ns < 1000) return text(ns, " ns");
  const auto number = static_cast<double>(ns);
  if (ns < 1'000'000) return fixed(number / 1e3, 1) + " µs";
  if (ns < 1'000'000'000) return fixed(number / 1e6, 1) + " ms";
  return fixed(number / 1e9, 1) + " s";
}

std::string human_ranks(std::vector<int> ranks) {
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  std::vector<std::string> runs;
  for (size_t i = 0; i < ranks.size();) {
    size_t end = i + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    runs.push_back(end - i == 1 ? text(ranks[i]) : text(ranks[i], end - i == 2 ? ", " : "-", ranks[end - 1]));
    i = end;
  }
  return join(runs);
}

std::string printable(std::string_view words) {
  std::string out;
  for (size_t i = 0; i < words.size(); ++i) {
    const auto byte = static_cast<unsigned char>(words[i]);
    const auto next = static_cast<unsigned char>(i + 1 < words.size() ? words[i + 1] : 0);
    const bool is_long = byte == 0xc2 && next >= 0x80 && next < 0xa0;  // U+0080 to U+009F
    out += is_long || byte < ' ' || byte == 0x7f ? ' ' : words[i];
    if (is_long) ++i;
  }
  return out;
}

std::string printable_lines(std::string_view lines) {
  std::string out;
  for (size_t end = lines.find('\n'); end != std::string_view::npos; end = lines.find('\n')) {
    out += printable(lines.substr(0, end)) + '\n';
    lines.remove_prefix(end + 1);
  }
  return out + printable(lines);
}

}  // namespace muster::launch
