#include "shm/exchange.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <numeric>
#include <optional>

#include "base/random.h"
#include "base/text.h"
#include "base/wire.h"
#include "muster/base/error.h"

namespace muster::shm {
namespace {

constexpr size_t kMaxMessage = 64 << 10;
constexpr size_t kFdsPerMessage = 128;  // the kernel's SCM_MAX_FD is 253
constexpr int kMaxFdsEach = 16;

enum class Reply : uint8_t { kWelcome, kTimeout, kMismatch };

sockaddr_un abstract_address(const std::string& name, socklen_t* length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  // sun_path[0] stays 0: the abstract namespace (unix(7)).
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  *length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

// SOCK_SEQPACKET: messages arrive whole, in order, with their descriptors.
UniqueFd make_socket() {
  UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) throw_errno("making a Unix socket");
  return fd;
}

bool wait_for(int fd, short events, Deadline deadline) {
  pollfd item{fd, events, 0};
  for (;;) {
    const int ready = ::poll(&item, 1, deadline.poll_ms());
    if (ready > 0) return true;
    if (ready == 0 && deadline.passed()) return false;
    if (ready < 0 && errno != EINTR) throw_errno("poll");
  }
}

ucred credentials(int fd) {
  ucred peer{};
  socklen_t length = sizeof peer;
  if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) throw_errno("SO_PEERCRED");
  return peer;
}

// False: the peer is gone.
bool send_message(int socket, std::string_view bytes, const std::vector<int>& fds, Deadline deadline) {
  iovec data{const_cast<char*>(bytes.data()), bytes.size()};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  std::vector<char> control(CMSG_SPACE(fds.size() * sizeof(int)));
  if (!fds.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
    std::memcpy(CMSG_DATA(header), fds.data(), fds.size() * sizeof(int));
  }
  for (;;) {
    if (::sendmsg(socket, &message, MSG_NOSIGNAL) >= 0) return true;
    if (errno == EINTR) continue;
    if (errno == EPIPE || errno == ECONNRESET) return false;
    if (errno == ETOOMANYREFS && !deadline.passed()) {  // too many descriptors in flight in this user's sockets
      ::poll(nullptr, 0, 1);
      continue;
    }
    if (errno != EAGAIN) throw_errno("sending descriptors to a rank");
    if (!wait_for(socket, POLLOUT, deadline)) return false;
  }
}

struct Message {
  std::string bytes;
  std::vector<UniqueFd> fds;
};

// nullopt: the peer is gone. The socket must be readable.
std::optional<Message> receive_message(int socket) {
  Message result;
  result.bytes.resize(kMaxMessage);
  iovec data{result.bytes.data(), result.bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(kFdsPerMessage * sizeof(int))];
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t got;
  do got = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  while (got < 0 && errno == EINTR);
  // Before the control data, which the kernel writes only on success.
  if (got < 0 && (errno == ECONNRESET || errno == EPIPE)) return std::nullopt;
  if (got < 0) throw_errno("receiving descriptors from a rank", "Raise the limit on open files (ulimit -n)");
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof fd);
      result.fds.emplace_back(fd);
    }
  }
  if (got == 0) return std::nullopt;
  if (message.msg_flags & (MSG_CTRUNC | MSG_TRUNC))
    throw Unavailable("a rank's descriptors did not fit", "Raise the limit on open files (ulimit -n)");
  result.bytes.resize(static_cast<size_t>(got));
  return result;
}

UniqueFd duplicate(int fd) {
  UniqueFd copy(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!copy) throw_errno("duplicating a descriptor", "Raise the limit on open files (ulimit -n)");
  return copy;
}

class Hub {
 public:
  Hub(const NoticeBoard& board, const std::string& prefix, int size, const std::vector<int>& fds, Deadline deadline)
      : size_(size),
        deadline_(deadline),
        nonce_(random_hex(16)),
        listener_(make_socket()),
        participants_(size),
        sockets_(size) {
    const std::string name = "muster-" + random_hex(16);
    socklen_t length;
    const auto address = abstract_address(name, &length);
    if (::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0)
      throw_errno("binding a Unix socket");
    if (::listen(listener_.get(), std::min(size, 1024)) != 0) throw_errno("listening on a Unix socket");
    participants_[0].pid = ::getpid();
    for (const int fd : fds) participants_[0].fds.push_back(duplicate(fd));
    board.post(prefix + "/hub", WireWriter().put(boot_id()).put(name).put(nonce_).bytes());
  }

