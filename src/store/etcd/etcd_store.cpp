// A store in an etcd, which survives the loss of any host as long as a majority of etcd's members lives.
//
// Keys lie below a prefix. A key's version is etcd's revision at which the key last changed. Before each value stands a
// token of 16 characters that is new for each write. If an endpoint dies or is too slow, the request is sent again,
// although it may have taken effect already; the token shows whether it has. So add() and compare_set() count once,
// whatever happens to etcd's members. A set() or erase() that is sent again may undo a change that another client made
// in between.
//
// A wait reads the key, and then watches it from the revision of that read on, so it misses no change. It reads the key
// again every few seconds, and after each failure.
//
// Thread-safety: as Store.

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <functional>
#include <utility>

#include "base/random.h"
#include "base/text.h"
#include "muster/base/error.h"
#include "store/etcd/etcd_client.h"
#include "store/kit/erase_all.h"
#include "store/kit/late.h"
#include "store/kit/outage.h"
#include "store/kit/quote.h"
#include "store/served/addresses.h"
#include "store/table/table.h"

namespace muster::store {
namespace {

using std::chrono::milliseconds;
constexpr milliseconds kLook{2000};     // the time for a wait's first and last read, beyond the wait's deadline
constexpr milliseconds kQuestion{200};  // for a note (CallsBy) if etcd was silent at the last call
constexpr size_t kTokenSize = 16;
constexpr std::string_view kDefaultPrefix = "muster";

std::string make_token() { return random_hex(kTokenSize / 2); }

std::string_view token_of(std::string_view stored) { return stored.substr(0, kTokenSize); }

std::string value_of(std::string_view key, std::string_view stored) {
  if (stored.size() < kTokenSize)
    throw CorruptError(text("etcd's key ", quote(key), " holds what no store of Muster has put there"),
                       "Use another prefix in the address: etcd://host:port/prefix");
  return std::string(stored.substr(kTokenSize));
}

class EtcdStore final : public Store, public EraseAll, public Outage {
 public:
  EtcdStore(std::vector<TcpAddress> endpoints, std::string prefix, Deadline deadline)
      : client_(std::move(endpoints)), prefix_(std::move(prefix) + "/") {
    try {
      client_.look(prefix_, deadline);
    } catch (const Unavailable& error) {
      throw Unavailable(text("nobody serves the store at ", kEtcdScheme, client_.names(), ": ", error.message()),
                        error.advice());
    }
  }

  void set(std::string_view key, std::string_view value) override {
    client_.put(full(key), make_token() + std::string(value), call_deadline());
  }

  std::string get(std::string_view key, Deadline deadline) override {
    auto value = wait_for(key, deadline);
    if (!value) throw nobody_set({std::string(key)});
    return *std::move(value);
  }

  std::optional<std::string> try_get(std::string_view key) override {
    const auto looked = client_.look(full(key), call_deadline());
    return looked.entry ? std::optional(value_of(key, looked.entry->value)) : std::nullopt;
  }

  void wait(const std::vector<std::string>& keys, Deadline deadline) override {
    for (size_t i = 0; i < keys.size(); ++i) {
      if (wait_for(keys[i], deadline)) continue;
      std::vector<std::string> missing{keys[i]};
      for (size_t k = i + 1; k < keys.size(); ++k)
        if (!client_.look(full(keys[k]), Deadline::after(kLook)).entry) missing.push_back(keys[k]);
      throw nobody_set(missing);
    }
  }

  int64_t add(std::string_view key, int64_t delta) override {
    int64_t sum = 0;
    change(key, [&](const std::optional<std::string>& now) {
      Table table;  // adds, and refuses values that are not numbers
      if (now) table.set(key, *now);
      sum = table.add(key, delta);
      return std::optional(std::to_string(sum));
    });
    return sum;
  }

  Exchanged compare_set(std::string_view key, const std::optional<std::string>& expected,
                        std::string_view desired) override {
    Exchanged exchanged;
    change(key, [&](const std::optional<std::string>& now) {
      exchanged = {now == expected, now};
      return now == expected ? std::optional<std::string>(desired) : std::nullopt;
    });
    if (exchanged.stored) exchanged.value = desired;
    return exchanged;
  }

  Versioned watch(std::string_view key, uint64_t after, Deadline deadline) override {
    const auto above = static_cast<int64_t>(std::min<uint64_t>(after, INT64_MAX - 1));
    auto looked = client_.look(full(key), look_deadline(deadline));
    if (looked.entry && looked.entry->revision > above) return versioned(key, *looked.entry);
    // A key that existed and does not exist now may have been erased between `after` and now. A key that was never seen
    // is watched from now on.
    int64_t from = !looked.entry && above > 0 ? above + 1 : looked.revision + 1;
    for (;;) {
      const auto watched = client_.watch(full(key), from, deadline);
      if (watched.end == EtcdClient::Watched::End::kEvent)
        return {watched.event.value ? std::optional(value_of(key, *watched.event.value)) : std::nullopt,
                static_cast<uint64_t>(watched.event.revision)};
      if (watched.end == EtcdClient::Watched::End::kCompacted && watched.compacted_to > above) {
        // etcd has forgotten the changes in between, but not the latest state.
        looked = client_.look(full(key), look_deadline(deadline));
        if (looked.entry && looked.entry->revision > above) return versioned(key, *looked.entry);
        if (!looked.entry && above > 0) return {std::nullopt, static_cast<uint64_t>(watched.compacted_to)};
        from = looked.revision + 1;
      }
      if (deadline.passed()) throw did_not_change(std::string(key));
      client_.look(full(key), look_deadline(deadline));  // if the endpoint is cut off, changes to the next one
    }
  }

