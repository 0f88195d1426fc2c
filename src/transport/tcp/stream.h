// Bytes over a connected TCP socket, plain or under TLS 1.3: never waits.
//
// OpenSSL never sees the socket. What it has to read is handed to it, what it writes is collected and sent by us, in
// batches of several records. So it is locked only while it computes on one record, and a thread that writes much does
// not keep the other from reading.
//
// Thread-safety: write() and flush() by one thread at a time, under the caller's lock; read() and shake_hands() by
// another one at the same time.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "base/fd.h"
#include "store/tls.h"

namespace muster::transport {

class Stream {
 public:
  static constexpr ssize_t kGone = -1;  // the connection is at its end; why() says how

  explicit Stream(UniqueFd socket) : socket_(std::move(socket)) {}
  virtual ~Stream() { end(); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  int fd() const { return socket_.get(); }

  // Whether both sides know the key. Until then it is to be called again whenever the socket can be read, or written
  // where unsent() > 0. Unauthorized where the other side does not know the key; Unavailable where it is gone.
  virtual bool shake_hands() { return true; }

  // Takes bytes from the front of `parts`, at least `enough` if the socket takes as many; returns how many, 0 for none
  // now, or kGone.
  virtual ssize_t write(std::span<const iovec> parts, size_t enough);
  // Bytes that write() took and the socket has not taken yet; flush() tries again, and is false where the connection is
  // gone.
  virtual size_t unsent() const { return 0; }
  virtual bool flush() { return true; }

  // Reads into `first` and then `second`; returns how many bytes, 0 for none now, or kGone. `fetch`: whether to look at
  // the socket; false: only what is left of the last look. Whoever looked reads until 0, or calls keep().
  virtual ssize_t read(std::span<std::byte> first, std::span<std::byte> second, bool fetch);
  virtual void keep() {}
  const std::string& why() const { return why_; }  // read() or shake_hands() said kGone; "was closed"

  void no_more();  // tells the other side that nothing more comes
  // Closes. Before that it shuts down, which ends the connection also where a child of this process, forked without
  // exec, holds a copy of the socket.
  void end();

 protected:
  ssize_t receive(std::span<const iovec> parts);
  ssize_t send(std::span<const iovec> parts);
  std::string why_;

 private:
  UniqueFd socket_;
};

std::unique_ptr<Stream> make_plain_stream(UniqueFd socket);

// After so many records the key is changed: AES-GCM's is good for 2^24.5 (RFC 8446, 5.5).
inline constexpr size_t kRecordsPerKey = size_t{1} << 23;

// `context` must outlive it.
std::unique_ptr<Stream> make_tls_stream(UniqueFd socket, const store::TlsContext& context, store::TlsContext::Side side,
                                        size_t records_per_key = kRecordsPerKey);

}  // namespace muster::transport