  std::vector<Participant> run() {
    while (std::any_of(sockets_.begin() + 1, sockets_.end(), [](const auto& socket) { return !socket; })) {
      if (!wait_for(listener_.get(), POLLIN, deadline_)) give_up();
      admit();
    }
    welcome();
    return std::move(participants_);
  }

 private:
  // Takes one connection; one that is not a rank of ours is dropped.
  void admit() {
    UniqueFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) {
      if (errno == EAGAIN || errno == ECONNABORTED || errno == EINTR) return;  // it went away again
      throw_errno("accepting a rank's connection", "Raise the limit on open files (ulimit -n)");
    }
    const ucred peer = credentials(socket.get());
    if (peer.uid != ::geteuid()) return;
    // A peer of ours writes right after it connects; a silent stranger of the same user costs at most this.
    if (!wait_for(socket.get(), POLLIN, std::min(deadline_, Deadline::after(std::chrono::seconds(2)), &Hub::earlier)))
      return;
    auto message = receive_message(socket.get());
    if (!message) return;
    int32_t rank = 0, size = 0;
    try {
      WireReader reader(message->bytes);
      if (reader.get_string() != nonce_) return;
      rank = reader.get<int32_t>();
      size = reader.get<int32_t>();
    } catch (const Corrupt&) {
      return;
    }
    if (size != size_ || rank < 1 || rank >= size_ || sockets_[rank]) {
      const std::string why =
          size != size_ ? text("rank ", rank, " believes in a group of ", size, " ranks, rank 0 in one of ", size_)
                        : text("two processes claim rank ", rank, " of ", size_);
      const auto reply = WireWriter().put(Reply::kMismatch).put(why).take();
      for (const auto& other : sockets_)
        if (other) send_message(other.get(), reply, {}, deadline_);
      send_message(socket.get(), reply, {}, deadline_);
      throw Mismatch(why, "Start every rank with the same world size and its own rank");
    }
    participants_[rank].pid = peer.pid;
    participants_[rank].fds = std::move(message->fds);
    sockets_[rank] = std::move(socket);
  }

  void welcome() {
    WireWriter table;
    std::vector<int> fds;
    table.put(Reply::kWelcome);
    for (const auto& participant : participants_) {
      table.put(static_cast<int32_t>(participant.pid)).put(static_cast<uint32_t>(participant.fds.size()));
      for (const auto& fd : participant.fds) fds.push_back(fd.get());
    }
    for (int rank = 1; rank < size_; ++rank) {
      // A rank that died meanwhile is found by the watch.
      if (!send_message(sockets_[rank].get(), table.bytes(), {}, deadline_)) continue;
      for (size_t i = 0; i < fds.size(); i += kFdsPerMessage) {
        const size_t end = std::min(fds.size(), i + kFdsPerMessage);
        if (!send_message(sockets_[rank].get(), "f", {fds.begin() + i, fds.begin() + end}, deadline_)) break;
      }
    }
  }

  [[noreturn]] void give_up() {
    std::vector<int> missing;
    WireWriter reply;
    for (int rank = 1; rank < size_; ++rank)
      if (!sockets_[rank]) missing.push_back(rank);
    reply.put(Reply::kTimeout).put(static_cast<uint32_t>(missing.size()));
    for (const int rank : missing) reply.put(static_cast<int32_t>(rank));
    for (const auto& socket : sockets_)
      if (socket) send_message(socket.get(), reply.bytes(), {}, Deadline::after(std::chrono::milliseconds(100)));
    throw Timeout(text("the group did not come together: rank(s) ", join(missing), " of ", size_, " did not come"),
                  missing, "Look whether they started, and at their standard error");
  }

  static bool earlier(const Deadline& a, const Deadline& b) { return a.when() < b.when(); }

  const int size_;
  const Deadline deadline_;
  const std::string nonce_;
  UniqueFd listener_;
  std::vector<Participant> participants_;
  std::vector<UniqueFd> sockets_;
};

// A rank waits a little longer than the hub, whose answer knows who is missing.
Deadline with_slack(Deadline deadline) {
  return deadline.is_never() ? deadline : Deadline::after(deadline.left() + std::chrono::milliseconds(500));
}

UniqueFd connect_to_hub(const std::string& name, Deadline deadline) {
  socklen_t length;
  const auto address = abstract_address(name, &length);
  UniqueFd socket = make_socket();
  while (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    if (errno == EAGAIN && !deadline.passed()) {  // the hub's backlog is full
      ::poll(nullptr, 0, 1);
      continue;
    }
    if (errno != EINTR)
      throw_errno("reaching rank 0 over shared memory's Unix socket",
                  "Ranks must be on one host and in one network namespace; look whether rank 0 still runs");
  }
  if (credentials(socket.get()).uid != ::geteuid())
    throw Unauthorized("rank 0's socket belongs to another user", "Run all ranks as one user");
  return socket;
}

