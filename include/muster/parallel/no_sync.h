// The guard that no_sync() of DistributedDataParallel and FullyShardedDataParallel returns.
#pragma once

namespace muster {

// While it lives, backward() of the module that it is given only accumulates.
template <typename Module>
class NoSyncGuard {
 public:
  explicit NoSyncGuard(Module& module) : module_(module), before_(module.set_sync(false)) {}
  NoSyncGuard(const NoSyncGuard&) = delete;
  NoSyncGuard& operator=(const NoSyncGuard&) = delete;
  ~NoSyncGuard() { module_.set_sync(before_); }

 private:
  Module& module_;
  const bool before_;
};

}  // namespace muster
