// A descriptor of the launcher's own that output goes to, written without ever blocking the launcher: a reader that
// stands still holds up the ranks' output, not the launcher's watch over them.
//
// O_NONBLOCK belongs to the open file, which we share with whoever started us, so it is never set there. A pipe, FIFO
// or terminal is opened a second time through /proc instead; where that is not allowed, we write at most PIPE_BUF bytes
// when poll(2) says so. A regular file cannot block and is written as it is: a second opening has its own offset.
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
  void flush();  // as much as goes without waiting

  bool full() const { return size() > kFull; }  // take no more from the ranks until it is not
  bool empty() const { return size() == 0; }
  // Why nothing can be written any more, e.g. EPIPE where the reader went away; the rest is dropped. 0: all is well.
  int error() const { return error_; }
  bool is_terminal() const { return terminal_; }
  int columns() const;                       // the terminal's width now
  int own_fd() const { return own_.get(); }  // our own opening of it; -1: there is none
  int poll_fd() const { return own_ ? own_.get() : fd_; }

  // Whether two descriptors are the same pipe, terminal or socket: two Sinks would tear each other's lines.
  static bool same_stream(int a, int b);

 private:
  static constexpr size_t kFull = 256 * 1024;
  size_t size() const { return pending_.size() - done_; }
  long write_some(std::string_view bytes);

  int fd_;
  UniqueFd own_;  // our own opening of it
  bool terminal_ = false, socket_ = false, blocking_ = false;
  bool discard_ = false;  // we were started without it
  int error_ = 0;
  std::string pending_;
  size_t done_ = 0;  // bytes of pending_ that are written
};

}  // namespace muster::launch
