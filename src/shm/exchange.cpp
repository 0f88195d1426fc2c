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
#include <optional>

#include "base/pidfd.h"
#include "base/random.h"
#include "base/text.h"
#include "muster/base/error.h"
#include "shm/exchange_messages.h"

namespace muster::shm {
namespace {

constexpr size_t kMaxMessage = 64 << 10;
constexpr size_t kFdsPerMessage = 128;  // the kernel's SCM_MAX_FD is 253

constexpr std::chrono::milliseconds kLook{200};  // between looks at the board during a wait

sockaddr_un abstract_address(const std::string& name, socklen_t* length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (name.empty() || name.size() >= sizeof address.sun_path)  // it may come from the store
    throw CorruptError(text("a name of ", name.size(), " bytes for a Unix socket"),
                       "Run the same version of Muster on all ranks");
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

// A rank whose process id is known, held by a pidfd. The launcher reaps no rank before the end, so a rank that has
// died meanwhile can still be opened. A rank that cannot be opened (another pid namespace) is not watched.
struct Peer {
  pid_t pid = 0;
  UniqueFd pidfd;

  Peer() = default;
  explicit Peer(pid_t id) : pid(id) {
    if (pid > 0 && pid != ::getpid()) pidfd = open_pidfd(pid);
  }
  bool dead() const { return await_end(pidfd, Deadline::after(std::chrono::milliseconds(0))); }
};

Peer peer_of(const KnownRanks& known, int rank) {
  const auto at = static_cast<size_t>(rank);
  return at < known.pids.size() ? Peer(known.pids[at]) : Peer();
}

PeerLost lost(const KnownRanks& known, int rank, pid_t pid) {
  return PeerLost(known.called(rank), pid,
                  text("rank ", known.called(rank), " (pid ", pid, ") died while the group came together"),
                  "Look at its standard error");
}

// Throws for the first rank that has died, among those whose process ids are known.
void throw_if_one_died(const KnownRanks& known) {
  for (int rank = 0; static_cast<size_t>(rank) < known.pids.size(); ++rank)
    if (const auto peer = peer_of(known, rank); peer.dead()) throw lost(known, rank, peer.pid);
}

TimeoutError not_come(const KnownRanks& known, std::vector<int> missing, int size) {
  for (int& rank : missing) rank = known.called(rank);
  return TimeoutError(text("the group did not come together: rank(s) ", join(missing), " of ",
                           known.shown.empty() ? std::to_string(size) : join(known.shown), " did not come"),
                      missing, "Check whether they started, and look at their standard error");
}

Deadline earlier(Deadline a, Deadline b) { return b.when() < a.when() ? b : a; }

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
  bool is_cut = false;  // it had more bytes or descriptors
};
[[noreturn]] void throw_cut() {
  throw Unavailable("a rank's descriptors did not fit", "Raise the limit on open files (ulimit -n)");
}

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
  result.is_cut = (message.msg_flags & (MSG_CTRUNC | MSG_TRUNC)) != 0;
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
  Hub(const NoticeBoard& board, const std::string& prefix, int size, const std::vector<int>& fds, Deadline deadline,
      const KnownRanks& known)
      : board_(board),
        known_(known),
        key_(prefix + "/hub"),
        size_(size),
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
    for (int rank = 0; rank < size; ++rank) peers_.push_back(peer_of(known, rank));
    board_.post(key_, Invitation{boot_id(), name, nonce_}.bytes());
  }

  std::vector<Participant> run() {
    while (std::any_of(sockets_.begin() + 1, sockets_.end(), [](const auto& socket) { return !socket; })) {
      await_one();
      admit();
    }
    welcome();
    try {
      if (board_.remove) board_.remove(key_);
    } catch (const std::exception&) {  // the key that stays does no harm
    }
    return std::move(participants_);
  }

 private:
  // Returns when a process connects. Throws if a rank died without having connected: it will never come.
  void await_one() {
    for (auto look = Deadline::after(kLook);;) {
      std::vector<pollfd> items{{listener_.get(), POLLIN, 0}};
      for (int rank = 1; rank < size_; ++rank)
        if (!sockets_[rank] && peers_[rank].pidfd) items.push_back({peers_[rank].pidfd.get(), POLLIN, 0});
      const int ready = ::poll(items.data(), items.size(), earlier(deadline_, look).poll_ms());
      if (ready < 0 && errno != EINTR) throw_errno("poll");
      if (ready > 0 && items[0].revents != 0) return;
      for (int rank = 1; rank < size_ && ready > 0; ++rank) {
        if (sockets_[rank] || !peers_[rank].dead()) continue;
        if (wait_for(listener_.get(), POLLIN, Deadline::after(std::chrono::milliseconds(0)))) return;  // its last deed
        tell({.kind = Answer::Kind::kLost, .lost = rank, .pid = peers_[rank].pid});
        throw lost(known_, rank, peers_[rank].pid);
      }
      if (deadline_.passed()) give_up();
      if (!look.passed()) continue;
      look = Deadline::after(kLook);
      if (board_.look) look_at_board();
    }
  }

