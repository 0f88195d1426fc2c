// Bytes over a connected TCP socket, plain or under TLS 1.3. Never waits.
//
// OpenSSL never sees the socket. This code passes it what it has to read, collects what it writes, and sends that in
// batches of several records. So OpenSSL is locked only while it computes, and a thread that writes much does not keep
// the other from reading.
//
// Thread-safety: write() and flush() by one thread at a time, under the caller's lock; concurrently with them, read()
// and shake_hands() by one other thread.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "base/fd.h"
#include "store/served/tls.h"

namespace muster::transport {

class SocketStream {
 public:
  static constexpr ssize_t kGone = -1;  // the connection has ended; why() says how

  explicit SocketStream(UniqueFd socket) : socket_(std::move(socket)) {}
  virtual ~SocketStream() { end(); }
  SocketStream(const SocketStream&) = delete;
  SocketStream& operator=(const SocketStream&) = delete;

  int fd() const { return socket_.get(); }

  // Returns whether both sides have proved that they know the key. Until then, call it again whenever the socket can be
  // read, or written if unsent() > 0. Throws Unauthorized if the other side does not know the key, Unavailable if it is
  // gone.
  virtual bool shake_hands() { return true; }

  // Takes bytes from the front of `parts`, at least `enough` if the socket accepts as many. Returns how many, 0 if none
  // can be taken now, or kGone.
  virtual ssize_t write(std::span<const iovec> parts, size_t enough);
  // Bytes that write() has taken and the socket has not; flush() tries again, and returns false if the connection is
  // gone.
  virtual size_t unsent() const { return 0; }
  virtual bool flush() { return true; }

  // Reads into `first` and then `second`; returns how many bytes, 0 if there are none now, or kGone. With `fetch`, it
  // reads from the socket; without, only what is left from the last fetch. After a fetch, the caller reads until 0 or
  // calls keep().
  virtual ssize_t read(std::span<std::byte> first, std::span<std::byte> second, bool fetch);
  virtual void keep() {}
  const std::string& why() const { return why_; }  // read() or shake_hands() ended the connection: "was closed"

  void no_more();  // tells the other side that nothing more comes
  // Shuts the socket down and closes it. The shutdown ends the connection even if a child of this process, forked
  // without exec, holds a copy of the socket.
  void end();

 protected:
  ssize_t receive(std::span<const iovec> parts);
  ssize_t send(std::span<const iovec> parts);
  std::string why_;

 private:
  UniqueFd socket_;
};

std::unique_ptr<SocketStream> make_plain_stream(UniqueFd socket);

// The key is changed after so many records: AES-GCM allows 2^24.5 records per key (RFC 8446, 5.5).
inline constexpr size_t kRecordsPerKey = size_t{1} << 23;

// `context` must outlive the stream.
std::unique_ptr<SocketStream> make_tls_stream(UniqueFd socket, const store::TlsContext& context,
                                              store::TlsContext::Side side, size_t records_per_key = kRecordsPerKey);

}  // namespace muster::transport
