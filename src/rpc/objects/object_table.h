// The objects of a worker that others refer to, and the workers that hold each of them. This is plain bookkeeping and
// sends no messages: the agent reports what arrived.
//
// An object lives while
//   - a worker holds it: holds(w) > 0, for any w, this one included; or
//   - a reference to it is in transit: worker b has passed it on to c (kAddHolder), and c has not yet said that it
//     holds it.
//
// A worker that passes a reference on tells the owner *before* it sends the reference, and before it releases its own,
// on the same ordered way. So the owner knows of the transit before that worker's hold ends; the messages of c (kHolds,
// kRelease) may come before or after. If the owner itself passes a reference on (to itself, too), none of this is
// needed: the receiver holds one more from that moment on, and sends nothing about it until it releases it.
//
//   kAddHolder(b→c, t)   unless (b, t) was already received: it is in transit
//   kHolds(c; b, t)      no longer in transit, or remembered as received; c holds one more
//   kRelease(c)          c holds one less
//   kNotSent(b→c, t)     the transit has ended: the message could not be sent
//   owner passes it to c c holds one more, and one less again if the message could not be sent. An object that is made
//                        for one message alone is held by c from the beginning (put())
//   c is lost            what was in transit to c is gone; nothing is ever in transit to c again
//   b is lost            what b passed on to c may have arrived, even if b died before kAddHolder went out: the two
//                        ways have no common order. When c has read everything that b ever sent, it says so
//                        (kDrained(b)), after its last kHolds; what is still in transit from b to c then never
//                        arrived. So b's holds count until every living worker has said kDrained(b)
//
// A count may be negative for a moment, never for long; only a positive count keeps an object alive.
//
// A message may mention an object before the call that creates it has come (another way is faster). From then on the
// object exists and waits for its value, unless its creator is lost and drained.
//
// Thread-safety: all methods. Values are destroyed without the lock. Their destructors may be the user's and may call
// and wait, so a method that takes the last hold away returns the values (Garbage), and its caller destroys them in a
// place where waiting is allowed.
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
  std::exception_ptr error;  // instead of a value, if its creation failed
  bool is_ours = false;      // Muster's own, not the user's: its destructor neither calls nor waits
};

class ObjectTable {
 public:
  ObjectTable(int self, int workers) : self_(self), workers_(workers) {}

  // Called with the value (or error) when it is there: immediately, or later by the thread that sets it. False: there
  // is no such object and will never be one.
  using OnReady = std::function<void(StoredObject)>;
  bool when_ready(uint64_t object, OnReady on_ready);

  // Without waiting: the object if it is there and ready.
  std::optional<StoredObject> find(uint64_t object) const;

  // Adds an object that worker `creator` holds and whose value comes later.
  void expect(uint64_t object, int creator);
  void set(uint64_t object, StoredObject stored);
  // Adds an object of this worker that is ready, and that `holder` holds.
  void put(uint64_t object, StoredObject stored, int holder);

  struct Garbage;  // what nobody holds any more
  void add_hold(uint64_t object, int worker);
  Garbage release(uint64_t object, int worker);
  void add_transit(uint64_t object, int from, int to, uint64_t token);
  Garbage drop_transit(uint64_t object, int from, int to, uint64_t token);
  void received(uint64_t object, int from, uint64_t token, int by);
  Garbage lost(int worker);         // to be called after all of that worker's messages
  Garbage drained(int by, int of);  // `by` has read all that the lost worker `of` sent to it

  void close();  // releases everything; no object is known afterwards

  size_t size() const;
  std::string describe() const;  // for debugging, shows what holds each object: one line per object

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
  bool has_nothing_under_way(int lost) const;
  void remove_unheld(Garbage& garbage);
  Garbage lose(int worker, const StoredObject& never, std::vector<OnReady>& waiting);
  void collect(Table::iterator it, Garbage& garbage);
  // A rank that does not exist (in a message of a defective worker) counts as lost: it holds and sends nothing.
  bool is_lost(int worker) const { return worker < 0 || worker >= workers_ || lost_.contains(worker); }

  const int self_, workers_;
  mutable std::mutex mutex_;
  Table table_;
  bool closed_ = false;
  std::set<int> lost_;
  std::set<std::pair<int, int>> drained_;  // (by, of)
};

struct ObjectTable::Garbage {
  std::vector<Table::node_type> nodes;
  bool has_users = false;  // values that are not ours
};

}  // namespace muster::rpc
