#include "muster/train/progress.h"

#include <sys/ioctl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <utility>
#include <vector>

#include "base/text.h"
#include "launch/kit/text_table.h"
#include "muster/comm/report_progress.h"
#include "muster/comm/world.h"

namespace muster {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr auto kRedraw = std::chrono::milliseconds(100);
constexpr double kKeep = 0.95;  // the weight of the shown loss against a new one
constexpr int kWidest = 110;    // a longer bar would not be easier to read
constexpr int kNarrowestBar = 8;
constexpr std::string_view kEighths[] = {"", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};

bool locale_is_utf8() {
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    const char* value = std::getenv(name);
    if (value == nullptr || *value == 0) continue;  // the first that is set decides
    std::string lower(value);
    for (auto& c : lower) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    return lower.find("utf-8") != std::string::npos || lower.find("utf8") != std::string::npos;
  }
  return false;
}

bool is_terminal(int fd) {
  const char* term = std::getenv("TERM");
  if (term != nullptr && std::string_view(term) == "dumb") return false;
  const char* told = std::getenv("MUSTER_TERMINAL");
  if (told == nullptr || std::string_view(told) != "1") return ::isatty(fd) == 1;
  struct stat status {};  // MUSTER_TERMINAL is about the launcher's pipes, not about a file that the rank writes to
  return ::fstat(fd, &status) == 0 && !S_ISREG(status.st_mode);
}

int terminal_width(int fd) {
  // A COLUMNS that is not a positive number is ignored: training must not fail because of it.
  if (const char* told = std::getenv("COLUMNS"); told != nullptr && std::atoi(told) > 0) return std::atoi(told);
  winsize size{};
  if (::ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  return 80;
}

std::string print(const char* format, double number) {
  char buffer[64];
  std::snprintf(buffer, sizeof buffer, format, number);
  return buffer;
}

std::string bar(double fraction, int width, bool unicode) {
  std::string out;
  const int steps = unicode ? 8 : 1;
  const int filled = static_cast<int>(std::floor(fraction * width * steps));
  for (int i = 0; i < filled / steps; ++i) out += unicode ? "█" : "#";
  int used = filled / steps;
  if (filled % steps != 0) {
    out += kEighths[filled % steps];
    ++used;
  }
  out.append(static_cast<size_t>(width - used), unicode ? ' ' : '.');
  return out;
}

}  // namespace

Progress::Progress(int64_t total, ProgressOptions options)
    : options_(std::move(options)), total_(std::max<int64_t>(total, 0)) {
  const World* world = World::current_or_null();
  active_ = options_.draw.value_or(world == nullptr || world->rank() == 0);
  terminal_ = options_.terminal.value_or(is_terminal(options_.fd));
  unicode_ = options_.unicode.value_or(locale_is_utf8());
  // The last column stays empty: a full line makes many terminals wrap.
  width_ = std::clamp(options_.width.value_or(terminal_width(options_.fd)) - 1, 1, kWidest);
  start_ = options_.now();
  drawn_ = start_ - kRedraw;
}

Progress::~Progress() {
  if (active_ && on_line_) write("\n");
}

void Progress::set_label(std::string label) {
  label_ = std::move(label);
  if (active_ && terminal_) draw(false);
}

void Progress::advance(int64_t units, std::optional<double> loss) {
  done_ += units;
  report_progress({.step = ++steps_, .samples = done_});
  if (loss)
    loss_ = loss_ && std::isfinite(*loss_) && std::isfinite(*loss) ? kKeep * *loss_ + (1 - kKeep) * *loss : *loss;
  if (!active_) return;
  if (terminal_) {
    if (options_.now() - drawn_ >= kRedraw) draw(false);
  } else if (const auto tenth = total_ > 0 ? done_ * 10 / total_ : 0; tenth >= next_tenth_ && tenth < 10) {
    next_tenth_ = tenth + 1;  // finish() draws the line for the last tenth
    draw(false);
  }
}

void Progress::finish() {
  if (active_) draw(true);
  active_ = false;
}

void Progress::draw(bool last) {
  drawn_ = options_.now();
  if (terminal_) {
    write(text("\r", line(last), "\x1b[K", last ? "\n" : ""));
    on_line_ = !last;
  } else {
    write(text(line(last), "\n"));
  }
}

std::string Progress::line(bool last) {
  const double fraction =
      total_ > 0 ? std::clamp(static_cast<double>(done_) / static_cast<double>(total_), 0.0, 1.0) : 1.0;
  const double elapsed = Seconds(options_.now() - start_).count();
  const double rate = elapsed > 0 ? static_cast<double>(done_) / elapsed : 0;

  std::vector<std::string> parts;
  parts.push_back(print("%3.0f%%", std::floor(fraction * 100)));
  parts.push_back(
      last       ? text("in ", launch::clock_time(elapsed))
      : rate > 0 ? text(launch::clock_time(static_cast<double>(std::max<int64_t>(total_ - done_, 0)) / rate), " left")
                 : "");
  if (loss_) parts.push_back(print("loss %.4f", *loss_));
  if (rate > 0) parts.push_back(text(launch::with_commas(rate), " ", options_.unit, "/s"));

  // Takes as many parts as fit, the most important first. Shows them in the order of the header's picture.
  std::string label = label_;
  if (static_cast<int>(label.size() + 2 + parts[0].size()) > width_) label.clear();
  int used = static_cast<int>(label.size());
  const int least_bar = used + 2 + static_cast<int>(parts[0].size()) + kNarrowestBar <= width_ ? kNarrowestBar : 0;
  size_t fitting = 0;
  for (const auto& part : parts) {
    if (used + 2 + static_cast<int>(part.size()) + least_bar > width_ && fitting > 0) break;
    used += part.empty() ? 0 : 2 + static_cast<int>(part.size());
    ++fitting;
  }
  std::string tail;
  const auto show = [&](size_t index) {
    if (index < fitting && !parts[index].empty()) tail.append(tail.empty() ? "" : "  ").append(parts[index]);
  };
  show(0);
  for (size_t index = fitting; index-- > 1;) show(index);

  // The bar may shrink to make room for the numbers. It never grows again: a bar that changes size is hard to read.
  const int room = bar_width_ = std::min(width_ - used, bar_width_);
  std::string out = label;
  if (room >= kNarrowestBar) out.append(out.empty() ? "" : " ").append(bar(fraction, room, unicode_));
  if (!out.empty() && !tail.empty()) out += room >= kNarrowestBar ? " " : "  ";
  return out + tail;
}

void Progress::write(const std::string& bytes) const {
  // A short or failed write leaves a damaged bar. The next draw repairs it.
  ssize_t written = 0;
  do written = ::write(options_.fd, bytes.data(), bytes.size());
  while (written < 0 && errno == EINTR);
}

}  // namespace muster
