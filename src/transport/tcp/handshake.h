// The start of one connection, on either side: TCP's handshake, TLS, and the greetings (hello.h). Never waits.
//
// Until TLS has proved that the other side knows the key, no byte of its greeting is read.
//
// Thread-safety: belongs to one thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "transport/tcp/hello.h"
#include "transport/tcp/socket_stream.h"

namespace muster::transport {

class Handshake {
 public:
  // Makes the answer to a greeting; throws Unauthorized if the greeting must not be answered.
  using Judge = std::function<Hello(const Hello&)>;

  // The side that connects: sends `mine`, and accepts an answer with key `own`. `stream` may still be connecting.
  Handshake(std::unique_ptr<SocketStream> stream, const Hello& mine, const HelloKey& own);
  // The side that accepts.
  Handshake(std::unique_ptr<SocketStream> stream, Judge judge);

  // Proceeds as far as possible without waiting; returns whether it is done. Throws Unauthorized if the other side does
  // not know the key, Mismatch if it has another version or the like, CorruptError if it sends something that is not a
  // greeting, Unavailable if it is gone.
  bool step();
  uint32_t events() const;  // of epoll: what to wait for before the next step
  int fd() const { return stream_->fd(); }
  const Hello& other() const { return other_; }  // valid once done
  std::unique_ptr<SocketStream> take_stream() { return std::move(stream_); }

 private:
  enum class State { kConnecting, kTls, kTalking };

  bool is_connected();
  bool write_out();
  bool read_greeting();
  void check_answer() const;

  std::unique_ptr<SocketStream> stream_;
  State state_;
  const bool dials_;
  Judge judge_;
  HelloKey own_{};
  std::string out_, in_;
  size_t written_ = 0;
  bool heard_ = false;
  Hello other_;
};

}  // namespace muster::transport
