#include "train/elastic_launcher.h"

#include "base/log.h"
#include "base/text.h"
#include "base/thread.h"
#include "muster/base/error.h"

namespace muster::elastic {
namespace {

using launch::ElasticWord;
using std::chrono::milliseconds;

constexpr milliseconds kLook{100};    // a wait checks this often whether the epoch is over
constexpr milliseconds kTry{1000};    // one try of a call; then comes such a check
constexpr milliseconds kCall{60000};  // all tries of a call together
constexpr milliseconds kWord{5000};   // a wait for the launcher's next word; then comes a look whether to stop

std::string over(int64_t epoch) { return text("epoch ", epoch, " of the job is over"); }

}  // namespace

Launcher::Launcher(std::shared_ptr<Store> store, int local_rank)
    : store_(std::move(store)), mark_(launch::mark_key(local_rank)), word_(launch::word_key(local_rank)) {
  if (store_) thread_ = start_thread("muster-elastic", [this] { listen(); });
}

Launcher::~Launcher() {
  if (!store_) return;
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  try {
    const store::CallsBy soon{Deadline::after(kTry)};
    store_->set(word_, "");  // wakes the thread, which watches this key
  } catch (const Error&) {   // the launcher is gone or silent; then the thread's watch ends by itself
  }
  thread_.join();
}

void Launcher::listen() {
  try {
    for (uint64_t version = 0;;) {
      Store::Versioned said;
      try {
        said = store_->watch(word_, version, Deadline::after(kWord));
      } catch (const TimeoutError&) {
        const std::lock_guard lock(mutex_);
        if (stop_) return;
        continue;
      }
      version = said.version;
      const auto word = said.value ? launch::elastic_word(*said.value) : std::nullopt;
      const std::lock_guard lock(mutex_);
      if (stop_) return;
      if (said.value == launch::kStop) {
        stops_ = true;
        changed_.notify_all();
      }
      if (!word || (latest_ && word->epoch <= latest_->epoch)) continue;
      latest_ = word;
      latest_epoch_ = word->epoch;
      changed_.notify_all();
      if (world_ && word->epoch > epoch_of_world_) world_->abort(over(epoch_of_world_));
    }
  } catch (const Error& error) {
    const std::lock_guard lock(mutex_);
    gone_ = true;
    changed_.notify_all();
  }
}

bool Launcher::enter(int64_t epoch) {
  if (!store_) return true;
  for (auto mark = store_->try_get(mark_);;) {
    if (const auto called = launch::called_from(mark); called && *called >= epoch) return false;
    const auto exchanged = store_->compare_set(mark_, mark, launch::kStays);
    if (exchanged.stored) return true;
    mark = exchanged.value;
  }
}

bool Launcher::finish() {
  return !store_ || store_->compare_set(mark_, std::string(launch::kStays), launch::kDone).stored;
}

std::optional<ElasticWord> Launcher::next(int64_t epoch, Deadline patience) {
  if (!store_) return std::nullopt;
  std::unique_lock lock(mutex_);
  const auto answered = [&] { return gone_ || stops_ || (latest_ && latest_->epoch > epoch); };
  while (!answered()) {
    if (!patience.wait(changed_, lock, answered)) {
      lock.unlock();
      try {
        if (finish()) return std::nullopt;
      } catch (const Error&) {  // the launcher is gone
        return std::nullopt;
      }
      patience = Deadline::never();  // the launcher has called this rank away, and so has promised a word
      lock.lock();
    }
  }
  return !stops_ && latest_ && latest_->epoch > epoch ? latest_ : std::nullopt;
}

Launcher::Guard::Guard(Launcher& launcher, World& world, int64_t epoch) : launcher_(launcher) {
  const std::lock_guard lock(launcher_.mutex_);
  launcher_.world_ = &world;
  launcher_.epoch_of_world_ = epoch;
  launcher_.in_world_ = true;
  if (launcher_.latest_ && launcher_.latest_->epoch > epoch) world.abort(over(epoch));
}

Launcher::Guard::~Guard() {
  const std::lock_guard lock(launcher_.mutex_);
  launcher_.world_ = nullptr;
  launcher_.in_world_ = false;
}

// --- the store ---

EpochStore::EpochStore(std::shared_ptr<Store> job, const Launcher& launcher, int64_t epoch)
    : part_(make_prefix_store(std::move(job), text("elastic/epochs/", epoch))),
      comes_again_(store::comes_again(*part_)),
      launcher_(launcher),
      epoch_(epoch) {}

void EpochStore::check() const {
  if (launcher_.is_over(epoch_)) throw Aborted(over(epoch_));
  if (launcher_.stops_joining()) throw Aborted("the job is to stop");
}

template <typename Wait>
auto EpochStore::in_slices(Deadline deadline, Wait wait) -> decltype(wait(deadline)) {
  for (;;) {
    try {
      return wait(deadline.left() < kLook ? deadline : Deadline::after(kLook));
    } catch (const TimeoutError&) {
      if (deadline.passed()) throw;
    } catch (const Unavailable&) {
      if (!comes_again_ || deadline.passed()) throw;
    }
    check();
  }
}

template <typename Call>
auto EpochStore::insist(Call call) -> decltype(call()) {
  // A caller that limits its calls by store::CallsBy has no time for a second try.
  if (!comes_again_ || !store::CallsBy::of_this_thread().is_never()) return call();
  const auto deadline = Deadline::after(kCall);
  for (;;) {
    try {
      const store::CallsBy soon(Deadline::after(kTry), store::CallsBy::For::kTry);
      return call();
    } catch (const Unavailable&) {
      if (deadline.passed()) throw;
    }
    check();
  }
}

void EpochStore::set(std::string_view key, std::string_view value) {
  insist([&] { return part_->set(key, value), 0; });
}

std::optional<std::string> EpochStore::try_get(std::string_view key) {
  check();
  return insist([&] { return part_->try_get(key); });
}

std::string EpochStore::get(std::string_view key, Deadline deadline) {
  return in_slices(deadline, [&](Deadline slice) { return part_->get(key, slice); });
}

void EpochStore::wait(const std::vector<std::string>& keys, Deadline deadline) {
  in_slices(deadline, [&](Deadline slice) {
    part_->wait(keys, slice);
    return 0;
  });
}

Store::Versioned EpochStore::watch(std::string_view key, uint64_t after, Deadline deadline) {
  return in_slices(deadline, [&](Deadline slice) { return part_->watch(key, after, slice); });
}

}  // namespace muster::elastic