Message next_message(int socket, Deadline deadline) {
  if (!wait_for(socket, POLLIN, deadline))
    throw Timeout("rank 0 did not answer while the group came together", {0}, "Look at rank 0's standard error");
  auto message = receive_message(socket);
  if (!message)
    throw PeerLost(0, 0, "rank 0 went away while the group came together", "Look at rank 0's standard error");
  return std::move(*message);
}

std::vector<Participant> join_hub(const NoticeBoard& board, const std::string& prefix, int rank, int size,
                                  const std::vector<int>& fds, Deadline deadline) {
  std::string invitation;
  try {
    invitation = board.read(prefix + "/hub", deadline);
  } catch (const Timeout&) {
    throw Timeout("the group did not come together: rank 0 did not come", {0}, "Look whether it started");
  }
  WireReader reader(invitation);
  const std::string boot(reader.get_string()), name(reader.get_string()), nonce(reader.get_string());
  if (boot != boot_id())
    throw Unavailable(
        text("rank ", rank, " and rank 0 are on different hosts, and shared memory joins only ranks of one host"),
        "Use another backend between hosts");
  deadline = with_slack(deadline);
  const UniqueFd socket = connect_to_hub(name, deadline);
  const auto hello = WireWriter().put(nonce).put(static_cast<int32_t>(rank)).put(static_cast<int32_t>(size)).take();
  if (!send_message(socket.get(), hello, fds, deadline))
    throw PeerLost(0, 0, "rank 0 went away while the group came together");

  Message table = next_message(socket.get(), deadline);
  WireReader answer(table.bytes);
  switch (answer.get<Reply>()) {
    case Reply::kWelcome:
      break;
    case Reply::kMismatch:
      throw Mismatch(std::string(answer.get_string()), "Start every rank with the same world size and its own rank");
    case Reply::kTimeout: {
      std::vector<int> missing(std::min<uint32_t>(answer.get<uint32_t>(), 1u << 16));
      for (int& peer : missing) peer = answer.get<int32_t>();
      throw Timeout(text("the group did not come together: rank(s) ", join(missing), " of ", size, " did not come"),
                    missing, "Look whether they started, and at their standard error");
    }
  }
  std::vector<Participant> participants(static_cast<size_t>(size));
  std::vector<uint32_t> counts;
  for (auto& participant : participants) {
    participant.pid = answer.get<int32_t>();
    counts.push_back(answer.get<uint32_t>());
    if (counts.back() > kMaxFdsEach) throw Corrupt("rank 0 sent a table that makes no sense");
  }
  // The pids are the hub's. In another pid namespace they would name strangers.
  if (participants[static_cast<size_t>(rank)].pid != ::getpid())
    throw Unavailable("the ranks are in different pid namespaces, so they cannot watch each other",
                      "Run them in one container");
  std::vector<UniqueFd> all;
  const size_t total = std::accumulate(counts.begin(), counts.end(), size_t{0});
  while (all.size() < total) {
    Message more = next_message(socket.get(), deadline);
    if (more.fds.empty()) throw Corrupt("rank 0 sent fewer descriptors than it said");
    std::move(more.fds.begin(), more.fds.end(), std::back_inserter(all));
  }
  size_t next = 0;
  for (int r = 0; r < size; ++r)
    for (uint32_t i = 0; i < counts[r]; ++i) participants[r].fds.push_back(std::move(all[next++]));
  return participants;
}

}  // namespace

std::string boot_id() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id;
}

std::vector<Participant> exchange(const NoticeBoard& board, const std::string& prefix, int rank, int size,
                                  const std::vector<int>& fds, Deadline deadline) {
  if (size < 1 || rank < 0 || rank >= size) throw InvalidArgument(text("rank ", rank, " is outside a group of ", size));
  if (fds.size() > kMaxFdsEach) throw InvalidArgument("too many descriptors for one rank");
  if (size == 1) {
    std::vector<Participant> alone(1);
    alone[0].pid = ::getpid();
    for (const int fd : fds) alone[0].fds.push_back(duplicate(fd));
    return alone;
  }
  if (rank == 0) return Hub(board, prefix, size, fds, deadline).run();
  return join_hub(board, prefix, rank, size, fds, deadline);
}

}  // namespace muster::shm
