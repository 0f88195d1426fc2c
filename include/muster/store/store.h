// The rendezvous store: a small key-value table that all ranks of a job share.
//
// It holds names, addresses and agreements, a few hundred bytes at a time, while a job starts or changes its ranks;
// training data never passes through it. Keys and values are byte strings. Every key has a version, which grows with
// each change of the key, also when it is erased and set again.
//
// Implementations: in memory (ranks that are threads), served over a Unix-domain socket (ranks of one host; the
// launcher serves) or over TLS (ranks of several hosts), in etcd, a part of another store (make_prefix_store), and
// from_c10d() (any store of libtorch, e.g. torchrun's TCPStore). docs/rendezvous.md compares them.
//
// Errors: TimeoutError when a deadline passes; Unavailable when no process serves the store or the server is gone.
// Thread-safety: any thread may call any method at any time; a thread that waits does not block the others.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "muster/base/deadline.h"
#include "muster/base/secret.h"

namespace muster {

class Store {
 public:
  struct Versioned {
    std::optional<std::string> value;  // nullopt: the key does not exist (any more)
    uint64_t version = 0;              // 0: the key never existed
  };
  struct Exchanged {
    bool stored = false;               // whether `desired` was stored
    std::optional<std::string> value;  // what the key holds now
  };

  virtual ~Store() = default;

  virtual void set(std::string_view key, std::string_view value) = 0;

  // Waits until `key` has a value, and returns it.
  virtual std::string get(std::string_view key, Deadline deadline) = 0;
  // The present value of `key`, without waiting.
  virtual std::optional<std::string> try_get(std::string_view key) = 0;

  // Waits until every key has a value. TimeoutError names the keys that have none.
  virtual void wait(const std::vector<std::string>& keys, Deadline deadline) = 0;

  // Adds `delta` to the decimal number at `key` (0 if absent) and returns the sum. InvalidArgument if the value is not
  // a number.
  virtual int64_t add(std::string_view key, int64_t delta) = 0;

  // Stores `desired` if the key holds `expected`; expected = nullopt means "is absent".
  virtual Exchanged compare_set(std::string_view key, const std::optional<std::string>& expected,
                                std::string_view desired) = 0;

  // Waits until the version of `key` is above `after`, and returns value and version. Start with after = 0.
  virtual Versioned watch(std::string_view key, uint64_t after, Deadline deadline) = 0;

  // Returns whether there was such a key.
  virtual bool erase(std::string_view key) = 0;

  virtual int64_t num_keys() = 0;
};

// A store in the memory of this process.
std::shared_ptr<Store> make_memory_store();

// The keys of `base` that start with "<prefix>/". Prefixes nest. num_keys() counts all of base's keys.
std::shared_ptr<Store> make_prefix_store(std::shared_ptr<Store> base, std::string prefix);

// Connects to a store by its address:
//
//   unix:@name, unix:/path      a server of the same user on this host
//   tls://host:port             a server that knows the same secret; a name, an IPv4 address or [an IPv6 address]
//   etcd://host:port,…/prefix   an etcd, 3.4 or later: its members, and the prefix of the store's keys
//
// If no server is there (it may still be starting), retries until `deadline`, then throws Unavailable. Unauthorized if
// the server belongs to another user or does not know the secret. `secret`: that of the job, for tls; default: the one
// in MUSTER_SECRET.
std::shared_ptr<Store> connect_store(std::string_view address, Deadline deadline,
                                     const std::optional<Secret>& secret = std::nullopt);

// The store of the job for which a launcher started this process: at MUSTER_STORE, with the keys under
// MUSTER_STORE_PREFIX if that is set. InvalidArgument if MUSTER_STORE is not set; else as connect_store().
std::shared_ptr<Store> connect_job_store(Deadline deadline);

// Serves a store until destroyed: to processes of the same user, or, over TLS, to processes that know the secret. When
// it is destroyed, all clients' waits fail with Unavailable. It needs no thread of the caller.
class StoreServer {
 public:
  virtual ~StoreServer() = default;
  virtual const std::string& address() const = 0;  // "unix:@muster-…", "tls://host:port", to hand to connect_store()
  virtual std::shared_ptr<Store> local() = 0;      // the same table, without the socket; valid after the server too
};

// name: empty for a fresh random name in the abstract namespace; "@name" for a chosen abstract one; "/path" for a
// socket in the file system (made with mode 0600, removed at the end); "tls://host:port" for TLS at an address of this
// host ([::] or 0.0.0.0 for all of them; port 0 for a free one, which address() names). Unavailable if the name is
// taken.
//
// Over TLS, the handshake refuses a client that does not know the secret, before any byte of the store's protocol is
// read.
std::unique_ptr<StoreServer> serve_store(std::string_view name = {},
                                         const std::optional<Secret>& secret = std::nullopt);

}  // namespace muster
