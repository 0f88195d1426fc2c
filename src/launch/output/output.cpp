#include "launch/output/output.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "base/text.h"

namespace muster::launch {

void Printer::clear() {
  if (bar_is_drawn_) sink_.append("\r\x1b[K");
  bar_is_drawn_ = false;
}

void Printer::line(const void* owner, std::string_view prefix, std::string_view text, std::string_view end) {
  clear();
  if (bar_owner_ == owner) bar_owner_ = nullptr;
  sink_.append(prefix);
  sink_.append(text);
  sink_.append(end);
}

void Printer::bar(const void* owner, std::string_view prefix, std::string_view text) {
  bar_owner_ = owner;
  bar_.assign(prefix).append(text);
  // Draws over the last bar. Clearing that first would flicker.
  sink_.append("\r");
  sink_.append(cut_to_columns(bar_, sink_.columns() - 1));
  sink_.append("\x1b[K");
  bar_is_drawn_ = true;
}

void Printer::redraw_bar() {
  if (!bar_owner_ || bar_is_drawn_) return;
  sink_.append(cut_to_columns(bar_, sink_.columns() - 1));
  sink_.append("\x1b[K");
  bar_is_drawn_ = true;
}

RankStream::RankStream(UniqueFd fd, Printer& printer, Style style, std::string prefix, LastLines* tail)
    : fd_(std::move(fd)), printer_(&printer), style_(style), prefix_(std::move(prefix)), tail_(tail) {
  set_nonblocking(fd_);
}

size_t RankStream::read(size_t limit) {
  static thread_local std::array<char, 64 * 1024> buffer;
  size_t total = 0;
  while (fd_ && total < limit) {
    const ssize_t size = ::read(fd_.get(), buffer.data(), std::min(buffer.size(), limit - total));
    if (size > 0) {
      feed({buffer.data(), static_cast<size_t>(size)});
      total += static_cast<size_t>(size);
    } else if (size == 0 || (errno != EAGAIN && errno != EINTR)) {
      close();
    } else if (errno == EAGAIN) {
      break;
    }
  }
  return total;
}

void RankStream::drain() {
  if (!fd_) return;
  // The bytes that the dead writers left fit into the pipe; more would come from a process outside the job.
  const int capacity = ::fcntl(fd_.get(), F_GETPIPE_SZ);
  read(static_cast<size_t>(std::max(capacity, 0)));
  close();
}

void RankStream::close() {
  if (!fd_) return;
  fd_.reset();
  if (tail_) tail_->finish();
  if (style_ == Style::kUnchanged) {
    printer_->line(this, prefix_, line_, "");
    line_.clear();
  } else if (!line_.empty() || !piece_.empty()) {
    end_line();
  }
}

void RankStream::feed(std::string_view bytes) {
  if (tail_) tail_->feed(bytes);
  if (log_) log_->append(bytes);
  if (log_only_) return;
  if (style_ == Style::kUnchanged) return feed_unchanged(bytes);
  while (!bytes.empty()) {
    const size_t size = std::min(bytes.find_first_of("\r\n"), bytes.size());
    append(bytes.substr(0, size));
    if (size == bytes.size()) break;
    if (bytes[size] == '\n') {
      end_line();
    } else if (!line_.empty()) {
      piece_.swap(line_);
      line_.clear();
    }
    bytes.remove_prefix(size + 1);
  }
  const auto& shown = line_.empty() ? piece_ : line_;
  if (style_ == Style::kTerminal && !shown.empty()) printer_->bar(this, prefix_, shown);
}

void RankStream::feed_unchanged(std::string_view bytes) {
  size_t whole = bytes.rfind('\n') + 1;  // npos + 1 == 0
  if (whole == 0 && line_.size() + bytes.size() > kMaxLine) whole = bytes.size();
  if (whole > 0) {
    printer_->line(this, prefix_, line_, "");
    printer_->line(this, {}, bytes.substr(0, whole), "");
    line_.clear();
  }
  line_.append(bytes.substr(whole));
}

void RankStream::append(std::string_view bytes) {
  while (line_.size() + bytes.size() > kMaxLine) {
    const size_t size = kMaxLine - line_.size();
    line_.append(bytes.substr(0, size));
    bytes.remove_prefix(size);
    printer_->line(this, prefix_, line_);
    line_.clear();
    piece_.clear();
  }
  line_.append(bytes);
}

void RankStream::end_line() {
  if (tail_ && std::string_view(line_).starts_with(kStackLine)) {
    line_.clear();
    piece_.clear();
    return;
  }
  if (line_.empty() && !piece_.empty()) {
    // The last state of a bar, or a line that ends in "\r\n". A log keeps the '\r'.
    printer_->line(this, prefix_, piece_, style_ == Style::kLog ? "\r\n" : "\n");
  } else {
    printer_->line(this, prefix_, line_);
  }
  line_.clear();
  piece_.clear();
}

std::string prefix_of(const std::string& host, int rank, bool colour) {
  static constexpr int kColours[] = {36, 33, 32, 35, 34, 31};  // cyan, yellow, green, magenta, blue, red
  const std::string name = text('[', host, host.empty() ? "" : ":", rank, ']');
  return colour ? text("\x1b[", kColours[rank % std::size(kColours)], 'm', name, "\x1b[0m ") : name + ' ';
}

std::string_view cut_to_columns(std::string_view text, int columns) {
  int used = 0;
  for (size_t at = 0; at < text.size(); ++at) {
    const auto byte = static_cast<unsigned char>(text[at]);
    if (byte == '\x1b' && at + 1 < text.size() && text[at + 1] == '[') {
      // A control sequence: parameters, then one byte from '@' to '~' (ECMA-48, 5.4).
      for (at += 2; at < text.size() && (text[at] < '@' || text[at] > '~'); ++at) {
      }
    } else if ((byte & 0xc0) != 0x80 && ++used > columns) {  // not a byte within a UTF-8 character
      return text.substr(0, at);
    }
  }
  return text;
}

}  // namespace muster::launch
