// The transports between hosts, alone, between two processes over loopback: TCP plain, TCP under TLS, and UCX over the
// transports that UCX_TLS names (tcp unless it is set). Echoes 4 bytes, and sends large pieces. Prints one line of JSON
// per case: median microseconds of a round trip, or gigabytes per second one way and back.
//
//   bench_transport_tcp [seconds for each case ["tcp, plain" | "tcp, tls" | ucx]…]

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "muster/base/secret.h"
#include "muster/store/store.h"
#include "transport/tcp/tcp_transport.h"
#include "transport/ucx/fabric_library.h"
#include "transport/ucx/ucx_transport.h"

namespace {

using namespace muster;
using transport::Message;
using transport::Piece;

struct Echo final : transport::Receiver {
  void on_message(int peer, std::string_view body, std::vector<Piece>& pieces) override {
    if (answers) {
      while (!transport) transport = published.load();
      Message message;
      message.body = body;
      message.pieces = std::move(pieces);
      return transport->send(peer, std::move(message));
    }
    came.fetch_add(1);
    came.notify_one();
  }
  void on_lost(int, const std::string&) override { lost = true; }

  bool answers = false;
  transport::Transport* transport = nullptr;
  std::atomic<transport::Transport*> published{nullptr};
  std::atomic<uint32_t> came{0};
  std::atomic<bool> lost{false};
};

struct Impl {
  const char* name;
  bool tls = false, ucx = false;
};
constexpr Impl kImpls[] = {{"tcp, plain"}, {"tcp, tls", true}, {"ucx", false, true}};

Deadline soon() { return Deadline::after(std::chrono::seconds(30)); }

std::unique_ptr<transport::Transport> open(int rank, const Impl& impl, const std::shared_ptr<Store>& store,
                                           const std::optional<Secret>& secret, Echo& echo) {
  const transport::Directory directory{
      [&](const std::string& key, const std::string& value) { store->set(key, value); },
      [&](const std::string& key, Deadline deadline) { return store->get(key, deadline); }};
  std::unique_ptr<transport::Transport> made;
  if (impl.ucx) {
    transport::UcxOptions options;
    options.rank = rank;
    options.size = 2;
    if (!std::getenv("UCX_TLS")) options.settings = {{"TLS", "tcp"}};
    made = transport::make_ucx_transport(options, directory, echo, soon());
  } else {
    transport::TcpOptions options;
    options.rank = rank;
    options.size = 2;
    options.secret = secret;
    options.host = secret ? "127.0.0.1" : "";
    made = transport::make_tcp_transport(options, directory, echo, soon());
  }
  echo.published = made.get();
  return made;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<long>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

void measure(const char* impl, transport::Transport& transport, Echo& echo, size_t bytes, bool spins, double seconds) {
  std::vector<std::byte> data(bytes, std::byte{1});
  std::vector<double> micros;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  while (Clock::now() < end || micros.size() < 5) {
    const auto begin = Clock::now();
    const uint32_t before = echo.came;
    Message message;
    if (bytes <= 64) {
      message.body.assign(bytes, 'x');
    } else {
      Piece piece;
      piece.data = data.data();
      piece.bytes = bytes;
      message.pieces.push_back(piece);
    }
    transport.send(1, std::move(message));
    while (spins && echo.came == before)
      ;
    echo.came.wait(before);
    micros.push_back(std::chrono::duration<double, std::micro>(Clock::now() - begin).count());
  }
  const double us = median(micros);
  std::printf(
      R"({"bench": "transport", "case": "echo %zu B%s", "impl": "%s", "us": %.1f, "gbytes_per_s": %.3f, "times": %zu})"
      "\n",
      bytes, spins ? ", caller spins" : "", impl, us, 2e-3 * static_cast<double>(bytes) / us, micros.size());
}

int child(const Impl& impl, const std::string& address, const std::optional<Secret>& secret) {
  const auto store = connect_store(address, soon());
  Echo echo;
  echo.answers = true;
  const auto transport = open(1, impl, store, secret, echo);
  while (!echo.lost) ::usleep(10'000);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 1.0;
  ::setenv("UCX_TCP_TX_SEG_SIZE", "64k", 0);  // the default, 8 KB, halves UCX's speed (docs/transport.md)
  for (const Impl& impl : kImpls) {
    const auto is_meant = [&](const char* name) { return std::string_view(name) == impl.name; };
    if (argc > 2 && std::none_of(argv + 2, argv + argc, is_meant)) continue;
    std::optional<Secret> secret;
    if (impl.tls) secret = Secret::generate();
    std::string name = "@muster-bench-" + std::to_string(::getpid());
    const pid_t pid = ::fork();
    if (pid == 0)
      ::_exit(impl.ucx && !transport::ucx::unavailable_reason().empty() ? 0 : child(impl, "unix:" + name, secret));
    if (const std::string why = impl.ucx ? transport::ucx::unavailable_reason() : ""; !why.empty()) {
      std::fprintf(stderr, "no ucx: %s\n", why.c_str());
      ::waitpid(pid, nullptr, 0);
      continue;
    }
    {
      const auto server = serve_store(name);
      Echo echo;
      const auto transport = open(0, impl, server->local(), secret, echo);
      measure(impl.name, *transport, echo, 4, false, seconds);
      measure(impl.name, *transport, echo, 4, true, seconds);
      for (const size_t bytes : {size_t{65'536}, size_t{1} << 20, size_t{16} << 20, size_t{128} << 20})
        measure(impl.name, *transport, echo, bytes, false, seconds);
    }
    ::waitpid(pid, nullptr, 0);
  }
}
