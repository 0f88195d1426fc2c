// Processes of another user of this host can do nothing to a job. The store's test is in
// contract/store_contract_test.cpp; this file tests the meeting of the ranks, and their memory.
//
// Needs root, because only root can become another user.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <string>
#include <thread>

#include "base/byte_stream.h"
#include "base/fd.h"
#include "base/random.h"
#include "base/text.h"
#include "muster/base/error.h"
#include "muster/store/store.h"
#include "shm/exchange.h"
#include "shm/mapping.h"
#include "support/served.h"

namespace muster::test {
namespace {

constexpr uid_t kNobody = 65534;

Deadline soon() { return test::patience(); }

class AnotherUserProcess : public testing::Test {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  }
};

// An abstract socket's name.
struct Name {
  explicit Name(const std::string& name)
      : size(static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size())) {
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, name.data(), name.size());
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }
  sockaddr_un address{};
  socklen_t size;
};

bool readable(int fd) {
  pollfd one{fd, POLLIN, 0};
  return ::poll(&one, 1, 20'000) > 0;
}

// The other user's process knows what a rank knows: the name of the hub's socket and the nonce. Only the kernel can
// tell that it is not a rank.
TEST_F(AnotherUserProcess, IsNoRank) {
  const auto store = make_memory_store();
  std::thread hub([&] { EXPECT_EQ(shm::exchange(*store, "meeting", 0, 2, {}, soon()).size(), 2u); });
  const std::string invitation = store->get("meeting/hub", soon());
  WireReader reader(invitation);
  reader.get_string();
  const Name name{std::string(reader.get_string())};
  const std::string hello = WireWriter().put(reader.get_string()).put(int32_t{1}).put(int32_t{2}).take();
  const pid_t child = fork_child([&] {
    if (::seteuid(kNobody) != 0) return 2;
    const int socket = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (::connect(socket, name.get(), name.size) != 0) return 3;
    ::send(socket, hello.data(), hello.size(), MSG_NOSIGNAL);
    char answer[1024];
    if (!readable(socket)) return 4;
    return ::recv(socket, answer, sizeof answer, 0) > 0 ? 5 : 0;
  });
  EXPECT_EQ(exit_status(child), 0);
  EXPECT_EQ(shm::exchange(*store, "meeting", 1, 2, {}, soon()).size(), 2u);
  hub.join();
}

// The other user's process has taken the name of a hub's socket, so the ranks would send it their memory.
TEST_F(AnotherUserProcess, IsNoHub) {
  const std::string chosen = "muster-test-" + random_hex(8);
  const Name name(chosen);
  int ready[2];
  ASSERT_EQ(::pipe2(ready, O_CLOEXEC), 0);
  const UniqueFd reading(ready[0]), writing(ready[1]);
  const pid_t child = fork_child([&] {
    if (::seteuid(kNobody) != 0) return 2;
    const int socket = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (::bind(socket, name.get(), name.size) != 0 || ::listen(socket, 1) != 0) return 3;
    if (::write(writing.get(), "r", 1) != 1 || !readable(socket)) return 4;
    const int rank = ::accept(socket, nullptr, nullptr);
    char said[1024];
    return readable(rank) && ::recv(rank, said, sizeof said, 0) > 0 ? 5 : 0;
  });
  ASSERT_TRUE(readable(reading.get()));
  const auto store = make_memory_store();
  store->set("meeting/hub", WireWriter()
                                .put(std::string_view(shm::boot_id()))
                                .put(std::string_view(chosen))
                                .put(std::string_view("nonce"))
                                .take());
  EXPECT_THROW(shm::exchange(*store, "meeting", 1, 2, {}, soon()), Unauthorized);
  EXPECT_EQ(exit_status(child), 0);
}

// The segments have no names, but a process's descriptors can be found in /proc, and so can its environment, which
// holds the secret.
TEST_F(AnotherUserProcess, OpensNeitherMemoryNorEnvironment) {
  const UniqueFd fd = shm::create_memfd("test", 4096);
  const std::string process = text("/proc/", ::getpid());
  const std::string segment = text(process, "/fd/", fd.get()), environment = process + "/environ";
  const std::string memory = process + "/mem";
  const pid_t child = fork_child([&] {
    const auto opens = [](const std::string& path, int flags) {
      const UniqueFd opened(::open(path.c_str(), flags | O_CLOEXEC));
      return static_cast<bool>(opened);
    };
    if (!opens(segment, O_RDWR) || !opens(environment, O_RDONLY) || !opens(memory, O_RDONLY)) return 2;
    if (::seteuid(kNobody) != 0) return 3;
    if (opens(segment, O_RDWR) || opens(segment, O_RDONLY)) return 4;
    if (opens(environment, O_RDONLY)) return 5;
    return opens(memory, O_RDONLY) ? 6 : 0;
  });
  EXPECT_EQ(exit_status(child), 0);
}

}  // namespace
}  // namespace muster::test
