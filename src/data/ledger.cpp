#include "muster/data/ledger.h"

#include <ATen/ops/from_blob.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <utility>

#include "base/fd.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/text.h"
#include "launch/jobs/ledger_line.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"
#include "parallel/modules/same_module.h"

namespace muster {

using launch::LedgerLine;

struct Ledger::Impl {
  std::string file;
  bool sync = false;
  int rank = 0;
  int64_t attempt = 0, steps = 0;
  UniqueFd fd;

  // In one write(), so that lines of ranks do not mix.
  void append(LedgerLine line) const {
    line.attempt = attempt;
    line.rank = rank;
    const std::string bytes = to_string(line);
    ssize_t written = 0;
    do {
      written = ::write(fd.get(), bytes.data(), bytes.size());
    } while (written < 0 && errno == EINTR);
    if (written < 0) throw_errno(text("cannot write to the ledger ", file));
    if (static_cast<size_t>(written) < bytes.size())
      throw Unavailable(text("cannot write a whole line to the ledger ", file), "Is the disk full?");
  }
  void sync_if_asked() const {
    if (sync && ::fdatasync(fd.get()) != 0) throw_errno(text("cannot write the ledger ", file, " to the disk"));
  }
};

namespace {

// What this rank knows before the attempt begins.
struct Before {
  int64_t attempt = 0, made = 0;  // the last ones in its file
};

Before open(const std::string& file, const LedgerOptions& options, UniqueFd& fd) {
  if (options.training.empty() || options.training.find('\n') != std::string::npos)
    throw InvalidArgument("LedgerOptions::training must be a name in one line");
  if (options.steps < 0)
    throw InvalidArgument(text("LedgerOptions::steps: expected 0 or more, got ", options.steps), "Use 0 or more");
  fd = UniqueFd(::open(file.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
  if (!fd) throw_errno(text("cannot write the ledger ", file));
  Before before;
  launch::read_ledger(file, [&](const LedgerLine& line) {
    before.attempt = std::max(before.attempt, line.attempt);
    if (line.kind != LedgerLine::Kind::kStep) before.made = std::max(before.made, line.step);
    if (line.kind != LedgerLine::Kind::kAttempt) return;
    if (line.training != options.training || line.dataset_size != options.dataset_size)
      throw InvalidArgument(text(file, ": expected the ledger of ", options.training, " with ", options.dataset_size,
                                 " samples, got that of ", line.training, " with ", line.dataset_size),
                            "Give each training a file of its own");
  });
  return before;
}

}  // namespace

Ledger::Ledger(const std::filesystem::path& file, LedgerOptions options) : impl_(std::make_unique<Impl>()) {
  Impl& s = *impl_;
  const Group group = options.group.resolved();
  if (!group.is_member()) throw InvalidArgument("this rank is not a member of the Ledger's group");
  s.file = file.string();
  s.sync = options.sync;
  s.rank = group.rank();
  s.steps = options.steps;
  Before before;
  std::exception_ptr failure;
  try {
    before = open(s.file, options, s.fd);
  } catch (...) {
    failure = std::current_exception();
  }
  // Of some numbers also the opposite, so that the maximum gives the minimum.
  const auto training =
      static_cast<int64_t>(hash_of_bytes(options.training.data(), options.training.size(), options.dataset_size) >> 1);
  int64_t numbers[] = {before.attempt, before.made, s.steps, -s.steps, training, -training};
  parallel::throw_if_any_failed(failure, group, "cannot use its ledger");
  all_reduce(at::from_blob(numbers, {std::ssize(numbers)}, at::kLong), {.op = ReduceOp::MAX, .group = group});
  const auto& [attempt, made, most, minus_least, one, minus_other] = numbers;
  if (most != -minus_least)
    throw InvalidArgument(text("ranks begin a Ledger after different steps: ", -minus_least, " and ", most),
                          "Use what Snapshot::restore() returns");
  if (one != -minus_other)
    throw InvalidArgument("ranks begin a Ledger with different names or sizes of the dataset", "Give all the same");
  if (s.steps > made && group.rank() == 0) {
    MUSTER_LOG(kWarning) << "the ledger " << s.file << " ends with step " << made
                         << ", and the training goes on after step " << s.steps
                         << ": it proves nothing of the steps between";
  }
  s.attempt = attempt + 1;
  s.append(
      {.step = s.steps, .ranks = group.size(), .dataset_size = options.dataset_size, .training = options.training});
}

Ledger::Ledger(Ledger&&) noexcept = default;
Ledger& Ledger::operator=(Ledger&&) noexcept = default;
Ledger::~Ledger() = default;

void Ledger::enter(uint64_t epoch, std::span<const size_t> samples) {
  impl_->append({.kind = LedgerLine::Kind::kStep,
                 .step = impl_->steps + 1,
                 .epoch = epoch,
                 .samples = {samples.begin(), samples.end()}});
  impl_->sync_if_asked();
}

void Ledger::step() {
  Impl& s = *impl_;
  s.append({.kind = LedgerLine::Kind::kMade, .step = s.steps + 1});
  ++s.steps;
  s.sync_if_asked();
}

int64_t Ledger::steps() const { return impl_->steps; }

}  // namespace muster
