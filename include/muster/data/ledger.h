// Ledger: which samples have entered which optimizer step, through failures, restarts and changes of the number of
// ranks.
//
//   muster::Ledger ledger("run.ledger", {.dataset_size = dataset.size(), .steps = snapshot.restore()});
//   …
//   while (auto batch = sampler.next(64)) {
//     ledger.enter(sampler.epoch(), *batch);    // before backward()
//     …
//     optimizer.step();
//     ledger.step();
//     if (snapshot.step(ledger.steps())) return 0;
//   }
//
//   $ muster ledger check run.ledger
//
// proves that every sample of every epoch has entered one step that counts, or names the samples and steps for which
// this is not so. A job that goes on from a snapshot makes the steps after it again, with other parameters: those of
// the earlier attempt do not count any more. The check finds what goes wrong there: a position in the data that is
// saved too early or too late, a rank that resumes another epoch's order, two ranks with the same part, a sampler for
// another number of ranks.
//
// The constructor begins an *attempt*. `steps`: how many steps the model has made, which is 0 at first, and later what
// Snapshot::restore() returns. In elastic::run(), make the Ledger in `setup`, with state.step().
//
// All ranks of a host append to one file, as text (launch/jobs/ledger_line.h has the format), and each rank writes one
// line at a time. Ranks on other hosts write other files, or the same one on a shared file system that appends whole
// lines (NFS does not). `muster ledger check` takes all files of a training together. What a killed process has written
// is there. For the case that the host itself crashes, set `.sync`.
//
// enter() writes immediately, because other ranks may make the step with this rank's gradients, although it dies before
// step(). A step may take several enter(), as with gradients of several batches. Without samples it needs none.
//
// A sampler that pads or drops the rest of an epoch repeats or omits up to a batch of samples per epoch: give
// DistributedSampler `.pad = false`, or tell the check how many (--spare N). Without padding, ranks may have different
// numbers of batches: train in DistributedDataParallel::join().
//
// Epochs are numbered from 0. If the file ends before `steps` (it was lost, or begun later), a warning says so, and the
// check will.
//
// Errors: InvalidArgument if the file belongs to another training (another name or dataset_size), or on all ranks if
// they give different options; Unavailable if the file cannot be written.
// Thread-safety: one thread per rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>

#include "muster/comm/group.h"

namespace muster {

struct LedgerOptions {
  size_t dataset_size = 0;            // samples are 0 … dataset_size - 1; 0: any numbers, and only repeats are found
  int64_t steps = 0;                  // that the model has made
  std::string training = "training";  // its name, one line
  bool sync = false;                  // enter() and step() wait until their lines are on the disk
  Group group;                        // default: all ranks
};

class Ledger {
 public:
  // Collective.
  explicit Ledger(const std::filesystem::path& file, LedgerOptions options = {});
  Ledger(Ledger&&) noexcept;
  Ledger& operator=(Ledger&&) noexcept;
  ~Ledger();

  // The gradients of these samples will be part of the next step.
  void enter(uint64_t epoch, std::span<const size_t> samples);
  // The optimizer has made the step.
  void step();
  int64_t steps() const;  // that the model has made

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace muster
