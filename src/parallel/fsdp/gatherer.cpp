#include "parallel/fsdp/gatherer.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <iterator>
#include <limits>

#include "base/text.h"
#include "comm/core/backend.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"
#include "parallel/tape/watched.h"

namespace muster::fsdp {
namespace {

constexpr char kSameOrder[] =
    "With kFullShard, let every rank call forward() equally often, and use the same parameters in the same order";

}  // namespace

Gatherer::Gatherer(Setup setup) : setup_(std::move(setup)) {
  for (size_t unit = 0; unit < setup_.pieces.size(); ++unit)
    for (const Piece& piece : setup_.pieces[unit]) {
      if (piece.host != setup_.host) continue;
      const size_t end = piece.offset + piece.bytes;
      const size_t page = end - shm::page_size();
      shm::commit(setup_.memory, page, shm::page_size());
      const uint64_t label = unit;
      std::memcpy(setup_.mapped->data() + end - kLabelBytes, &label, kLabelBytes);
    }
  for (const auto& unit : setup_.elsewhere)
    for (const auto& bytes : unit) shm::forbid(bytes.data(), bytes.size());
}

Gatherer::~Gatherer() {
  for (Here& here : here_) try {
      here.receiving.wait();
    } catch (const std::exception&) {  // the rank that needs it learns the same
    }
}

// A rank that has lost another one gives up, and others may wait for it in another group. So the groups between which
// ranks wait learn of the loss, and a rank that has given up is not blamed if `group` knows why it has.
template <typename Fn>
void Gatherer::share_loss(Fn&& fn) {
  std::exception_ptr loss;
  try {
    return fn();
  } catch (const PeerLost&) {
    loss = std::current_exception();
  }
  try {
    if (const auto known = comm::backend_of(setup_.group).known_failure()) loss = known;
    std::rethrow_exception(loss);
  } catch (const Error& lost) {
    for (const Group& group : {setup_.ranks_of_host, setup_.column})
      if (group.is_member()) comm::backend_of(group).fail(lost);
    throw;
  }
}

// The ranks of this host have come, and read no units but those in here_. They have the same units.
void Gatherer::meet() {
  uint64_t state = 0;
  for (const Here& here : here_) state = (state ^ (here.unit + 1)) * 0x9E3779B97F4A7C15;
  const auto mine = static_cast<int64_t>(state >> 1);
  int64_t largest[2] = {mine, -mine};
  all_reduce(at::from_blob(largest, {2}, at::kLong), {.op = ReduceOp::MAX, .group = setup_.ranks_of_host});
  if (largest[0] != -largest[1])
    throw Mismatch("the ranks of a host have used parameters in another order", kSameOrder);
}

std::vector<size_t> Gatherer::units_here() const { return sorted_units(here_); }

// Nobody reads what is received now.
Gatherer::Here Gatherer::start(size_t unit) const {
  for (const auto& bytes : setup_.elsewhere[unit]) shm::allow(bytes.data(), bytes.size());
  Here here{.unit = unit};
  const auto& pieces = setup_.pieces[unit];
  if (pieces.empty()) return here;
  const at::Tensor nothing = at::empty({0}, at::kByte);
  std::vector<at::Tensor> to(static_cast<size_t>(setup_.column.size()), nothing), from = to;
  for (const Piece& piece : pieces) {
    const bool is_at_home = piece.host == setup_.host;
    if (!is_at_home) shm::commit(setup_.memory, piece.offset, piece.bytes);
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

void Gatherer::check_labels(size_t unit) const {
  for (const Piece& piece : setup_.pieces[unit]) {
    uint64_t label = 0;
    std::memcpy(&label, setup_.mapped->data() + piece.offset + piece.bytes - kLabelBytes, kLabelBytes);
    if (label != unit)
      throw Mismatch(
          text("host ", piece.host, " sent parameters of unit ", label, " when this host needed those of unit ", unit),
          kSameOrder);
  }
}

void Gatherer::finish(Here& here) {
  here.receiving.wait();
  check_labels(here.unit);
  meet();
  here.arrived = true;
}

// The ranks of this host have received whatever they were about to.
void Gatherer::finish_all() {
  if (std::all_of(here_.begin(), here_.end(), [](const Here& here) { return here.arrived; })) return;
  for (Here& here : here_) here.receiving.wait();
  meet();
  for (Here& here : here_) here.arrived = true;
}

void Gatherer::free(Units::iterator here) {
  if (!here->arrived) {  // other ranks of this host may still receive their parts, perhaps through the same mapping
    here->receiving.wait();
    meet();
  }
  for (const auto& bytes : setup_.elsewhere[here->unit]) shm::forbid(bytes.data(), bytes.size());
  for (const Piece& piece : setup_.pieces[here->unit])
    if (piece.host != setup_.host) shm::discard(setup_.memory, piece.offset, piece.bytes);
  here_.erase(here);
}

// Starts to receive the units that will be used next.
void Gatherer::prefetch(uint64_t operation, bool have_met) {
  const auto meet_once = [&] {
    if (!std::exchange(have_met, true)) meet();
  };
  const auto come = [&](size_t unit) {
    meet_once();
    here_.push_back(start(unit));
    return true;
  };
  fetch_ahead(here_, order_.expected(setup_.most), setup_.most, operation, come, [&](Units::iterator goes) {
    meet_once();
    free(goes);
  });
}

void Gatherer::use(size_t unit, uint64_t operation) {
  if (!here_.empty() && here_.front().unit == unit && here_.front().arrived) {
    here_.front().operation = operation;
    return;
  }
  const auto at = find_unit(here_, unit);
  if (at == here_.end()) {
    meet();
    make_room(here_, setup_.most - 1, operation, [&](Units::iterator goes) { free(goes); });  // it may need more
    here_.insert(here_.begin(), start(unit));
  } else {
    std::rotate(here_.begin(), at, std::next(at));
  }
  Here& now = here_.front();
  now.operation = operation;
  const bool waited = !now.arrived;
  if (waited) finish(now);
  order_.used(unit);
  prefetch(operation, waited);
}

void Gatherer::before_use(size_t unit, bool is_at_home, const std::string& parameter, uint64_t operation, bool writes) {
  if (all_here_) return;
  // What a rank writes is its own, so the others do not come here. If it is not, SharedParameters finds that later.
  if (writes && (is_at_home || find_unit(here_, unit) != here_.end())) return;
  if (!writes && (reading_ || parallel::in_backward())) return share_loss([&] { use(unit, operation); });
  if (is_at_home) return;
  throw InvalidArgument(text("the values of parameter ", parameter, " are on another host now"),
                        "Call gather() on all ranks before you read them, and synchronize() when you have");
}

void Gatherer::begin() {
  end();
  reading_ = true;
  share_loss([&] { prefetch(0, false); });
}

void Gatherer::end() {
  reading_ = all_here_ = false;
  share_loss([&] {
    finish_all();
    while (!here_.empty()) free(std::prev(here_.end()));
  });
  order_.restart();
}

void Gatherer::gather_all() {
  end();
  size_t bytes = 0;
  for (const auto& unit : setup_.elsewhere)
    for (const auto& part : unit) bytes += part.size();
  // By how much the memory is too little.
  auto missing = static_cast<int64_t>(bytes) -
                 static_cast<int64_t>(std::min<size_t>(shm::memory_available(), std::numeric_limits<int64_t>::max()));
  share_loss(
      [&] { all_reduce(at::from_blob(&missing, {1}, at::kLong), {.op = ReduceOp::MAX, .group = setup_.group}); });
  if (missing > 0)
    throw Unavailable(text("a host lacks ", missing, " bytes of memory to have all parameters"),
                      "Save with a Snapshot with .sharded, which needs no gather(), or use hosts with more memory");
  share_loss([&] {
    for (size_t unit = 0; unit < setup_.pieces.size(); ++unit) here_.push_back(start(unit));
    finish_all();
  });
  for (const Here& here : here_) check_labels(here.unit);
  all_here_ = true;
}

}  // namespace muster::fsdp
