#include "rpc/objects/object_table.h"

#include "base/text.h"
#include "muster/base/error.h"
#include "rpc/objects/agent_messages.h"

namespace muster::rpc {

// With the lock. The creation of an unknown object is still on its way, if its creator can still send it.
ObjectTable::Object* ObjectTable::find_or_expect(uint64_t object) {
  const auto found = table_.find(object);
  if (found != table_.end()) return &found->second;
  const int creator = creator_of(object);
  if (closed_ || creator == self_ || is_lost(creator)) return nullptr;
  return &table_[object];
}

// With the lock: the object goes if nobody holds it.
void ObjectTable::collect(Table::iterator it, Garbage& garbage) {
  Object& object = it->second;
  if (!object.transits.empty()) return;
  for (const auto& [worker, count] : object.holds)
    if (count > 0) return;
  if (!object.ready) return;  // set() or lost() will come
  garbage.has_users |= object.stored.value && !object.stored.is_ours;
  garbage.nodes.push_back(table_.extract(it));
}

bool ObjectTable::when_ready(uint64_t id, OnReady on_ready) {
  StoredObject ready;
  {
    const std::lock_guard lock(mutex_);
    Object* const object = find_or_expect(id);
    if (!object) return false;
    if (!object->ready) {
      object->waiting.push_back(std::move(on_ready));
      return true;
    }
    ready = object->stored;
  }
  on_ready(std::move(ready));  // without the lock: the receiver may be the value's last owner
  return true;
}

std::optional<StoredObject> ObjectTable::find(uint64_t object) const {
  const std::lock_guard lock(mutex_);
  const auto it = table_.find(object);
  return it == table_.end() || !it->second.ready ? std::nullopt : std::optional(it->second.stored);
}

void ObjectTable::expect(uint64_t id, int creator) {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  Object& object = table_[id];
  object.expected = true;
  if (!is_lost(creator)) ++object.holds[creator];
}

void ObjectTable::set(uint64_t id, StoredObject stored) {
  Garbage garbage;  // declared before the lock, so that it is destroyed after the lock is released
  StoredObject copy = stored;
  std::vector<OnReady> waiting;
  {
    const std::lock_guard lock(mutex_);
    const auto it = table_.find(id);
    if (it == table_.end()) return;  // nobody holds it any more
    if (it->second.ready) return;    // `stored` is destroyed without the lock
    it->second.ready = true;
    std::swap(it->second.stored, stored);
    waiting.swap(it->second.waiting);
    collect(it, garbage);
  }
  for (auto& on_ready : waiting) on_ready(copy);
}

void ObjectTable::put(uint64_t id, StoredObject stored, int holder) {
  const std::lock_guard lock(mutex_);
  if (closed_ || is_lost(holder)) return;
  Object& object = table_[id];
  object.expected = object.ready = true;
  object.stored = std::move(stored);
  object.holds[holder] = 1;
}

void ObjectTable::add_hold(uint64_t id, int worker) {
  const std::lock_guard lock(mutex_);
  if (Object* const object = is_lost(worker) ? nullptr : find_or_expect(id)) ++object->holds[worker];
}

ObjectTable::Garbage ObjectTable::release(uint64_t id, int worker) {
  Garbage garbage;
  const std::lock_guard lock(mutex_);
  const auto it = table_.find(id);
  if (it == table_.end() || is_lost(worker)) return garbage;
  --it->second.holds[worker];
  collect(it, garbage);
  return garbage;
}

void ObjectTable::add_transit(uint64_t id, int from, int to, uint64_t token) {
  const std::lock_guard lock(mutex_);
  Object* const object = find_or_expect(id);
  if (!object || object->received.erase({from, token}) != 0) return;
  if (is_lost(to) || drained_.contains({to, from})) return;
  object->transits.insert({from, to, token});
}

ObjectTable::Garbage ObjectTable::drop_transit(uint64_t id, int from, int to, uint64_t token) {
  Garbage garbage;
  const std::lock_guard lock(mutex_);
  const auto it = table_.find(id);
  if (it == table_.end()) return garbage;
  it->second.transits.erase({from, to, token});
  collect(it, garbage);
  return garbage;
}

void ObjectTable::received(uint64_t id, int from, uint64_t token, int by) {
  const std::lock_guard lock(mutex_);
  if (is_lost(by)) return;
  Object* const object = find_or_expect(id);
  if (!object) return;
  if (object->transits.erase({from, by, token}) == 0) object->received.insert({from, token});
  ++object->holds[by];
}

ObjectTable::Garbage ObjectTable::lost(int worker) {
  StoredObject never;
  never.error =
      std::make_exception_ptr(Aborted("the worker that was to create this remote object was lost before it did"));
  std::vector<OnReady> waiting;
  Garbage garbage = lose(worker, never, waiting);
  for (auto& on_ready : waiting) on_ready(never);
  return garbage;
}

// With the lock: true if nothing that the lost worker has sent can still arrive.
bool ObjectTable::has_nothing_under_way(int lost) const {
  for (int worker = 0; worker < workers_; ++worker)
    if (!is_lost(worker) && !drained_.contains({worker, lost})) return false;
  return true;
}

// With the lock: removes what nobody can hold any more.
void ObjectTable::remove_unheld(Garbage& garbage) {
  std::set<int> gone;
  for (const int worker : lost_)
    if (has_nothing_under_way(worker)) gone.insert(worker);
  for (auto it = table_.begin(); it != table_.end();) {
    const auto next = std::next(it);
    Object& object = it->second;
    for (const int worker : gone) object.holds.erase(worker);
    std::erase_if(object.transits, [&](const Transit& transit) {
      return is_lost(transit.to) || drained_.contains({transit.to, transit.from});
    });
    collect(it, garbage);
    it = next;
  }
}

ObjectTable::Garbage ObjectTable::lose(int worker, const StoredObject& never, std::vector<OnReady>& waiting) {
  Garbage garbage;
  const std::lock_guard lock(mutex_);
  lost_.insert(worker);
  drained_.insert({self_, worker});
  for (auto& [id, object] : table_)
    if (!object.expected && !object.ready && creator_of(id) == worker) {
      object.ready = true;
      object.stored = never;
      for (auto& on_ready : object.waiting) waiting.push_back(std::move(on_ready));
      object.waiting.clear();
    }
  remove_unheld(garbage);
  return garbage;
}

ObjectTable::Garbage ObjectTable::drained(int by, int of) {
  Garbage garbage;
  if (of < 0 || of >= workers_) return garbage;
  const std::lock_guard lock(mutex_);
  drained_.insert({by, of});
  remove_unheld(garbage);
  return garbage;
}

void ObjectTable::close() {
  Table gone;  // destroyed without the lock
  const std::lock_guard lock(mutex_);
  closed_ = true;
  gone.swap(table_);
}

std::string ObjectTable::describe() const {
  const std::lock_guard lock(mutex_);
  std::string all;
  for (const auto& [id, object] : table_) {
    all += text("object ", creator_of(id), "/", id & ((uint64_t{1} << 48) - 1), object.ready ? " ready" : "",
                object.expected ? " expected" : "", ", ", object.waiting.size(), " wait");
    for (const auto& [worker, count] : object.holds) all += text(", ", worker, " holds ", count);
    for (const Transit& transit : object.transits) all += text(", ", transit.from, " to ", transit.to);
    for (const auto& [from, token] : object.received) all += text(", early from ", from);
    all += '\n';
  }
  for (const int worker : lost_) {
    all += text("lost ", worker, ", drained by");
    for (const auto& [by, of] : drained_)
      if (of == worker) all += text(" ", by);
    all += '\n';
  }
  return all;
}

size_t ObjectTable::size() const {
  const std::lock_guard lock(mutex_);
  return table_.size();
}

}  // namespace muster::rpc
