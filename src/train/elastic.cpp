#include "muster/train/elastic.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/tensor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <sstream>
#include <utility>
#include <vector>

#include "base/env.h"
#include "base/log.h"
#include "base/text.h"
#include "checkpoint/folder.h"
#include "checkpoint/save.h"
#include "comm/api/broadcast_bytes.h"
#include "comm/world/job_environment.h"
#include "launch/kit/elastic_words.h"
#include "muster/base/error.h"
#include "muster/checkpoint/stop_signal.h"
#include "muster/comm/collectives.h"
#include "optim/torch_states.h"
#include "parallel/kit/shared_tensor.h"
#include "train/elastic_launcher.h"

namespace muster::elastic {
namespace {

using std::chrono::milliseconds;

constexpr std::chrono::seconds kSaveAlone{60};  // how long a rank waits for another one that saves

bool is_loss(const Error& error) {
  switch (error.code()) {
    case ErrorCode::kPeerLost:
    case ErrorCode::kTimeout:
    case ErrorCode::kAborted:
    case ErrorCode::kUnavailable:
      return true;
    default:
      return false;
  }
}

// How far a rank is. A rank that has just been started is at step -1.
struct Position {
  int64_t steps = -1, finished = 0;
};

std::vector<Position> positions_of_all(World& world, const Position& mine) {
  const at::Tensor own = at::tensor({mine.steps, mine.finished}, at::kLong);
  const at::Tensor all = at::empty({world.world_size() * 2}, at::kLong);
  all_gather_into_tensor(all, own);
  std::vector<Position> positions(static_cast<size_t>(world.world_size()));
  std::memcpy(positions.data(), all.const_data_ptr(), all.nbytes());
  return positions;
}

std::string from_rank(World& world, int root, std::string bytes) {
  const at::Tensor size = at::tensor({static_cast<int64_t>(bytes.size())}, at::kLong);
  broadcast(size, root);
  const auto count = size.item<int64_t>();
  try {
    bytes.resize(static_cast<size_t>(count));  // throws for less than 0, too
  } catch (const std::exception&) {            // the others would wait for this rank
    const std::string why =
        text("rank ", world.rank(), " has no memory for the state of rank ", root, ", ", count, " bytes");
    MUSTER_LOG(kError) << why;
    world.abort(why);
    throw;
  }
  comm::broadcast_bytes(at::from_blob(bytes.data(), {count}, at::TensorOptions(at::kByte)), root);
  return bytes;
}

// The state does not use torch::save(), which writes modules as TorchScript: there no submodule can be named "in" or
// "lambda".
using Named = c10::Dict<std::string, at::Tensor>;

Named named_tensors(torch::nn::Module& module) {
  Named named;
  for (const auto& parameter : module.named_parameters()) named.insert(parameter.key(), parameter.value().detach());
  for (const auto& buffer : module.named_buffers()) named.insert(buffer.key(), buffer.value());
  return named;
}

std::string bytes_of(torch::optim::Optimizer& optimizer) {
  optim::define_scratch_of_lbfgs(optimizer);
  torch::serialize::OutputArchive archive;
  optimizer.save(archive);
  std::ostringstream out;
  archive.save_to(out);
  return std::move(out).str();
}

}  // namespace

namespace {

void require_own_parameters(const torch::nn::Module& module) {
  for (const auto& parameter : module.named_parameters())
    if (parallel::is_shared(parameter.value()))
      throw InvalidArgument(text("FullyShardedDataParallel has shared parameter ", parameter.key(),
                                 " among the ranks, and ", "divided the optimizer's state, which is lost with a rank"),
                            "Restart all ranks from a Snapshot (--max-restarts)");
}

}  // namespace

std::string TrainingState::save() const {
  require_own_parameters(module_);
  const auto bytes = torch::pickle_save(c10::ivalue::Tuple::create(named_tensors(module_), bytes_of(optimizer_)));
  return {bytes.begin(), bytes.end()};
}

void TrainingState::load(const std::string& bytes) {
  require_own_parameters(module_);
  const auto parts = torch::pickle_load({bytes.begin(), bytes.end()}).toTupleRef().elements().vec();
  const auto theirs = c10::impl::toTypedDict<std::string, at::Tensor>(parts.at(0).toGenericDict());
  const Named mine = named_tensors(module_);
  if (mine.size() != theirs.size())
    throw CorruptError(text("a module of ", mine.size(), " tensors cannot load a state of ", theirs.size()),
                       "Build the same module on all ranks");
  const torch::NoGradGuard no_grad;
  for (const auto& entry : mine) {
    const auto found = theirs.find(entry.key());
    if (found == theirs.end() || found->value().sizes() != entry.value().sizes())
      throw CorruptError(text("the state has no tensor '", entry.key(), "' with this module's shape"),
                         "Build the same module on all ranks");
    entry.value().copy_(found->value());
  }
  const std::string& archived = parts.at(1).toStringRef();
  torch::serialize::InputArchive archive;
  archive.load_from(archived.data(), archived.size());
  auto before = std::exchange(optimizer_.state(), {});  // an archive only adds to it
  try {
    optimizer_.load(archive);
  } catch (...) {
    optimizer_.state() = std::move(before);
    throw;
  }
}

// --- run() ---

namespace {

// What rank 0 of an epoch saves.
struct SavedState {
  std::string bytes;
  int64_t finished = 0;
  void save(torch::serialize::OutputArchive& archive) const {
    const at::Tensor data = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
    std::memcpy(data.mutable_data_ptr(), bytes.data(), bytes.size());
    archive.write("state", data);
    archive.write("finished", c10::IValue(finished));
  }
  void load(torch::serialize::InputArchive& archive) {
    at::Tensor data;
    c10::IValue number;
    archive.read("state", data);
    archive.read("finished", number);
    bytes.assign(static_cast<const char*>(data.const_data_ptr()), data.nbytes());
    finished = number.toInt();
  }
};

// The options for a snapshot that holds nothing but the state, taken by `group`.
SnapshotOptions of_state(SnapshotOptions options, const Group& group) {
  options.group = group;
  options.local = {};
  options.sharded = options.asynchronous = options.default_generator = options.on_sigterm = false;
  options.shard_folders.clear();
  return options;
}

// The snapshots of one epoch. Collective: all ranks construct it and call step() and stop_here().
class Snapshots {
 public:
  // `signal` may be null: then SIGTERM does not stop the training.
  Snapshots(World& world, const std::optional<SnapshotOptions>& options, const StopSignal* signal)
      : on_(options.has_value()), every_(options ? options->every : 0), signal_(signal) {
    if (!on_) return;
    const Group first = world.new_group({0});
    if (!first.is_member()) return;
    snapshot_.emplace(of_state(*options, first));
    snapshot_->add("elastic", saved_, {.per_rank = false});
    steps_ = snapshot_->restore();
  }

