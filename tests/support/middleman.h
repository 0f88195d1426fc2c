// A stretch of network between clients and a server on this host, for tests: it forwards the bytes of TCP connections
// by a thread of its own, and is cut as told. A cut connection is reset (RST) at both ends, as by a firewall that
// forgot it, and nothing that was on its way arrives.
//
// Thread-safety: all of it.
#pragma once

#include <cstdint>
#include <list>
#include <mutex>
#include <thread>

#include "base/fd.h"

namespace muster::test {

class Middleman {
 public:
  enum class State {
    kOpen,
    kDown,   // connections are reset, new ones immediately
    kStill,  // connections stay, and no byte is forwarded
  };

  // Between a free port of 127.0.0.1 and `server`, a port there, where nobody need serve yet.
  explicit Middleman(uint16_t server);
  Middleman(const Middleman&) = delete;
  Middleman& operator=(const Middleman&) = delete;
  ~Middleman();

  uint16_t port() const { return port_; }
  void set(State state);
  void cut();               // all connections that there are; new ones are forwarded
  void lose_next_answer();  // the next bytes that the server sends cut their connection instead of arriving
  size_t connections() const;
  size_t cuts() const;  // of connections, since it began

 private:
  struct Pair {
    UniqueFd client, server;
    bool over = false;
  };

  void work();
  void accept_one();
  void forward(Pair& pair, bool from_server);
  static void reset(UniqueFd& socket);
  void reset_all();
  void wake() const;

  const uint16_t server_;
  UniqueFd listening_, wake_;
  uint16_t port_ = 0;

  mutable std::mutex mutex_;  // guards what follows
  std::list<Pair> pairs_;
  State state_ = State::kOpen;
  bool lose_ = false, stop_ = false;
  size_t cuts_ = 0;

  std::thread thread_;
};

}  // namespace muster::test
