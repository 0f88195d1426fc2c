// What ranks of one host say to each other while a group comes together (exchange.h).
//
//   invitation  what rank 0 leaves in the store: boot id, name of its socket, nonce
//   acceptance  a rank to rank 0: nonce, rank, size; with its descriptors
//   answer      rank 0 to a rank: a kind, and what belongs to it
//
// Every parse() takes bytes of any origin and throws CorruptError unless they are such a message; what it returns is
// within the bounds said here. Thread-safety: values.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/byte_stream.h"

namespace muster::shm {

struct Invitation {
  std::string boot, name, nonce;

  std::string bytes() const {
    return WireWriter().put(std::string_view(boot)).put(std::string_view(name)).put(std::string_view(nonce)).take();
  }
  static Invitation parse(std::string_view bytes) {
    WireReader in(bytes);
    Invitation invitation;
    for (std::string* const part : {&invitation.boot, &invitation.name, &invitation.nonce}) *part = in.get_string();
    in.expect_done();
    return invitation;
  }
};

struct Acceptance {
  std::string nonce;
  int32_t rank = 0, size = 0;  // as its sender sees them: not checked

  std::string bytes() const { return WireWriter().put(std::string_view(nonce)).put(rank).put(size).take(); }
  static Acceptance parse(std::string_view bytes) {
    WireReader in(bytes);
    Acceptance acceptance;
    acceptance.nonce = in.get_string();
    acceptance.rank = in.get<int32_t>();
    acceptance.size = in.get<int32_t>();
    in.expect_done();
    return acceptance;
  }
};

inline constexpr uint32_t kMaxFdsEach = 16;

struct Answer {
  enum class Kind : uint8_t { kWelcome, kTimeout, kMismatch, kLost, kGaveUp };
  struct Rank {
    int32_t pid = 0;
    uint32_t fds = 0;  // at most kMaxFdsEach
  };

  Kind kind = Kind::kWelcome;
  std::vector<Rank> ranks;       // kWelcome: all of the group; their descriptors follow, in order
  std::vector<int32_t> missing;  // kTimeout: who did not come
  std::string why;               // kMismatch, kGaveUp
  int32_t lost = 0, pid = 0;     // kLost: who died

  std::string bytes() const {
    WireWriter out;
    out.put(kind);
    switch (kind) {
      case Kind::kWelcome:
        for (const Rank& rank : ranks) out.put(rank.pid).put(rank.fds);
        break;
      case Kind::kTimeout:
        for (const int32_t rank : missing) out.put(rank);
        break;
      case Kind::kMismatch:
      case Kind::kGaveUp:
        out.put(std::string_view(why));
        break;
      case Kind::kLost:
        out.put(lost).put(pid);
    }
    return out.take();
  }
  // `size`: number of ranks in the group. A kWelcome must have that many ranks; a missing or lost rank must be one of
  // them. CorruptError if not.
  static Answer parse(std::string_view bytes, int size) {
    WireReader in(bytes);
    Answer answer;
    answer.kind = in.get<Kind>();
    const auto rank_of_group = [&] {
      const auto rank = in.get<int32_t>();
      if (rank < 0 || rank >= size) throw CorruptError("rank 0 names a rank that is not in the group");
      return rank;
    };
    switch (answer.kind) {
      case Kind::kWelcome:
        for (int rank = 0; rank < size; ++rank) {
          answer.ranks.push_back({in.get<int32_t>(), in.get<uint32_t>()});
          if (answer.ranks.back().fds > kMaxFdsEach)
            throw CorruptError("rank 0 says that a rank has more descriptors than it may");
        }
        break;
      case Kind::kTimeout:
        while (!in.done()) answer.missing.push_back(rank_of_group());
        break;
      case Kind::kMismatch:
      case Kind::kGaveUp:
        answer.why = in.get_string();
        break;
      case Kind::kLost:
        answer.lost = rank_of_group();
        answer.pid = in.get<int32_t>();
        break;
      default:
        throw CorruptError("rank 0 sent an answer of an unknown kind while the group came together",
                           "Run the same version of Muster on all ranks");
    }
    in.expect_done();
    return answer;
  }
};

}  // namespace muster::shm
