#include "launch/ranks/environment.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>

#include "base/cores.h"
#include "base/fd.h"
#include "base/random.h"
#include "base/text.h"
#include "launch/kit/elastic_words.h"
#include "launch/output/output.h"
#include "muster/base/error.h"
#include "shm/black_box.h"
#include "store/address/host_address.h"

namespace muster::launch {
namespace {

// Binds `socket` to a free port at an IPv4 address of this host, without listening there. Returns
// the port; 29500, PyTorch's default, if there is none. Without IPv4 no program can use it, and
// Muster does not.
int hold_port(const std::string& where, UniqueFd& held) {
  UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int yes = 1;
  sockaddr_in address{};
  address.sin_family = AF_INET;
  socklen_t size = sizeof address;
  if (!socket || ::inet_pton(AF_INET, where.c_str(), &address.sin_addr) != 1 ||
      ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) != 0 ||
      ::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0)
    return 29500;
  held = std::move(socket);  // the port that it held until now is not the new one
  return ntohs(address.sin_port);
}

}  // namespace

void renew_master_port(Job& job) { job.master_port = hold_port("127.0.0.1", job.master_socket); }

int free_port(const std::string& where) {
  UniqueFd socket;
  return hold_port(where, socket);
}

std::string prefix_host(const LaunchOptions& options) {
  if (!options.hosts) return {};
  const std::string name = store::host_name();
  return name.substr(0, name.find('.'));
}

Job make_job(const LaunchOptions& options) {
  Job job;
  job.id = random_hex(16);
  job.run = job.id;
  job.store_address = job.launcher_address = "unix:@muster-" + job.id;
  job.ranks = job.world_size = options.ranks;
  renew_master_port(job);
  const char* terminal_type = std::getenv("TERM");
  job.terminal = ::isatty(STDERR_FILENO) && !(terminal_type && std::string(terminal_type) == "dumb");
  winsize size{};
  if (job.terminal && ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0)
    job.terminal_width = size.ws_col;
  if (options.output == RankOutput::kPrefixed)
    job.terminal_width -= static_cast<int>(prefix_of(prefix_host(options), 0, false).size());
  job.terminal_width = std::max(job.terminal_width, 1);
  return job;
}

Environment::Environment() {
  for (char** variable = environ; variable && *variable; ++variable) variables_.emplace_back(*variable);
}

std::vector<std::string>::iterator Environment::find(const std::string& name) {
  return std::find_if(variables_.begin(), variables_.end(), [&](const std::string& variable) {
    return variable.starts_with(name) && variable.size() > name.size() && variable[name.size()] == '=';
  });
}

void Environment::set(const std::string& name, const std::string& value) {
  const auto found = find(name);
  if (found != variables_.end()) {
    *found = text(name, '=', value);
  } else {
    variables_.push_back(text(name, '=', value));
  }
}

void Environment::unset(const std::string& name) {
  if (const auto found = find(name); found != variables_.end()) variables_.erase(found);
}

bool Environment::has(const std::string& name) const {
  return const_cast<Environment*>(this)->find(name) != variables_.end();
}

std::string Environment::get(const std::string& name) const {
  auto* self = const_cast<Environment*>(this);
  const auto found = self->find(name);
  return found == self->variables_.end() ? "" : found->substr(name.size() + 1);
}

char** Environment::block() {
  block_.clear();
  for (auto& variable : variables_) block_.push_back(variable.data());
  block_.push_back(nullptr);
  return block_.data();
}

Environment job_environment(const Job& job, const LaunchOptions& options) {
  Environment environment;
  const auto ranks = text(job.world_size);
  environment.set("MUSTER_STORE", job.store_address);
  environment.set(kLauncherVariable, job.launcher_address);
  if (!job.secret.empty()) environment.set("MUSTER_SECRET", job.secret);
  if (job.store_prefix.empty())
    environment.unset("MUSTER_STORE_PREFIX");  // of a job around this one
  else
    environment.set("MUSTER_STORE_PREFIX", job.store_prefix);
  environment.set("MUSTER_JOB_ID", job.id);
  // https://pytorch.org/docs/stable/elastic/run.html, "Environment Variables"
  environment.set("WORLD_SIZE", ranks);
  environment.set("LOCAL_WORLD_SIZE", text(job.ranks));
  environment.set("ROLE_WORLD_SIZE", ranks);
  environment.set("ROLE_NAME", "default");
  environment.set("GROUP_RANK", text(job.node));
  environment.set("GROUP_WORLD_SIZE", text(job.nodes));
  environment.set("NODE_RANK", text(job.node));
  environment.set("MASTER_ADDR", job.master_address);
  environment.set("MASTER_PORT", text(job.master_port));
  environment.set("TORCHELASTIC_RUN_ID", job.run);
  environment.set("TORCHELASTIC_RESTART_COUNT", text(job.restarts));
  environment.set("TORCHELASTIC_MAX_RESTARTS", text(options.max_restarts));
  environment.set("TORCHELASTIC_USE_AGENT_STORE", "False");  // rank 0 of a PyTorch script serves the TCPStore itself
  if (!environment.has("OMP_NUM_THREADS"))
    environment.set("OMP_NUM_THREADS", text(std::max(1, usable_cores() / job.ranks)));
  // A training step frees what the next one allocates again. As glibc comes, such memory may go back to the kernel at
  // every step, page by page: up to a third of the time of a small network (bench/results). mallopt(3).
  for (const auto& [name, bytes] : {std::pair("MALLOC_TRIM_THRESHOLD_", size_t{1} << 30),
                                    std::pair("MALLOC_MMAP_THRESHOLD_", size_t{32} << 20)})  // the largest it accepts
    if (!environment.has(name) && !environment.has("GLIBC_TUNABLES")) environment.set(name, text(bytes));
  for (const char* name : {"MUSTER_TERMINAL", kEpochVariable})  // of a job around this one
    environment.unset(name);
  for (const auto& [name, value] : options.env) environment.set(name, value);
  return environment;
}

void set_rank(Environment& environment, const Job& job, int local_rank, int black_box) {
  const int rank = job.first_rank + local_rank;
  environment.set("RANK", text(rank));
  environment.set("LOCAL_RANK", text(local_rank));
  environment.set("ROLE_RANK", text(rank));
  environment.set(shm::kBlackBoxVariable, text(black_box));
  if (!job.terminal) return;
  if (rank == 0) {
    environment.set("MUSTER_TERMINAL", "1");
    environment.set("COLUMNS", text(job.terminal_width));
  } else {
    environment.unset("MUSTER_TERMINAL");
  }
}

}  // namespace muster::launch