  // Rank 0 calls this. Loads the newest snapshot into the state and returns its position; 0 steps if there is none.
  Position load_newest(State* state) const {
    if (steps_ == 0) return {.steps = 0};
    state->load(saved_.bytes);
    MUSTER_LOG(kInfo) << "rank 0: loaded the state from the snapshot of step " << steps_;
    return {.steps = steps_, .finished = saved_.finished};
  }

  // Call it after each step. Returns true if any rank has been asked to stop; the state is saved then.
  bool step(const State& state, const std::string& copy, const Position& here) {
    if (!on_) return false;
    const bool stop = is_anybody_asked();
    if (!snapshot_) return stop;
    if (stop || (every_ != 0 && here.steps % every_ == 0)) take(state, copy, here);
    if (stop) snapshot_->request_stop();
    return snapshot_->step(here.steps);
  }

  // Does the same before the first step of the epoch.
  bool stop_here(const State& state, const std::string& copy, const Position& here) {
    if (!on_ || !is_anybody_asked()) return false;
    if (!snapshot_) return true;
    take(state, copy, here);
    snapshot_->request_stop();
    return snapshot_->stop_here(here.steps);
  }

 private:
  bool is_anybody_asked() const {
    const at::Tensor asked = at::tensor({static_cast<int64_t>(signal_ && signal_->requested())}, at::kLong);
    all_reduce(asked, {.op = ReduceOp::MAX});
    return asked.item<int64_t>() != 0;
  }
  void take(const State& state, const std::string& copy, const Position& here) {
    saved_ = {.bytes = copy.empty() ? state.save() : copy, .finished = here.finished};
  }

