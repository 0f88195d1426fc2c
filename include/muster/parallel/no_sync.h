// The guard that no_sync() of DistributedDataParallel and FullyShardedDataParallel returns.
#pragma once

namespace muster {

// While it lives, backward() of the module whose Reducer it is given only accumulates.
template <typename Reducer>
class NoSyncGuard {
 public:
  explicit NoSyncGuard(Reducer& reducer) : reducer_(reducer), before_(reducer.set_sync(false)) {}
  NoSyncGuard(const NoSyncGuard&) = delete;
  NoSyncGuard& operator=(const NoSyncGuard&) = delete;
  ~NoSyncGuard() { reducer_.set_sync(before_); }

 private:
  Reducer& reducer_;
  const bool before_;
};

}  // namespace muster
