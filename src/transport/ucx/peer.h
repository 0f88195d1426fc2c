// The state of one peer of the ucx transport. Everything but `died` is guarded by the transport's lock.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <string>

#include "muster/base/deadline.h"
#include "transport/ucx/inflow.h"
#include "transport/ucx/outflow.h"

namespace muster::transport::ucx {

struct Peer {
  Peer(int rank, int self, const Key& key, const Limits& limits) : rank(rank), in(limits), out(rank, self, key) {}

  const int rank;
  int pid = 0;
  std::string name;  // "worker1 (pid 7)"
  std::string address;
  std::chrono::milliseconds beat{0};  // we send to it at least this often

  Inflow in;
  Outflow out;
  bool hello = false;             // its hello has come
  bool welcome = false;           // the answer to our hello has come: there is a way in both directions
  bool ready = false;             // it has connected with all of its own peers
  std::string broken;             // why the way to it is broken; empty: it is not
  std::atomic<bool> died{false};  // set by the watch
  bool left = false;              // its goodbye has been taken
  bool ended = false;             // nothing from it is delivered any more
  bool refuses = false;           // send() throws, because of
  std::string cause;
  uint64_t delivered = 0, told = 0;  // numbers of its messages: the last delivered, and the last acknowledged to it
  uint64_t owed = 0;                 // cost of what has been delivered and not acknowledged
  Clock::time_point last_heard, last_sent;
  std::condition_variable room;
  int waiting = 0;  // in wait_below()

  bool is_here() const { return hello && welcome; }
  void fail(const std::string& why) {
    if (broken.empty()) broken = why;
  }
};

}  // namespace muster::transport::ucx
