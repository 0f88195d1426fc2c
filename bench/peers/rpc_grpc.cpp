// gRPC: the peer of bench_rpc. See bench/rpc.cpp for the cases; the "tensor" is an array of bytes.
//
//   peer_rpc_grpc
//
// Two processes and a Unix-domain socket, gRPC's fastest connection between processes of one host. The service has one
// method, which takes bytes and returns them. It is written by hand with the classes that protoc's output would use, so
// that nothing has to be generated.
#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/client_unary_call.h>
#include <grpcpp/impl/rpc_method.h>
#include <grpcpp/impl/rpc_service_method.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/client_callback.h>
#include <grpcpp/support/method_handler.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "measure.h"

namespace {

using grpc::ByteBuffer;
using grpc::internal::RpcMethod;
constexpr const char* kMethod = "/muster.bench.Echo/Echo";

class EchoService final : public grpc::Service {
 public:
  EchoService() {
    AddMethod(new grpc::internal::RpcServiceMethod(
        kMethod, RpcMethod::NORMAL_RPC,
        new grpc::internal::RpcMethodHandler<EchoService, ByteBuffer, ByteBuffer>(
            [](EchoService*, grpc::ServerContext*, const ByteBuffer* in, ByteBuffer* out) {
              *out = *in;
              return grpc::Status::OK;
            },
            this)));
  }
};

[[noreturn]] void serve(const std::string& address) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  EchoService service;
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(-1);
  builder.AddListeningPort(address, grpc::InsecureServerCredentials());
  builder.RegisterService(&service);
  builder.BuildAndStart()->Wait();
  std::exit(0);
}

void check(const grpc::Status& status) {
  if (!status.ok()) throw std::runtime_error("gRPC: " + status.error_message());
}

class Client {
 public:
  explicit Client(const std::string& address) {
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(-1);
    channel_ = grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
    if (!channel_->WaitForConnected(std::chrono::system_clock::now() + std::chrono::seconds(20)))
      throw std::runtime_error("gRPC: the server did not start");
    method_ = std::make_unique<RpcMethod>(kMethod, RpcMethod::NORMAL_RPC, channel_);
  }
  // Sends the bytes from the caller's memory, and copies the reply back into it as one piece.
  void echo(std::vector<char>& bytes) {
    grpc::ClientContext context;
    const grpc::Slice slice(bytes.data(), bytes.size(), grpc::Slice::STATIC_SLICE);
    const ByteBuffer request(&slice, 1);
    ByteBuffer reply;
    check(
        grpc::internal::BlockingUnaryCall<ByteBuffer, ByteBuffer>(channel_.get(), *method_, &context, request, &reply));
    std::vector<grpc::Slice> parts;
    check(reply.Dump(&parts));
    if (reply.Length() != bytes.size()) throw std::runtime_error("gRPC: the reply has another size than the request");
    char* to = bytes.data();
    for (const auto& part : parts) to = std::copy(part.begin(), part.end(), to);
  }
  // Makes `calls` small calls, with at most `most` of them under way.
  void pipelined(int calls, int most) {
    struct Call {
      grpc::ClientContext context;
      ByteBuffer reply;
    };
    const grpc::Slice four("four");
    const ByteBuffer request(&four, 1);
    std::mutex mutex;
    std::condition_variable changed;
    int under_way = 0, failed = 0;
    for (int i = 0; i < calls; ++i) {
      {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return under_way < most; });
        ++under_way;
      }
      auto* const call = new Call;
      grpc::internal::CallbackUnaryCall<ByteBuffer, ByteBuffer>(
          channel_.get(), *method_, &call->context, &request, &call->reply, [&, call](const grpc::Status& status) {
            const bool good = status.ok() && call->reply.Length() == 4;
            delete call;
            const std::lock_guard lock(mutex);
            failed += good ? 0 : 1;
            --under_way;
            changed.notify_one();
          });
    }
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return under_way == 0; });
    if (failed) throw std::runtime_error("gRPC: a call failed");
  }

 private:
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<RpcMethod> method_;
};

void row(const char* name, const char* unit, double value) {
  std::printf("{\"bench\": \"rpc\", \"case\": \"%s\", \"impl\": \"grpc\", \"%s\": %.3f}\n", name, unit, value);
  std::fflush(stdout);
}

void measure(const std::string& address) {
  Client client(address);
  std::vector<char> four(4, 'x');
  row("echo_4B", "us",
      1e6 * bench::best_mean(
                1000, [&] { client.echo(four); }, [] {}));
  std::vector<double> times;
  for (int i = 0; i < 50; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const auto start = std::chrono::steady_clock::now();
    client.echo(four);
    times.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  std::nth_element(times.begin(), times.begin() + 25, times.end());
  row("echo_4B_asleep", "us", 1e6 * times[25]);
  std::vector<char> large(1 << 20, 'x');
  row("echo_1MB", "us",
      1e6 * bench::best_mean(
                100, [&] { client.echo(large); }, [] {}));
  large.resize(16 << 20, 'x');
  row("echo_16MB", "us",
      1e6 * bench::best_mean(
                10, [&] { client.echo(large); }, [] {}));
  constexpr int kCalls = 5000;
  row("pipelined", "per_s",
      kCalls / bench::best_mean(
                   1, [&] { client.pipelined(kCalls, 1000); }, [] {}));
}

}  // namespace

int main() {
  const std::string path = "/tmp/peer_rpc_grpc." + std::to_string(::getpid()), address = "unix:" + path;
  const pid_t server = ::fork();  // before gRPC starts its threads
  if (server == 0) serve(address);
  int status = 0;
  try {
    measure(address);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    status = 1;
  }
  ::kill(server, SIGKILL);
  ::waitpid(server, nullptr, 0);
  ::unlink(path.c_str());
  return status;
}