  bool erase(std::string_view key) override { return client_.erase(full(key), call_deadline()); }
  void erase_all(std::string_view prefix) override { client_.erase_all(full(prefix), call_deadline()); }
  int64_t num_keys() override { return client_.count(prefix_, call_deadline()); }

  bool comes_again() const override { return true; }
  void set_call_timeout(milliseconds timeout) override { call_timeout_ = timeout; }

 private:
  Deadline call_deadline() const {
    const auto deadline = CallsBy::of_this_thread(Deadline::after(call_timeout_.load()));
    const bool only_ask = client_.was_silent() && CallsBy::is_for_note() && deadline.left() > kQuestion;
    return only_ask ? Deadline::after(kQuestion) : deadline;
  }
  // A wait may read the key even if no time is left, because a value that is there already must be returned.
  Deadline look_deadline(Deadline deadline) const {
    return deadline.is_never()
               ? call_deadline()
               : Deadline::after(std::min<std::chrono::nanoseconds>(deadline.left(), call_timeout_.load()) + kLook);
  }
  static Versioned versioned(std::string_view key, const EtcdClient::Entry& entry) {
    return {value_of(key, entry.value), static_cast<uint64_t>(entry.revision)};
  }
  std::string full(std::string_view key) const { return prefix_ + std::string(key); }

  // Waits for a value. Returns nullopt if the deadline has passed.
  std::optional<std::string> wait_for(std::string_view key, Deadline deadline) {
    for (;;) {
      const auto looked = client_.look(full(key), look_deadline(deadline));
      if (looked.entry) return value_of(key, looked.entry->value);
      if (deadline.passed()) return std::nullopt;
      const auto watched = client_.watch(full(key), looked.revision + 1, deadline);
      if (watched.end == EtcdClient::Watched::End::kEvent && watched.event.value)
        return value_of(key, *watched.event.value);
    }
  }

  // Stores what `decide` returns for the current value; nothing if that is nullopt. If another client changes the key
  // meanwhile, calls `decide` again.
  void change(std::string_view key,
              const std::function<std::optional<std::string>(const std::optional<std::string>&)>& decide) {
    const Deadline deadline = call_deadline();
    const std::string name = full(key);
    auto now = client_.look(name, deadline);
    for (;;) {
      const auto desired = decide(now.entry ? std::optional(value_of(key, now.entry->value)) : std::nullopt);
      if (!desired) return;
      const std::string token = make_token();
      auto swapped = client_.swap(name, now.entry ? now.entry->revision : 0, token + *desired, deadline);
      if (swapped.stored) return;
      if (!swapped.surely_once && was_stored(name, now.revision, token, deadline)) return;
      if (deadline.passed())
        throw TimeoutError(text("the store's key ", quote(key), " is changed by others all the time"), {},
                           "Look whether etcd is overloaded");
      now = std::move(swapped.now);
    }
  }

  // Whether our write was stored. If it was, the first change of the key after `revision` has our token, because swap()
  // stores a value only if the key has not changed.
  bool was_stored(const std::string& name, int64_t revision, std::string_view token, Deadline deadline) {
    for (;;) {
      const auto watched = client_.watch(name, revision + 1, deadline);
      if (watched.end == EtcdClient::Watched::End::kEvent)
        return watched.event.value && token_of(*watched.event.value) == token;
      if (watched.end == EtcdClient::Watched::End::kCompacted || deadline.passed())
        throw Unavailable("etcd went away in the middle of a change, and does not say whether that was made",
                          "Look at etcd's members");
    }
  }

  EtcdClient client_;
  const std::string prefix_;
  std::atomic<milliseconds> call_timeout_{kCallTimeout};
};

}  // namespace

std::shared_ptr<Store> connect_etcd(std::string_view address, Deadline deadline) {
  std::string_view rest = address.substr(kEtcdScheme.size());
  std::string prefix(kDefaultPrefix);
  if (const size_t slash = rest.find('/'); slash != std::string_view::npos) {
    prefix = rest.substr(slash + 1);
    rest = rest.substr(0, slash);
    while (prefix.ends_with('/')) prefix.pop_back();
    if (prefix.empty()) prefix = kDefaultPrefix;
  }
  std::vector<TcpAddress> endpoints;
  for (;;) {
    const size_t comma = std::min(rest.find(','), rest.size());
    endpoints.push_back(TcpAddress::parse(rest.substr(0, comma), address));
    if (endpoints.back().port == 0) throw InvalidArgument(text(quote(address), " has port 0"), "etcd's own is 2379");
    if (comma == rest.size()) break;
    rest.remove_prefix(comma + 1);
  }
  return std::make_shared<EtcdStore>(std::move(endpoints), std::move(prefix), deadline);
}

}  // namespace muster::store
