#include "launch/jobs/ledger_check.h"

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <unordered_set>
#include <utility>

#include "base/text.h"
#include "launch/jobs/ledger_line.h"
#include "muster/base/error.h"

namespace muster::launch {
namespace {

using Kind = LedgerLine::Kind;
constexpr size_t kMostNamed = 5;  // samples in a sentence
constexpr int64_t kMostProblems = 20;

struct Attempt {
  int64_t after = 0, made = 0;
  int64_t last = 0;  // steps after `after` and up to this one count
  int ranks = 0;
  uint64_t dataset_size = 0;
  std::string training;
  std::set<int> announced;  // ranks
};

// Which samples of an epoch count, and which of them more than once.
struct Epoch {
  std::vector<bool> known;               // if the dataset's size is known
  std::unordered_set<uint64_t> unknown;  // else
  uint64_t count = 0;                    // different samples
  uint64_t repeats = 0;
  std::vector<uint64_t> repeated;  // the first ones

  void add(uint64_t sample, uint64_t dataset_size) {
    bool is_new = false;
    if (dataset_size > 0) {
      if (known.empty()) known.resize(dataset_size);
      is_new = !known[sample];
      known[sample] = true;
    } else {
      is_new = unknown.insert(sample).second;
    }
    count += is_new ? 1 : 0;
    repeats += is_new ? 0 : 1;
    const bool is_named = std::find(repeated.begin(), repeated.end(), sample) != repeated.end();
    if (!is_new && !is_named && repeated.size() < kMostNamed) repeated.push_back(sample);
  }
  std::string missing_ones() const {
    std::vector<uint64_t> some;
    for (uint64_t sample = 0; sample < known.size() && some.size() < kMostNamed; ++sample)
      if (!known[sample]) some.push_back(sample);
    return text(join(some), known.size() - count > some.size() ? ", …" : "");
  }
};

class Check {
 public:
  Check(const std::vector<std::string>& files, const LedgerCheckOptions& options) : files_(files), options_(options) {}

  LedgerCheck run() {
    read_attempts();
    choose_steps();
    count_samples();
    judge_epochs();
    if (problems_ > kMostProblems) words_ << "  … and " << problems_ - kMostProblems << " more problems\n";
    const bool good = problems_ == 0;
    words_ << (good ? "every sample counts once\n" : "NOT exactly once\n");
    return {good, words_.str()};
  }

 private:
  template <typename... Words>
  void problem(const Words&... words) {
    if (++problems_ <= kMostProblems) ((words_ << "  problem: ") << ... << words) << "\n";
  }
  template <typename Fn>
  int64_t for_each_line(const Fn& fn) const {
    int64_t others = 0;
    for (const std::string& file : files_) others += read_ledger(file, fn);
    return others;
  }
  bool counts(const LedgerLine& line) const {
    if (line.kind != Kind::kStep) return false;
    const auto found = attempts_.find(line.attempt);
    return found != attempts_.end() && line.step > found->second.after && line.step <= found->second.last;
  }

  void read_attempts() {
    std::set<int64_t> strangers;
    const int64_t parts = for_each_line([&](const LedgerLine& line) {
      if (line.kind == Kind::kAttempt) {
        const Attempt mine{.after = line.step,
                           .made = line.step,
                           .ranks = line.ranks,
                           .dataset_size = line.dataset_size,
                           .training = line.training};
        const auto [found, is_new] = attempts_.emplace(line.attempt, mine);
        found->second.announced.insert(line.rank);
        const Attempt& known = found->second;
        if (known.after != mine.after)
          problem("attempt ", line.attempt, " begins after step ", known.after, " on one rank, and after step ",
                  mine.after, " on rank ", line.rank);
        const Attempt& first = attempts_.begin()->second;
        if (first.dataset_size != mine.dataset_size || first.training != mine.training)
          problem("attempt ", line.attempt, " is of another training: ", mine.training, " with ", mine.dataset_size,
                  " samples, not ", first.training, " with ", first.dataset_size);
        return;
      }
      const auto found = attempts_.find(line.attempt);
      if (found == attempts_.end())
        strangers.insert(line.attempt);
      else if (line.kind == Kind::kMade)
        found->second.made = std::max(found->second.made, line.step);
    });
    for (const int64_t number : strangers)
      if (!attempts_.contains(number)) problem("nobody has said how attempt ", number, " began");
    if (attempts_.empty())
      throw CorruptError(text("there is no ledger in ", join(files_)), "muster::Ledger writes one");
    words_ << attempts_.rbegin()->second.training << ": " << attempts_.size()
           << (attempts_.size() == 1 ? " attempt" : " attempts");
    if (parts > 0) words_ << ", " << parts << (parts == 1 ? " line" : " lines") << " cut off";
    words_ << "\n";
  }

