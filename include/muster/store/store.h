// The rendezvous store: a small key-value table that all ranks of a job share.
//
// It carries names, addresses and agreements, a few hundred bytes at a time, while a job starts or changes shape; data
// never passes through it. Keys and values are byte strings. Every key has a version, which grows with each change of
// the key, also when it is erased and set again.
//
// Implementations: MemoryStore (ranks that are threads), UnixStoreClient (ranks of one host; the launcher serves),
// PrefixStore (a part of another store), and from_c10d() (anything that libtorch has, e.g. torchrun's TCPStore).
//
// Errors: Timeout when a deadline passes; Unavailable when nobody serves the store or the server went away.
// Thread-safety: every method may be called from any thread at any time; a thread that waits does not block the others.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "muster/base/deadline.h"

namespace muster {

class Store {
 public:
  struct Versioned {
    std::optional<std::string> value;  // nullopt: the key is not there (any more)
    uint64_t version = 0;              // 0: it never was
  };
  struct Exchanged {
    bool stored = false;               // whether `desired` was stored
    std::optional<std::string> value;  // what the key holds now
  };

  virtual ~Store() = default;

  virtual void set(std::string_view key, std::string_view value) = 0;

  // The value of `key`, waiting until there is one.
  virtual std::string get(std::string_view key, Deadline deadline) = 0;
  // The value of `key` now.
  virtual std::optional<std::string> try_get(std::string_view key) = 0;

  // Waits until every key is there. Timeout names the keys that are not.
  virtual void wait(const std::vector<std::string>& keys, Deadline deadline) = 0;

  // Adds `delta` to the decimal number at `key` (0 where absent) and returns the sum. InvalidArgument where the value
  // is not a number.
  virtual int64_t add(std::string_view key, int64_t delta) = 0;

  // Stores `desired` if the key holds `expected`; expected = nullopt means "is absent".
  virtual Exchanged compare_set(std::string_view key, const std::optional<std::string>& expected,
                                std::string_view desired) = 0;

  // Waits until the version of `key` is above `after`, and returns value and version. Start with after = 0.
  virtual Versioned watch(std::string_view key, uint64_t after, Deadline deadline) = 0;

  // Whether there was such a key.
  virtual bool erase(std::string_view key) = 0;

  virtual int64_t num_keys() = 0;
};

// A store in the memory of this process.
std::shared_ptr<Store> make_memory_store();

// The keys of `base` that start with "<prefix>/". Prefixes nest. num_keys() counts all of base's keys.
std::shared_ptr<Store> make_prefix_store(std::shared_ptr<Store> base, std::string prefix);

// Connects to a server at an address as StoreServer::address() gives it ("unix:@name" or "unix:/path"). Retries until
// `deadline` while nobody serves there (the server may still be starting), then Unavailable. Unauthorized where the
// server belongs to another user.
std::shared_ptr<Store> connect_store(std::string_view address, Deadline deadline);

// Serves a store over a Unix-domain socket to processes of the same user until destroyed. Destruction fails all
// clients' waits with Unavailable. No thread of the caller is needed.
class StoreServer {
 public:
  virtual ~StoreServer() = default;
  virtual const std::string& address() const = 0;  // "unix:@muster-…", to hand to connect_store()
  virtual std::shared_ptr<Store> local() = 0;      // the same table, without the socket; valid after the server too
};

// name: empty for a fresh unguessable name in the abstract namespace; "@name" for a chosen abstract one; "/path" for a
// socket in the file system (made with mode 0600, removed at the end). Unavailable where the name is taken.
std::unique_ptr<StoreServer> serve_store(std::string_view name = {});

}  // namespace muster