  const bool on_;
  const int64_t every_;
  const StopSignal* const signal_;
  SavedState saved_;
  std::optional<Snapshot> snapshot_;  // rank 0's
  int64_t steps_ = 0;
};

// The job stops while this rank waits for an epoch, which will not come, so it saves its state without the other ranks.
// All waiting ranks call this, but one snapshot is enough: those that come later find it and save nothing.
void save_alone(const State& state, const std::string& copy, const Position& here, const SnapshotOptions& options,
                int rank) {
  if (here.steps < 1) return;  // nothing to save
  checkpoint::Folder folder(options.folder);
  const auto newest = [&] {
    const auto there = folder.snapshots();
    return there.empty() ? 0 : there.front();
  };
  const auto before = newest();
  for (const auto patience = Deadline::after(kSaveAlone);;) {
    try {
      folder.claim();
      break;
    } catch (const Unavailable&) {                                               // another rank has the folder
      if (const auto now = newest(); now > before && now >= here.steps) return;  // and has saved meanwhile
      if (patience.passed()) throw;
    }
  }
  World world({}, make_memory_store());
  const World::Scope scope(world);
  SavedState saved;
  Snapshot snapshot(of_state(options, {}));
  snapshot.add("elastic", saved, {.per_rank = false});
  if (snapshot.restore() >= here.steps) return;  // a file that only has the right name may be damaged
  saved = {.bytes = copy.empty() ? state.save() : copy, .finished = here.finished};
  snapshot.save(here.steps);
  checkpoint::say_stopped(rank, here.steps, options.folder);
}

int furthest_of(const std::vector<Position>& positions) {
  const auto furthest = std::max_element(positions.begin(), positions.end(),
                                         [](const Position& a, const Position& b) { return a.steps < b.steps; });
  return static_cast<int>(furthest - positions.begin());
}

void take_place(Placement* placement, const launch::ElasticWord& word) {
  placement->rank = word.rank;
  placement->world_size = word.world_size;
  placement->local_world_size = word.local_world_size;
  placement->node_rank = word.node;
}

// The launcher's own store; null if there is none.
std::shared_ptr<Store> launcher_store(Deadline deadline) {
  const auto address = env_string(launch::kLauncherVariable);
  return address ? connect_store(*address, deadline) : nullptr;
}

}  // namespace

bool run(State& state, const Setup& setup, const Options& options) {
  const auto start = Deadline::after(options.world.timeout);
  comm::JoinedJob job = comm::join_job(start);
  Launcher launcher(launcher_store(start), job.placement.local_rank);
  int64_t epoch = env_int(launch::kEpochVariable).value_or(0);
  std::optional<StopSignal> signal;
  if (options.snapshot && options.snapshot->on_sigterm) signal.emplace();
  Position here;
  std::string copy;
  for (;;) {
    std::exception_ptr loss;
    try {
      if (!launcher.enter(epoch)) throw Aborted(text("epoch ", epoch, " of the job is over"));
      World world(job.placement, std::make_shared<EpochStore>(job.store, launcher, epoch), options.world);
      const Launcher::Guard guard(launcher, world, epoch);
      const World::Scope scope(world);
      Snapshots snapshots(world, options.snapshot, signal ? &*signal : nullptr);
      auto positions = positions_of_all(world, here);
      if (positions[static_cast<size_t>(furthest_of(positions))].steps < 0)  // no living rank has the state
        positions = positions_of_all(world, world.rank() == 0 ? snapshots.load_newest(&state) : here);
      const int furthest = furthest_of(positions);
      const Position& there = positions[static_cast<size_t>(furthest)];
      std::string bytes = from_rank(world, furthest, world.rank() == furthest ? state.save() : std::string());
      // A rank that is as far keeps state that is not shared, such as the statistics of a BatchNorm.
      const bool behind = world.rank() != furthest && (here.steps < 0 || here.steps < there.steps);
      if (behind) state.load(bytes);
      here = {.steps = std::max<int64_t>(there.steps, 0), .finished = there.finished};
      state.step_ = here.steps;
      if (options.copy) copy = behind || world.rank() == furthest ? std::move(bytes) : state.save();
      bool stopped = false;
      {
        const Step step = setup(world);
        stopped = here.finished == 0 && snapshots.stop_here(state, copy, here);
        while (here.finished == 0 && !stopped) {
          // A world of one has no collectives that the end of the epoch could abort.
          if (launcher.is_over(epoch)) throw Aborted(text("epoch ", epoch, " of the job is over"));
          here.finished = step() ? 0 : 1;
          state.step_ = ++here.steps;
          if (options.copy) copy = state.save();
          stopped = snapshots.step(state, copy, here);
        }
      }
      barrier();
      if (launcher.finish()) return !stopped;
      throw Aborted("other ranks still need this rank's state");
    } catch (const Error& error) {
      if (!is_loss(error)) throw;
      loss = std::current_exception();
      MUSTER_LOG(kInfo) << "rank " << job.placement.rank << ": epoch " << epoch << " of the job ends: " << error.what();
    }
    const auto word = launcher.next(epoch, Deadline::after(options.patience));
    if (!word && launcher.stops() && options.snapshot) {
      if (options.copy && here.steps >= 0) state.load(copy);
      save_alone(state, options.copy ? copy : std::string(), here, *options.snapshot, job.placement.rank);
      return false;
    }
    if (!word) std::rethrow_exception(loss);
    epoch = word->epoch;
    take_place(&job.placement, *word);
    if (options.copy && here.steps >= 0) state.load(copy);
  }
}

}  // namespace muster::elastic
