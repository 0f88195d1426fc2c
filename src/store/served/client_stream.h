// The bytes of a client's connection to a store's server.
//
// A ClientStream moves bytes and never waits; ServedStore (served_store.h) waits for it with poll(2). The base class is
// a plain socket; TlsClientStream puts TLS between.
//
// Thread-safety: belongs to one thread at a time.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <span>
#include <string_view>
#include <utility>

#include "base/fd.h"

namespace muster::store {

class ClientStream {
 public:
  static constexpr ssize_t kGone = -1;  // the other side has gone

  explicit ClientStream(UniqueFd socket) : socket_(std::move(socket)) {}
  virtual ~ClientStream() = default;
  ClientStream(const ClientStream&) = delete;
  ClientStream& operator=(const ClientStream&) = delete;

  // Return the number of bytes moved; 0: none until fd() is ready for `*events`; or kGone.
  virtual ssize_t send_some(std::string_view bytes, short* events);
  virtual ssize_t receive_some(std::span<char> to, short* events);
  // Whether receive_some() has bytes that were already read from the socket.
  virtual bool has_received() const { return false; }

  int fd() const { return socket_.get(); }
  bool is_mine() const { return pid_ == ::getpid(); }  // opened by this process, not by its parent

 private:
  UniqueFd socket_;
  pid_t pid_ = ::getpid();
};

}  // namespace muster::store
