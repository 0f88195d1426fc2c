#include "parallel/fsdp/gatherer.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <iterator>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"

namespace muster::fsdp {

// The ranks of this host have come, and read no units but those in here_.
void Gatherer::meet() { barrier({.group = setup_.ranks_of_host}); }

// Nobody reads what is received now.
Gatherer::Here Gatherer::start(size_t unit) const {
  Here here{.unit = unit};
  const auto& pieces = setup_.pieces[unit];
  if (pieces.empty()) return here;
  const at::Tensor nothing = at::empty({0}, at::kByte);
  std::vector<at::Tensor> to(static_cast<size_t>(setup_.column.size()), nothing), from = to;
  for (const Piece& piece : pieces) {
    const bool is_at_home = piece.host == setup_.host;
    if (!is_at_home) shm::commit(setup_.memory.get(), piece.offset, piece.bytes);
    const at::Tensor bytes = at::from_blob(
        setup_.mapped->data() + piece.offset, {static_cast<int64_t>(piece.bytes)}, [mapped = setup_.mapped](void*) {},
        at::kByte);
    if (!is_at_home) {
      from[static_cast<size_t>(piece.host)] = bytes;
      continue;
    }
    for (size_t host = 0; host < to.size(); ++host)
      if (host != static_cast<size_t>(setup_.host)) to[host] = bytes;
  }
  here.receiving = all_to_all_async(from, to, {.group = setup_.column});
  return here;
}

void Gatherer::free(Here& here) const {
  here.receiving.wait();
  for (const Piece& piece : setup_.pieces[here.unit])
    if (piece.host != setup_.host) shm::discard(setup_.memory.get(), piece.offset, piece.bytes);
}

// For one more unit. Returns whether there is room, without those that the operation uses.
bool Gatherer::make_room(uint64_t operation) {
  while (here_.size() >= setup_.most) {
    const auto goes =
        std::find_if(here_.rbegin(), here_.rend(), [&](const Here& here) { return here.operation != operation; });
    if (goes == here_.rend()) return false;
    free(*goes);
    here_.erase(std::next(goes).base());
  }
  return true;
}

// The ranks of the host have just met.
void Gatherer::prefetch(uint64_t operation) {
  const auto next = followed_by_.find(last_);
  if (next == followed_by_.end()) return;
  const size_t unit = next->second;
  if (std::any_of(here_.begin(), here_.end(), [&](const Here& here) { return here.unit == unit; })) return;
  if (make_room(operation)) here_.insert(here_.begin() + (here_.empty() ? 0 : 1), start(unit));
}

void Gatherer::use(size_t unit, uint64_t operation) {
  const auto at = std::find_if(here_.begin(), here_.end(), [&](const Here& here) { return here.unit == unit; });
  if (at == here_.end()) {
    meet();
    make_room(operation);
    here_.insert(here_.begin(), start(unit));
  } else {
    std::rotate(here_.begin(), at, std::next(at));
  }
  here_.front().operation = operation;
  if (here_.front().arrived) return;
  here_.front().receiving.wait();
  meet();
  here_.front().arrived = true;
  followed_by_[last_] = unit;
  last_ = {last_.second, unit};
  prefetch(operation);
}

void Gatherer::before_use(size_t unit, bool is_at_home, const std::string& parameter, uint64_t operation) {
  if (reading_)
    use(unit, operation);
  else if (!is_at_home && !all_here_)
    throw InvalidArgument(text("the values of parameter ", parameter, " are on another host now"),
                          "Call gather() on all ranks before you read them, and synchronize() when you have");
}

void Gatherer::begin() {
  end();
  reading_ = true;
  prefetch(0);
}

void Gatherer::end() {
  reading_ = all_here_ = false;
  for (Here& here : here_) free(here);
  here_.clear();
  last_ = {kNone, kNone};
}

void Gatherer::gather_all() {
  end();
  for (size_t unit = 0; unit < setup_.pieces.size(); ++unit) here_.push_back(start(unit));
  for (Here& here : here_) here.receiving.wait();
  meet();
  all_here_ = true;
}

}  // namespace muster::fsdp
