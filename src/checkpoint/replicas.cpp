#include "checkpoint/replicas.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <deque>
#include <fstream>
#include <functional>
#include <optional>
#include <utility>

#include "base/atomic_file.h"
#include "base/text.h"
#include "comm/api/broadcast_bytes.h"
#include "muster/base/error.h"

namespace muster::checkpoint {
namespace {

// A shard on its way to another host.
class Replica {
 public:
  static at::Tensor memory() { return at::empty({kPiece + 1}, at::kByte); }

  Replica(const std::filesystem::path& path, const Shard& shard, int peer, bool is_sent, at::Tensor memory)
      : path_(path), shard_(shard), peer_(peer), is_sent_(is_sent), piece_(std::move(memory)) {
    unless_wrong([&] {
      if (is_sent_) {
        own_.open(path_, std::ios::binary);
      } else {
        copy_.emplace(path_);
        copy_->reserve(shard_.bytes);
      }
    });
  }
  // The next piece. Its last byte says whether what its sender has read is good. Whatever goes wrong, the pieces
  // travel: the other rank waits for them.
  bool has_more() const { return at_ < shard_.bytes; }
  comm::BytesMessage next() {
    count_ = std::min<int64_t>(kPiece, static_cast<int64_t>(shard_.bytes - at_));
    if (is_sent_)
      unless_wrong([&] {
        if (!own_.read(data(), count_)) throw Unavailable(text("cannot read ", path_.string()));
      });
    data()[count_] = !problem_;
    return {piece_.narrow(0, 0, count_ + 1), peer_, is_sent_};
  }
  void passed() {
    at_ += static_cast<uint64_t>(count_);
    if (is_sent_) return;
    unless_wrong([&] {
      if (data()[count_] == 0)
        throw Unavailable(text("rank ", peer_, " cannot read its shard, which this rank is to keep"));
      copy_->write({data(), static_cast<size_t>(count_)});
    });
  }
  Problem end(std::vector<std::filesystem::path>& written) {
    if (!is_sent_)
      unless_wrong([&] {
        copy_->commit(true);
        written.push_back(path_);
        const Container container = Container::open(path_);
        container.verify();
        if (container.sum() != shard_.sum || container.bytes() != shard_.bytes)
          throw Unavailable(text(path_.string(), " is not the shard that rank ", peer_, " has written"));
      });
    return problem_;
  }

 private:
  static constexpr int64_t kPiece = int64_t{4} << 20;
  char* data() { return static_cast<char*>(piece_.mutable_data_ptr()); }
  // Memory or a disk that does not suffice costs this snapshot; the training goes on.
  void unless_wrong(const std::function<void()>& fn) {
    if (problem_) return;
    problem_ = problem_of(fn);
    if (problem_) problem_.code = static_cast<int>(ErrorCode::kUnavailable);
  }

  const std::filesystem::path path_;
  const Shard shard_;
  const int peer_;
  const bool is_sent_;
  const at::Tensor piece_;
  Problem problem_;
  std::optional<AtomicFile> copy_;
  std::ifstream own_;
  uint64_t at_ = 0;
  int64_t count_ = 0;
};

}  // namespace

Replicas::Replicas(const SnapshotPlace& here) : here_(here) {
  for (int from = 0; from < here.size; ++from)
    for (const int to : here.keepers_of(from))
      if (here.rank == from || here.rank == to) edges_.push_back({from, to, Replica::memory()});
}

Problem Replicas::send(const std::vector<Shard>& shards, std::vector<std::filesystem::path>& written) const {
  std::deque<Replica> replicas;
  for (const auto& [from, to, memory] : edges_) {
    const Shard& shard = shards[static_cast<size_t>(from)];
    replicas.emplace_back(here_.folder.path() / shard.file, shard, here_.rank == from ? to : from, here_.rank == from,
                          memory);
  }
  for (;;) {
    std::vector<comm::BytesMessage> messages;
    std::vector<Replica*> under_way;
    for (Replica& each : replicas) {
      if (!each.has_more()) continue;
      messages.push_back(each.next());
      under_way.push_back(&each);
    }
    if (messages.empty()) break;
    comm::pass_together(messages, here_.collective);
    for (Replica* const each : under_way) each->passed();
  }
  Problem problem;
  for (Replica& each : replicas)
    if (Problem of_one = each.end(written); of_one && !problem) problem = std::move(of_one);
  return problem;
}

}  // namespace muster::checkpoint
