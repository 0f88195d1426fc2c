#include "launch/jobs/ledger_line.h"

#include <charconv>
#include <fstream>
#include <utility>

#include "base/hash.h"
#include "base/text.h"
#include "muster/base/error.h"

namespace muster::launch {
namespace {

using Kind = LedgerLine::Kind;
constexpr size_t kHashDigits = 8;

std::string hash_of(std::string_view words) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  uint64_t hash = hash_of_bytes(words.data(), words.size());
  std::string digits(kHashDigits, '0');
  for (char& digit : digits) {
    digit = kDigits[hash % kDigits.size()];
    hash /= kDigits.size();
  }
  return digits;
}

// Reads words one after another, and knows whether one was missing.
class WordReader {
 public:
  explicit WordReader(std::string_view words) : rest_(words) {}

  WordReader& word(std::string_view expected) {
    good_ = good_ && rest_.starts_with(expected);
    if (good_) rest_.remove_prefix(expected.size());
    return *this;
  }
  template <typename Number>
  WordReader& number(Number& value) {
    const auto [stop, error] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), value);
    good_ = good_ && error == std::errc() && value >= 0;
    if (good_) rest_.remove_prefix(static_cast<size_t>(stop - rest_.data()));
    return *this;
  }
  bool at_end() const { return rest_.empty(); }
  bool good() const { return good_; }
  std::string_view rest() const { return rest_; }

 private:
  std::string_view rest_;
  bool good_ = true;
};

}  // namespace

std::string to_string(const LedgerLine& line) {
  PlainOutput words;
  switch (line.kind) {
    case Kind::kAttempt:
      words << "attempt " << line.attempt << " rank " << line.rank << " of " << line.ranks << " after " << line.step
            << " of " << line.dataset_size << " samples in " << line.training;
      break;
    case Kind::kStep:
      words << "step " << line.step << " attempt " << line.attempt << " rank " << line.rank << " epoch " << line.epoch
            << ":";
      for (const uint64_t sample : line.samples) words << ' ' << sample;
      break;
    case Kind::kMade:
      words << "made " << line.step << " attempt " << line.attempt << " rank " << line.rank;
      break;
  }
  return text('\n', words.str(), " #", hash_of(words.str()), '\n');
}

std::optional<LedgerLine> parse_ledger_line(std::string_view line) {
  const auto end = line.rfind(" #");
  if (end == std::string_view::npos || line.substr(end + 2) != hash_of(line.substr(0, end))) return std::nullopt;
  const std::string_view words = line.substr(0, end);
  LedgerLine parsed;
  WordReader reader(words);
  if (words.starts_with("attempt ")) {
    reader.word("attempt ").number(parsed.attempt).word(" rank ").number(parsed.rank).word(" of ");
    reader.number(parsed.ranks).word(" after ").number(parsed.step).word(" of ").number(parsed.dataset_size);
    reader.word(" samples in ");
    parsed.training = reader.rest();
  } else if (words.starts_with("step ")) {
    parsed.kind = Kind::kStep;
    reader.word("step ").number(parsed.step).word(" attempt ").number(parsed.attempt).word(" rank ");
    reader.number(parsed.rank).word(" epoch ").number(parsed.epoch).word(":");
    while (reader.good() && !reader.at_end()) reader.word(" ").number(parsed.samples.emplace_back());
  } else {
    parsed.kind = Kind::kMade;
    reader.word("made ").number(parsed.step).word(" attempt ").number(parsed.attempt).word(" rank ");
    reader.number(parsed.rank);
    if (!reader.at_end()) return std::nullopt;
  }
  return reader.good() ? std::optional(std::move(parsed)) : std::nullopt;
}

int64_t read_ledger(const std::string& file, const std::function<void(const LedgerLine&)>& fn) {
  std::ifstream in(file);
  if (!in) throw Unavailable(text("cannot read ", file), "Give the file of a muster::Ledger");
  int64_t others = 0;
  std::string line;
  while (std::getline(in, line)) {
    if (line.empty()) continue;
    if (const auto parsed = parse_ledger_line(line))
      fn(*parsed);
    else
      ++others;
  }
  if (in.bad()) throw Unavailable(text("cannot read all of ", file));
  return others;
}

}  // namespace muster::launch