  // An error of the look ends this rank's wait, and the waits of the others, which are told.
  void look_at_board() {
    try {
      board_.look(key_);
    } catch (const Error& error) {
      tell({.kind = Answer::Kind::kGaveUp, .why = error.message()});
      throw;
    }
  }

  // To all who have come.
  void tell(const Answer& answer) const {
    for (const auto& socket : sockets_)
      if (socket) send_message(socket.get(), answer.bytes(), {}, Deadline::after(std::chrono::milliseconds(100)));
  }

  // Takes one connection, and drops it if it is not from a rank of this group.
  void admit() {
    UniqueFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) {
      if (errno == EAGAIN || errno == ECONNABORTED || errno == EINTR) return;  // it went away again
      throw_errno("accepting a rank's connection", "Raise the limit on open files (ulimit -n)");
    }
    const ucred peer = credentials(socket.get());
    if (peer.uid != ::geteuid()) return;
    // A rank of the group writes right after it connects, unless it is stopped there. A silent stranger of the same
    // user costs at most this time.
    const bool is_member = std::find(known_.pids.begin(), known_.pids.end(), peer.pid) != known_.pids.end();
    const auto patience = is_member ? deadline_ : earlier(deadline_, Deadline::after(std::chrono::seconds(2)));
    if (!wait_for(socket.get(), POLLIN, patience)) return;
    auto message = receive_message(socket.get());
    if (!message) return;
    Acceptance acceptance;
    try {
      acceptance = Acceptance::parse(message->bytes);
    } catch (const CorruptError&) {
      return;
    }
    if (acceptance.nonce != nonce_) return;
    if (message->is_cut) throw_cut();
    const int rank = acceptance.rank, size = acceptance.size;
    if (size != size_ || rank < 1 || rank >= size_ || sockets_[rank]) {
      const std::string why = size != size_ ? text("rank ", known_.called(rank), " expects a group of ", size,
                                                   " ranks, and rank ", known_.called(0), " one of ", size_)
                                            : text("two processes claim rank ", known_.called(rank), " of ", size_);
      const auto reply = Answer{.kind = Answer::Kind::kMismatch, .why = why}.bytes();
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
    Answer table{.kind = Answer::Kind::kWelcome};
    std::vector<int> fds;
    for (const auto& participant : participants_) {
      table.ranks.push_back({participant.pid, static_cast<uint32_t>(participant.fds.size())});
      for (const auto& fd : participant.fds) fds.push_back(fd.get());
    }
    for (int rank = 1; rank < size_; ++rank) {
      // A rank that died meanwhile is skipped here; the watch finds it later.
      if (!send_message(sockets_[rank].get(), table.bytes(), {}, deadline_)) continue;
      for (size_t i = 0; i < fds.size(); i += kFdsPerMessage) {
        const size_t end = std::min(fds.size(), i + kFdsPerMessage);
        if (!send_message(sockets_[rank].get(), "f", {fds.begin() + i, fds.begin() + end}, deadline_)) break;
      }
    }
  }

  [[noreturn]] void give_up() {
    std::vector<int> missing;
    for (int rank = 1; rank < size_; ++rank)
      if (!sockets_[rank]) missing.push_back(rank);
    tell({.kind = Answer::Kind::kTimeout, .missing = missing});
    throw not_come(known_, std::move(missing), size_);
  }

  const NoticeBoard& board_;
  const KnownRanks& known_;
  const std::string key_;
  const int size_;
  const Deadline deadline_;
  const std::string nonce_;
  UniqueFd listener_;
  std::vector<Participant> participants_;
  std::vector<UniqueFd> sockets_;
  std::vector<Peer> peers_;
};

// A rank waits a little longer than the hub, because the hub's answer names the missing ranks.
constexpr std::chrono::seconds kLongerThanTheHub(2);

// The hub has left, perhaps because it saw that another rank had died, before it could tell this rank.
[[noreturn]] void throw_hub_left(const KnownRanks& known) {
  throw_if_one_died(known);
  throw PeerLost(known.called(0), 0, text("rank ", known.called(0), " went away while the group came together"),
                 "Look at its standard error");
}

UniqueFd connect_to_hub(const std::string& name, Deadline deadline, const KnownRanks& known) {
  socklen_t length;
  const auto address = abstract_address(name, &length);
  UniqueFd socket = make_socket();
  while (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    if (errno == EAGAIN && !deadline.passed()) {  // the hub's backlog is full
      ::poll(nullptr, 0, 1);
      continue;
    }
    const int error = errno;
    if (error == ECONNREFUSED) throw_if_one_died(known);  // it has left already
    errno = error;
    if (errno != EINTR)
      throw_errno(text("cannot reach rank ", known.called(0), " over shared memory's Unix socket"),
                  text("Ranks must be on one host and in one network namespace. Check whether rank ", known.called(0),
                       " still runs"));
  }
  if (credentials(socket.get()).uid != ::geteuid())
    throw Unauthorized(text("the socket of rank ", known.called(0), " belongs to another user"),
                       "Run all ranks as one user");
  return socket;
}

