// A descriptor of the launcher that output goes to, written without ever blocking the launcher: a reader that stands
// still delays the ranks' output, not the launcher's supervision of the ranks.
//
// O_NONBLOCK belongs to the open file, which the launcher shares with the process that started it, so it is never set
// there. A pipe, FIFO or terminal is opened a second time through /proc instead. If that is not allowed, at most
// PIPE_BUF bytes are written when poll(2) says so. A regular file cannot block and is written directly, because a
// second opening would have its own offset.
//
// Thread-safety: none.
#pragma once

#include <string>
#include <string_view>

#include "base/fd.h"

namespace muster::launch {

class Sink {
 public:
  explicit Sink(int fd);  // not owned

  void append(std::string_view bytes) {
    if (error_ == 0 && !discard_) pending_.append(bytes);
  }
  void flush();  // writes as much as possible without waiting

  bool full() const { return size() > kFull; }  // read no more from the ranks until it is false
  bool empty() const { return size() == 0; }
  // Why nothing can be written any more, e.g. EPIPE if the reader has gone; the rest is dropped. 0: no error.
  int error() const { return error_; }
  bool is_terminal() const { return terminal_; }
  int columns() const;                       // the terminal's current width
  int own_fd() const { return own_.get(); }  // the second opening; -1: none
  int poll_fd() const { return own_ ? own_.get() : fd_; }

  // Whether two descriptors are the same pipe, terminal or socket: two Sinks would tear each other's lines.
  static bool same_stream(int a, int b);

 private:
  static constexpr size_t kFull = 256 * 1024;
  size_t size() const { return pending_.size() - done_; }
  long write_some(std::string_view bytes);

  int fd_;
  UniqueFd own_;  // the second opening
  bool terminal_ = false, socket_ = false, blocking_ = false;
  bool discard_ = false;  // this process was started without the descriptor
  int error_ = 0;
  std::string pending_;
  size_t done_ = 0;  // bytes of pending_ that are written
};

}  // namespace muster::launch
