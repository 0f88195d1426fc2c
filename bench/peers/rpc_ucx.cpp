// UCX alone: the peer of bench_rpc that only sends bytes. See bench/rpc.cpp for the cases. No function is called, no
// argument is packed, and neither process sleeps: both poll, as UCX is meant to be used (and yield the core after a
// millisecond).
//
//   peer_rpc_ucx
//
// Two processes, tagged messages, whatever transports UCX chooses (UCX_TLS). The sizes below are those of the tensors.
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <ucp/api/ucp.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "measure.h"

namespace {

constexpr size_t kSizes[] = {4, size_t{1} << 20, size_t{16} << 20};
constexpr const char* kNames[] = {"echo_4B", "echo_1MB", "echo_16MB"};
constexpr int kCalls[] = {5000, 100, 20};
constexpr int kPipelined = 20'000, kWindow = 1000;

void check(ucs_status_t status) {
  if (status != UCS_OK) throw std::runtime_error(std::string("UCX: ") + ucs_status_string(status));
}

// Sends bytes to the other process and returns the bytes that it sends. Uses a socket, because UCX is not set up yet.
std::string exchange(int socket, std::string_view mine) {
  const auto gone = std::runtime_error("UCX: the other process is gone");
  const size_t bytes = mine.size();
  size_t others = 0;
  if (::send(socket, &bytes, sizeof bytes, MSG_NOSIGNAL) != sizeof bytes ||
      ::send(socket, mine.data(), bytes, MSG_NOSIGNAL) != static_cast<ssize_t>(bytes) ||
      ::recv(socket, &others, sizeof others, MSG_WAITALL) != sizeof others)
    throw gone;
  std::string other(others, '\0');
  if (::recv(socket, other.data(), others, MSG_WAITALL) != static_cast<ssize_t>(others)) throw gone;
  return other;
}

class Endpoint {
 public:
  explicit Endpoint(int socket) {
    ucp_params_t params{};
    params.field_mask = UCP_PARAM_FIELD_FEATURES;
    params.features = UCP_FEATURE_TAG;
    check(ucp_init(&params, nullptr, &context_));
    ucp_worker_params_t worker{};
    worker.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
    worker.thread_mode = UCS_THREAD_MODE_SINGLE;
    check(ucp_worker_create(context_, &worker, &worker_));
    ucp_address_t* mine = nullptr;
    size_t bytes = 0;
    check(ucp_worker_get_address(worker_, &mine, &bytes));
    const std::string other = exchange(socket, {reinterpret_cast<const char*>(mine), bytes});
    ucp_worker_release_address(worker_, mine);
    ucp_ep_params_t params_of{};
    params_of.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS;
    params_of.address = reinterpret_cast<const ucp_address_t*>(other.data());
    check(ucp_ep_create(worker_, &params_of, &peer_));
  }
  // Begins to send. wait() completes it.
  ucs_status_ptr_t send(const void* data, size_t bytes) {
    const ucp_request_param_t none{};
    return ucp_tag_send_nbx(peer_, data, bytes, 1, &none);
  }
  ucs_status_ptr_t receive(void* data, size_t bytes) {
    const ucp_request_param_t none{};
    return ucp_tag_recv_nbx(worker_, data, bytes, 1, ~ucp_tag_t{0}, &none);
  }
  void wait(ucs_status_ptr_t request) {
    if (request == nullptr) return;
    if (UCS_PTR_IS_ERR(request)) check(UCS_PTR_STATUS(request));
    ucs_status_t status;
    for (int idle = 0; (status = ucp_request_check_status(request)) == UCS_INPROGRESS;) {
      idle = ucp_worker_progress(worker_) != 0 ? 0 : idle + 1;
      if (idle > 20'000) ::sched_yield();  // the other process may be waiting for this core
    }
    ucp_request_free(request);
    check(status);
  }
  void drain() {
    const ucp_request_param_t none{};
    wait(ucp_worker_flush_nbx(worker_, &none));
  }

 private:
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  ucp_ep_h peer_ = nullptr;
};

void row(const char* name, const char* unit, double value) {
  std::printf("{\"bench\": \"rpc\", \"case\": \"%s\", \"impl\": \"ucx\", \"%s\": %.3f}\n", name, unit, value);
  std::fflush(stdout);
}

// As many as the other process does in serve(): a warm-up and the calls, five times.
void measure(Endpoint& ucx) {
  std::vector<char> data(kSizes[2], 'x'), back(kSizes[2]);
  int count = 0;
  for (size_t i = 0; i < std::size(kSizes); ++i) {
    const auto echo = [&] {
      std::memcpy(data.data(), &++count, sizeof count);
      ucx.wait(ucx.send(data.data(), kSizes[i]));
      ucx.wait(ucx.receive(back.data(), kSizes[i]));
      if (std::memcmp(back.data(), &count, sizeof count) != 0) throw std::runtime_error("UCX: not what was sent");
    };
    row(kNames[i], "us", 1e6 * bench::best_mean(kCalls[i], echo, [] {}));
  }
  // Windows of messages there, and as many back.
  std::vector<int> in(kWindow), out(kWindow, 7);
  std::vector<ucs_status_ptr_t> sent(kWindow), received(kWindow);
  const double seconds = bench::best_mean(
      kPipelined / kWindow,
      [&] {
        for (size_t i = 0; i < kWindow; ++i) received[i] = ucx.receive(&in[i], sizeof(int));
        for (size_t i = 0; i < kWindow; ++i) sent[i] = ucx.send(&out[i], sizeof(int));
        for (size_t i = 0; i < kWindow; ++i) ucx.wait(sent[i]), ucx.wait(received[i]);
      },
      [] {});
  row("pipelined", "per_s", kWindow / seconds);
}

void serve(Endpoint& ucx) {
  std::vector<char> data(kSizes[2]);
  for (size_t i = 0; i < std::size(kSizes); ++i)
    for (int call = 0; call < bench::kRepeats * (kCalls[i] + 1); ++call) {
      ucx.wait(ucx.receive(data.data(), kSizes[i]));
      ucx.wait(ucx.send(data.data(), kSizes[i]));
    }
  std::vector<int> in(kWindow);
  std::vector<ucs_status_ptr_t> received(kWindow), sent(kWindow);
  for (int window = 0; window < bench::kRepeats * (kPipelined / kWindow + 1); ++window) {
    for (size_t i = 0; i < kWindow; ++i) received[i] = ucx.receive(&in[i], sizeof(int));
    for (size_t i = 0; i < kWindow; ++i) {
      ucx.wait(received[i]);
      sent[i] = ucx.send(&in[i], sizeof(int));
    }
    for (size_t i = 0; i < kWindow; ++i) ucx.wait(sent[i]);
  }
  ucx.drain();
}

}  // namespace

int main() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) return 1;
  const pid_t server = ::fork();  // before UCX starts its threads
  try {
    Endpoint ucx(ends[server == 0 ? 0 : 1]);
    server == 0 ? serve(ucx) : measure(ucx);
    // Neither process exits before the other has received everything.
    exchange(ends[server == 0 ? 0 : 1], "done");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    if (server > 0) ::kill(server, SIGKILL);
    return 1;
  }
  if (server == 0) ::_exit(0);
  int status = 0;
  ::waitpid(server, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}