// If the hub itself dies, its socket becomes readable and has no message.
Message next_message(int socket, Deadline deadline, const KnownRanks& known, const std::function<void()>& look) {
  while (!wait_for(socket, POLLIN, earlier(deadline, Deadline::after(kLook))) && !deadline.passed()) look();
  if (!wait_for(socket, POLLIN, Deadline::after(std::chrono::milliseconds(0))))
    throw TimeoutError(text("rank ", known.called(0), " did not answer while the group came together"),
                       {known.called(0)}, "Look at its standard error");
  auto message = receive_message(socket);
  if (!message) throw_hub_left(known);
  if (message->is_cut) throw_cut();
  return std::move(*message);
}

std::string await_invitation(const NoticeBoard& board, const std::string& key, Deadline deadline,
                             const KnownRanks& known) {
  const Peer hub = peer_of(known, 0);
  for (;;) {
    const bool dead = hub.dead();  // before the read: the hub may have written the invitation and died
    try {
      return board.read(
          key, hub.pidfd ? earlier(deadline, Deadline::after(dead ? std::chrono::milliseconds(0) : kLook)) : deadline);
    } catch (const TimeoutError&) {
      if (dead) throw lost(known, 0, hub.pid);
      if (deadline.passed())
        throw TimeoutError(text("the group did not come together: rank ", known.called(0), " did not come"),
                           {known.called(0)}, "Check whether it started");
    }
  }
}

std::vector<Participant> join_hub(const NoticeBoard& board, const std::string& prefix, int rank, int size,
                                  const std::vector<int>& fds, Deadline deadline, const KnownRanks& known) {
  const std::string key = prefix + "/hub";
  const auto look = [&] {
    if (board.look) board.look(key);
  };
  const auto invitation = Invitation::parse(await_invitation(board, key, deadline, known));
  if (invitation.boot != boot_id())
    throw Unavailable(text("rank ", known.called(rank), " and rank ", known.called(0),
                           " are on different hosts, and shared memory joins only ranks of one host"),
                      "Use another backend between hosts");
  deadline = deadline.later(kLongerThanTheHub);
  const UniqueFd socket = connect_to_hub(invitation.name, deadline, known);
  const Acceptance acceptance{invitation.nonce, rank, size};
  if (!send_message(socket.get(), acceptance.bytes(), fds, deadline)) throw_hub_left(known);

  const auto answer = Answer::parse(next_message(socket.get(), deadline, known, look).bytes, size);
  switch (answer.kind) {
    case Answer::Kind::kWelcome:
      break;
    case Answer::Kind::kMismatch:
      throw Mismatch(answer.why, "Start every rank with the same world size and its own rank");
    case Answer::Kind::kGaveUp:
      throw Aborted(text("rank ", known.called(0), " gave up while the group came together: ", answer.why));
    case Answer::Kind::kLost:
      throw lost(known, answer.lost, answer.pid);
    case Answer::Kind::kTimeout:
      throw not_come(known, answer.missing, size);
  }
  std::vector<Participant> participants(static_cast<size_t>(size));
  size_t total = 0;
  for (size_t r = 0; r < participants.size(); ++r) {
    participants[r].pid = answer.ranks[r].pid;
    total += answer.ranks[r].fds;
  }
  // The pids are those of the hub's pid namespace. In another one they would name other processes.
  if (participants[static_cast<size_t>(rank)].pid != ::getpid())
    throw Unavailable("the ranks are in different pid namespaces, so they cannot watch each other",
                      "Run them in one container");
  std::vector<UniqueFd> all;
  while (all.size() < total) {
    Message more = next_message(socket.get(), deadline, known, look);
    if (more.fds.empty())
      throw CorruptError(text("rank ", known.called(0), " sent fewer descriptors than it announced"));
    std::move(more.fds.begin(), more.fds.end(), std::back_inserter(all));
  }
  size_t next = 0;
  for (int r = 0; r < size; ++r)
    for (uint32_t i = 0; i < answer.ranks[r].fds; ++i) participants[r].fds.push_back(std::move(all[next++]));
  return participants;
}

}  // namespace

std::string boot_id() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id;
}

std::vector<Participant> exchange(const NoticeBoard& board, const std::string& prefix, int rank, int size,
                                  const std::vector<int>& fds, Deadline deadline, const KnownRanks& known) {
  if (size < 1 || rank < 0 || rank >= size)
    throw InvalidArgument(text("rank: expected 0 to ", size - 1, " in a group of ", size, ", got ", rank));
  if (fds.size() > kMaxFdsEach) throw InvalidArgument("too many descriptors for one rank");
  if (size == 1) {
    std::vector<Participant> alone(1);
    alone[0].pid = ::getpid();
    for (const int fd : fds) alone[0].fds.push_back(duplicate(fd));
    return alone;
  }
  if (rank == 0) return Hub(board, prefix, size, fds, deadline, known).run();
  return join_hub(board, prefix, rank, size, fds, deadline, known);
}

}  // namespace muster::shm