  // A later attempt replaces what is after the step with which it begins.
  void choose_steps() {
    int64_t limit = std::numeric_limits<int64_t>::max();
    int64_t later = 0;
    for (auto next = attempts_.rbegin(); next != attempts_.rend(); ++next) {
      auto& [number, attempt] = *next;
      attempt.last = std::min(limit, attempt.made);
      const bool is_empty = attempt.made == attempt.after;
      if (is_empty && later != 0) continue;  // it was killed before its first step, and nothing goes on from it
      if (later != 0 && attempt.after < limit && attempt.made < limit)
        problem("attempt ", later, " begins after step ", limit, ", but attempt ", number, " before it ends with step ",
                attempt.made);
      if (attempt.after < limit) later = number;
      limit = std::min(limit, attempt.after);
    }
    if (limit > 0) problem("nothing is known of the steps up to ", limit, ", after which attempt ", later, " begins");
    for (const auto& [number, attempt] : attempts_) {
      if (attempt.last > attempt.after && static_cast<int>(attempt.announced.size()) != attempt.ranks)
        problem("attempt ", number, " has ", attempt.ranks, " ranks, and there are lines of ", attempt.announced.size(),
                ": give the files of all hosts");
      words_ << "  attempt " << number << ", " << attempt.ranks << (attempt.ranks == 1 ? " rank: " : " ranks: ");
      if (attempt.last <= attempt.after)
        words_ << "none of its steps count";
      else
        words_ << "steps " << attempt.after + 1 << " to " << attempt.last << " count";
      if (attempt.made > std::max(attempt.last, attempt.after))
        words_ << "; those up to " << attempt.made << " were replaced";
      words_ << "\n";
    }
  }

  void count_samples() {
    const uint64_t size = attempts_.rbegin()->second.dataset_size;
    for_each_line([&](const LedgerLine& line) {
      if (!counts(line)) return;
      for (const uint64_t sample : line.samples)
        if (size > 0 && sample >= size)
          problem("sample ", sample, " of ", size, " in step ", line.step, " on rank ", line.rank);
        else
          epochs_[line.epoch].add(sample, size);
    });
  }

  void judge_epochs() {
    const uint64_t size = attempts_.rbegin()->second.dataset_size;
    const uint64_t wanted = options_.epochs.value_or(0);
    uint64_t next = 0;
    const auto require_up_to = [&](uint64_t number) {
      if (next == number) return;
      if (number - next == 1)
        problem("epoch ", next, " has no samples");
      else
        problem("epochs ", next, " to ", number - 1, " have no samples");
    };
    for (const auto& [number, epoch] : epochs_) {
      require_up_to(number);
      next = number + 1;  // 0 after the largest number, which is the last one
      if (options_.epochs && number >= wanted) problem("there is an epoch ", number, ", and there should be ", wanted);
      const bool may_be_under_way = number == epochs_.rbegin()->first && !options_.epochs;
      words_ << "epoch " << number << ": " << epoch.count;
      if (size > 0 && epoch.count < size) words_ << " of " << size;
      words_ << " samples" << (size > 0 && epoch.count < size && may_be_under_way ? " so far" : "");
      if (epoch.repeats == 0) words_ << ", each once";
      words_ << "\n";
      if (epoch.repeats > 0) name_repeated(number, epoch);
      if (!may_be_under_way && size > epoch.count) name_missing(number, epoch, size - epoch.count);
    }
    if (next < wanted) require_up_to(wanted);
  }

  void name_missing(uint64_t number, const Epoch& epoch, uint64_t missing) {
    if (missing > options_.spare)
      problem("epoch ", number, ": ", missing, missing == 1 ? " sample does" : " samples do",
              " not count: ", epoch.missing_ones());
    else
      words_ << "  missing, as allowed: " << epoch.missing_ones() << "\n";
  }

  void name_repeated(uint64_t number, const Epoch& epoch) {
    std::map<uint64_t, std::vector<std::string>> places;
    for_each_line([&](const LedgerLine& line) {
      if (!counts(line) || line.epoch != number) return;
      for (const uint64_t sample : epoch.repeated)
        for (auto n = std::count(line.samples.begin(), line.samples.end(), sample); n > 0; --n)
          places[sample].push_back(text("in step ", line.step, " (attempt ", line.attempt, ", rank ", line.rank, ")"));
    });
    const bool is_allowed = epoch.repeats <= options_.spare;
    for (const auto& [sample, where] : places) {
      const std::string words = text("epoch ", number, ": sample ", sample, " counts ", join(where, " and "));
      if (is_allowed)
        words_ << "  repeated, as allowed: " << words << "\n";
      else
        problem(words);
    }
    if (epoch.repeats > places.size()) words_ << "  … and " << epoch.repeats - places.size() << " more of this epoch\n";
  }

  const std::vector<std::string>& files_;
  const LedgerCheckOptions& options_;
  std::map<int64_t, Attempt> attempts_;
  std::map<uint64_t, Epoch> epochs_;
  PlainOutput words_;
  int64_t problems_ = 0;
};

}  // namespace

LedgerCheck check_ledger(const std::vector<std::string>& files, const LedgerCheckOptions& options) {
  return Check(files, options).run();
}

}  // namespace muster::launch
