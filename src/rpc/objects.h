// The objects of a worker that others refer to, and who holds each of them. Plain bookkeeping, no messages: the agent
// tells it what came and sends what it asks for.
//
// An object lives while
//   - a worker holds it: holds(w) > 0, for any w, this one included; or
//   - a reference to it is in transit: worker b has handed it on to c (kAddHolder), and c has not said that it holds
//   it.
//
// A worker that hands a reference on says so to the owner *before* it sends the reference, and before it lets go of its
// own, on the same ordered way. So at the owner its hold ends only after the transit is known; what c says (kHolds,
// kRelease) may come before or after. The owner itself needs none of this: when it hands a reference on, to itself too,
// the receiver holds one more from that moment on, and says nothing of it until it lets go.
//
//   kAddHolder(b→c, t)   unless (b, t) was already received: it is in transit
//   kHolds(c; b, t)      in transit no more, or remembered as received; c holds one more
//   kRelease(c)          c holds one less
//   kNotSent(b→c, t)     the transit has ended: the message could not be sent
//   handed on to c       by the owner: c holds one more; one less again if the message could not be sent. Of what is
//                        made for one message alone, c is the holder from the beginning (put())
//   c is lost            what was in transit to c is gone; nothing is in transit to c ever again
//   b is lost            what b handed on to c may have come, also if b died before kAddHolder went out: the two ways
//   have
//                        no common order. c knows: when it has read all that b ever sent it says so (kDrained(b)),
//                        after its last kHolds; what then is in transit from b to c never came. So b's holds
//                        count until every living worker has said kDrained(b)
//
// A count may be negative for a moment, never for long; only a positive one keeps an object alive.
//
// An object may be spoken of before the call that creates it has come (another way is faster): it is there from then
// on, waiting for its value, unless its creator is lost and drained.
//
// Thread-safety: all methods; values are let go of without the lock. Their destructors may be the user's, which call
// and wait: what takes the last hold away returns them (Garbage), for its caller to end where that may be.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <typeinfo>
#include <unordered_map>
#include <utility>
#include <vector>

namespace muster::rpc {

struct StoredObject {
  std::shared_ptr<void> value;
  const std::type_info* type = nullptr;
  std::exception_ptr error;  // instead of a value: its creation failed
  bool is_ours = false;      // not the user's: its destructor neither calls nor waits
};

class Objects {
 public:
  Objects(int self, int workers) : self_(self), workers_(workers) {}

  // Called with the value (or error) when it is there: at once, or later by whoever sets it. False: there is no such
  // object and will be none.
  using OnReady = std::function<void(StoredObject)>;
  bool when_ready(uint64_t object, OnReady on_ready);

  // Without waiting: what is there and ready.
  std::optional<StoredObject> find(uint64_t object) const;

  // An object that worker `creator` will hold, whose value comes later.
  void expect(uint64_t object, int creator);
  void set(uint64_t object, StoredObject stored);
  // One of this worker's own that is there, and that `holder` holds.
  void put(uint64_t object, StoredObject stored, int holder);

  struct Garbage;  // what nobody holds any more
  void add_hold(uint64_t object, int worker);
  Garbage release(uint64_t object, int worker);
  void add_transit(uint64_t object, int from, int to, uint64_t token);
  Garbage drop_transit(uint64_t object, int from, int to, uint64_t token);
  void received(uint64_t object, int from, uint64_t token, int by);
  Garbage lost(int worker);         // after all that it sent
  Garbage drained(int by, int of);  // `by` has read all that the lost worker `of` sent to it

  void close();  // lets go of everything; nothing is known afterwards

  size_t size() const;
  std::string describe() const;  // for whoever looks for what holds an object: a line each

 private:
  struct Transit {
    int from, to;
    uint64_t token;
    auto operator<=>(const Transit&) const = default;
  };
  struct Object {
    bool expected = false;  // the call that creates it has come
    bool ready = false;
    StoredObject stored;
    std::vector<OnReady> waiting;
    std::map<int, int64_t> holds;
    std::set<Transit> transits;
    std::set<std::pair<int, uint64_t>> received;  // before they were announced
  };
  using Table = std::unordered_map<uint64_t, Object>;

  Object* find_or_expect(uint64_t object);
  bool settled(int lost) const;
  void settle(Garbage& garbage);
  Garbage lose(int worker, const StoredObject& never, std::vector<OnReady>& waiting);
  void collect(Table::iterator it, Garbage& garbage);
  // One that there is not, in a message of a defective worker, is one that holds and sends nothing.
  bool is_lost(int worker) const { return worker < 0 || worker >= workers_ || lost_.contains(worker); }

  const int self_, workers_;
  mutable std::mutex mutex_;
  Table table_;
  bool closed_ = false;
  std::set<int> lost_;
  std::set<std::pair<int, int>> drained_;  // (by, of)
};

struct Objects::Garbage {
  std::vector<Table::node_type> nodes;
  bool has_users = false;  // values that are not ours
};

}  // namespace muster::rpc
