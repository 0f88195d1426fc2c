// What tests of served stores share: servers in processes of their own, clients that keep to no protocol, and looks at
// what a process has open.
//
// Thread-safety: each belongs to one thread.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <openssl/err.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/fd.h"
#include "muster/base/error.h"
#include "muster/base/secret.h"
#include "muster/store/store.h"
#include "store/address/tcp_address.h"
#include "store/address/unix_address.h"
#include "store/served/protocol.h"
#include "store/served/tls.h"
#include "support/eventually.h"
#include "support/patience.h"

namespace muster::test {

// Runs `body` in a child process; its result is the exit status.
template <typename Body>
pid_t fork_child(Body body) {
  const pid_t child = ::fork();
  if (child != 0) return child;
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  int status = 99;
  try {
    status = body();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "child: %s\n", error.what());
  }
  ::_exit(status);
}

inline int exit_status(pid_t child) {
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

inline size_t open_fds() {
  const std::filesystem::directory_iterator fds("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(fds), end(fds)));
}

// A server in a process of its own.
class ServerProcess {
 public:
  explicit ServerProcess(const std::function<std::unique_ptr<StoreServer>()>& serve) {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) throw_errno("pipe2");
    UniqueFd read_end(ends[0]), write_end(ends[1]);
    pid_ = fork_child([&] {
      const auto server = serve();
      if (::write(write_end.get(), server->address().data(), server->address().size()) < 0) return 1;
      for (;;) ::pause();
      return 0;
    });
    write_end.reset();
    std::array<char, 128> buffer{};
    const ssize_t n = ::read(read_end.get(), buffer.data(), buffer.size());
    address_.assign(buffer.data(), static_cast<size_t>(std::max<ssize_t>(n, 0)));
  }
  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;
  ~ServerProcess() {
    if (pid_ > 0) kill_it();
  }

  void kill_it() {
    ::kill(pid_, SIGKILL);
    exit_status(pid_);
    pid_ = 0;
  }
  pid_t pid() const { return pid_; }
  const std::string& address() const { return address_; }

 private:
  pid_t pid_ = 0;
  std::string address_;
};

// One end of TLS without a socket: what it would send is taken from it, what it would receive is fed to it.
class TlsEnd {
 public:
  explicit TlsEnd(const Secret& secret, store::TlsContext::Side side = store::TlsContext::Side::kClient)
      : context_(std::make_unique<store::TlsContext>(secret, side)), tls_(context_->make_connection()) {
    ::SSL_set_bio(tls_.get(), ::BIO_new(::BIO_s_mem()), ::BIO_new(::BIO_s_mem()));
    side == store::TlsContext::Side::kClient ? ::SSL_set_connect_state(tls_.get()) : ::SSL_set_accept_state(tls_.get());
  }

  // Goes on with the handshake as far as it can. Whether it is done.
  bool shake_hands() {
    ::ERR_clear_error();
    return ::SSL_do_handshake(tls_.get()) == 1;
  }
  std::string to_send() {
    std::string bytes(::BIO_ctrl_pending(::SSL_get_wbio(tls_.get())), '\0');
    if (!bytes.empty()) ::BIO_read(::SSL_get_wbio(tls_.get()), bytes.data(), static_cast<int>(bytes.size()));
    return bytes;
  }
  void feed(std::string_view bytes) {
    ::BIO_write(::SSL_get_rbio(tls_.get()), bytes.data(), static_cast<int>(bytes.size()));
  }
  void write(std::string_view bytes) {
    ::ERR_clear_error();
    for (int n; !bytes.empty(); bytes.remove_prefix(static_cast<size_t>(n)))
      if ((n = ::SSL_write(tls_.get(), bytes.data(), static_cast<int>(bytes.size()))) <= 0) return;
  }
  // Whether there was anything for the application.
  bool read_any() {
    ::ERR_clear_error();
    char byte = 0;
    return ::SSL_read(tls_.get(), &byte, 1) > 0;
  }
  SSL* get() { return tls_.get(); }

 private:
  std::unique_ptr<store::TlsContext> context_;
  store::TlsPtr tls_;
};

// A connection that need not keep to the protocol; over TLS if it has the secret and the address says so.
class RawClient {
 public:
  explicit RawClient(const std::string& address, const std::optional<Secret>& secret = {}) {
    if (!address.starts_with(store::kTlsScheme)) {
      fd_ = UniqueFd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
      const auto where = store::UnixAddress::parse(address);
      if (::connect(fd_.get(), where.get(), where.size()) != 0) throw_errno("connect");
      return;
    }
    const auto where = store::TcpAddress::parse(address.substr(store::kTlsScheme.size()), address);
    const auto found = store::resolve(where, test::patience());
    int error = 0;
    fd_ = store::dial_tcp(found.addresses.at(0), test::patience(), &error);
    if (!fd_) throw_errno(error, "connect");
    ::fcntl(fd_.get(), F_SETFL, ::fcntl(fd_.get(), F_GETFL) & ~O_NONBLOCK);
    if (!secret) return;
    tls_.emplace(*secret);
    while (!tls_->shake_hands()) {
      send_bytes(tls_->to_send());
      if (!receive()) throw Unavailable("the server closed the connection in the handshake");
    }
    send_bytes(tls_->to_send());
  }

  void send(std::string_view bytes) {
    if (!tls_) return send_bytes(bytes);
    tls_->write(bytes);
    send_bytes(tls_->to_send());
  }
  // Past TLS.
  void send_bytes(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t n = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (n <= 0) return;  // the server has had enough
      bytes.remove_prefix(static_cast<size_t>(n));
    }
  }
  void send_frame(std::string_view body) {
    const auto size = static_cast<uint32_t>(body.size());
    send(std::string(reinterpret_cast<const char*>(&size), sizeof size) + std::string(body));
  }
  // Whether the server closes the connection without having said anything; over TLS, anything of the store's.
  bool is_closed() {
    if (!tls_) return read_some().empty();
    while (receive())
      if (tls_->read_any()) return false;
    return true;
  }
  // What it says until it closes the connection.
  std::string read_all() {
    std::string all;
    for (std::string some; !(some = read_some()).empty();) all += some;
    return all;
  }
  // What it says next; nothing where it closes the connection, or is silent for too long, which fails the test.
  std::string read_some() {
    pollfd one{fd_.get(), POLLIN, 0};
    EXPECT_GT(::poll(&one, 1, 20'000), 0) << "the server neither answers nor closes the connection";
    std::string bytes(16 * 1024, '\0');
    const ssize_t n = ::recv(fd_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    bytes.resize(static_cast<size_t>(std::max<ssize_t>(n, 0)));
    return bytes;
  }
  void no_more() { ::shutdown(fd_.get(), SHUT_WR); }
  TlsEnd& tls() { return *tls_; }

 private:
  bool receive() {
    const std::string bytes = read_some();
    tls_->feed(bytes);
    return !bytes.empty();
  }

  UniqueFd fd_;
  std::optional<TlsEnd> tls_;
};

inline std::string endless_get(const std::string& key) {
  store::Request request;
  request.op = store::Op::kGet;
  request.keys = {key};
  request.wait_ms = store::kForever;
  return encode(request);
}

}  // namespace muster::test
