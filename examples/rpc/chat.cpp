// A chat: a room on worker 0, a guest on every other worker, and references that travel between them.
//
//   muster run -n 4 rpc_chat
//
// Worker 0 invites the others and gives each the RRef to the room. Each guest enters with an RRef to itself, so that
// the room can call it back. The room can also give that RRef to other guests: the whisper below goes from one guest to
// another without the room.
#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "muster/base/error.h"
#include "muster/comm/world.h"
#include "muster/rpc/rref.h"
#include "muster/rpc/task.h"
#include "muster/rpc/this_call.h"

namespace rpc = muster::rpc;

namespace {

// Lives on its own worker. Other workers call it.
class Guest {
 public:
  void hear(std::string line) {
    const std::lock_guard lock(mutex_);
    heard_.push_back(std::move(line));
  }
  void hear_whisper(std::string line) { hear(rpc::this_call().caller().name + " whispers: " + line); }
  std::vector<std::string> heard() const {
    const std::lock_guard lock(mutex_);
    return heard_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> heard_;
};

// Lives on worker 0. Handlers of one object run concurrently, so it has a mutex, which must not be held across a
// co_await.
class Room {
 public:
  explicit Room(size_t seats) : seats_(seats) {}

  // Returns when all guests have come. A coroutine that waits holds no thread, however many guests there are.
  rpc::Task<> enter(rpc::RRef<Guest> guest) {
    if (add(rpc::this_call().caller().name, std::move(guest))) all_came_.try_set_value();
    co_await everybody_;
  }

  // Returns when all guests want to leave, so that each guest hears what the others still say.
  rpc::Task<> leave() {
    if (wants_to_leave(rpc::this_call().caller().name)) all_said_.try_set_value();
    co_await enough_;
  }

  // Returns when every other guest has heard the words. A guest that has died meanwhile is no longer a guest.
  rpc::Task<int> say(std::string words) {
    const std::string from = rpc::this_call().caller().name;
    std::map<std::string, rpc::Future<void>> told;
    for (auto& [name, guest] : guests())
      if (name != from) told.emplace(name, guest.async<&Guest::hear>(from + ": " + words));
    int heard = 0;
    for (auto& [name, answer] : told) {
      try {
        co_await answer;
        ++heard;
      } catch (const muster::PeerLost&) {
        if (wants_to_leave(name)) all_said_.try_set_value();
      }
    }
    co_return heard;
  }

  rpc::RRef<Guest> find(std::string name) const {
    const std::lock_guard lock(mutex_);
    return guests_.at(name);
  }

 private:
  bool add(const std::string& name, rpc::RRef<Guest> guest) {
    const std::lock_guard lock(mutex_);
    guests_[name] = std::move(guest);
    return guests_.size() == seats_;
  }
  bool wants_to_leave(const std::string& name) {
    const std::lock_guard lock(mutex_);
    leaving_.insert(name);
    return leaving_.size() == seats_;
  }
  std::map<std::string, rpc::RRef<Guest>> guests() const {
    const std::lock_guard lock(mutex_);
    return guests_;
  }

  const size_t seats_;
  mutable std::mutex mutex_;
  std::map<std::string, rpc::RRef<Guest>> guests_;
  std::set<std::string> leaving_;
  rpc::Promise<void> all_came_, all_said_;
  const rpc::Future<void> everybody_ = all_came_.future(), enough_ = all_said_.future();
};

// One guest's visit, on the guest's worker. It returns what the guest has heard, which is the answer to the invitation.
std::vector<std::string> visit(rpc::RRef<Room> room) {
  const auto me = std::make_shared<Guest>();
  room.sync<&Room::enter>(rpc::make_rref(me));

  const auto& workers = rpc::all_workers();
  const auto my_id = static_cast<size_t>(rpc::worker_info().id);
  const int heard = room.sync<&Room::say>("hello, I am " + rpc::worker_info().name);
  me->hear(std::to_string(heard) + " heard my hello");
  const std::string& neighbour = workers[my_id + 1 < workers.size() ? my_id + 1 : 1].name;
  room.sync<&Room::find>(neighbour).sync<&Guest::hear_whisper>(std::string("psst"));
  room.sync<&Room::leave>();
  return me->heard();
}

}  // namespace

int main() {
  auto world = muster::init();
  rpc::init();
  if (world.rank() == 0 && world.world_size() > 1) {
    const auto room = rpc::remote<Room>(0, static_cast<size_t>(world.world_size() - 1));
    std::vector<rpc::Future<std::vector<std::string>>> visits;
    for (const auto& worker : rpc::all_workers())
      if (worker.id != 0) visits.push_back(rpc::async<&visit>(worker, room));
    for (size_t i = 0; i < visits.size(); ++i) {
      auto lines = visits[i].get();
      std::sort(lines.begin(), lines.end());
      for (const auto& line : lines) std::printf("worker%zu has heard: %s\n", i + 1, line.c_str());
    }
  }
  rpc::shutdown();
}
