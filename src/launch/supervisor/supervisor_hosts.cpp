// The Supervisor's work with the launchers of other hosts: the store where they meet, their plans, their ends.
#include <signal.h>

#include <algorithm>

#include "base/text.h"
#include "launch/ranks/error_file.h"
#include "launch/supervisor/supervisor.h"
#include "muster/base/error.h"
#include "muster/store/store.h"
#include "store/address/host_address.h"
#include "store/kit/outage.h"

namespace muster::launch {
namespace {

constexpr std::chrono::nanoseconds kConnectAtOnce = std::chrono::seconds(2);  // between two looks for signals

// Serves the store at all addresses of this host.
std::unique_ptr<StoreServer> serve_everywhere(const std::string& port, const std::optional<Secret>& secret) {
  try {
    return serve_store(text("tls://[::]:", port), secret);
  } catch (const Unavailable&) {  // a host without IPv6
    return serve_store(text("tls://0.0.0.0:", port), secret);
  }
}

}  // namespace

// "host:port" is a store over TLS, served by the launcher on that host. Returns false if the user ended the job
// meanwhile, or if nobody serves there (now_.hosts_error).
bool Supervisor::join_hosts() {
  const HostOptions& hosts = *options_.hosts;
  job_.store_address = hosts.rendezvous;
  if (hosts.rendezvous.find("://") == std::string::npos && !hosts.rendezvous.starts_with("unix:"))
    job_.store_address = "tls://" + hosts.rendezvous;
  const bool tls = job_.store_address.starts_with("tls://");
  std::optional<Secret> secret;
  if (!hosts.secret_file.empty()) secret = Secret::from_file(hosts.secret_file);
  if (!secret) secret = Secret::from_environment();
  if (tls && !secret)
    throw InvalidArgument("hosts that meet over a network need a secret that nobody else has",
                          "Make one with muster secret FILE, copy it to all hosts, and give --secret-file FILE");
  if (tls) job_.secret = secret->hex();
  std::string not_served_because;
  if (tls && (hosts.node == 0 || (hosts.node < 0 && store::is_own(job_.store_address)))) {
    try {
      hosts_server_ = serve_everywhere(job_.store_address.substr(job_.store_address.rfind(':') + 1), secret);
    } catch (const Unavailable& error) {
      if (hosts.node == 0) throw;
      not_served_because = error.message();  // another launcher of this host serves it, or none does
    }
  }
  std::shared_ptr<Store> store;
  for (const auto deadline = Deadline::after(hosts.timeout); !store;) {
    try {
      store = connect_store(job_.store_address, Deadline::after(std::min(kConnectAtOnce, deadline.left())), secret);
    } catch (const Error& error) {  // no server is there yet, or it waits for a busy host's processor
      const bool yet = error.code() == ErrorCode::kUnavailable || error.code() == ErrorCode::kTimeout;
      if (!yet) throw;
      if (deadline.passed()) {
        now_.hosts_error = not_served_because.empty()
                               ? std::current_exception()
                               : std::make_exception_ptr(Unavailable(
                                     text(error.message(), "; this launcher tried to serve it: ", not_served_because),
                                     error.advice()));
        return false;
      }
    }
    for (const int signal : signals_.take())
      if (signal == SIGINT || signal == SIGTERM || signal == SIGHUP || signal == SIGQUIT) stop_signal_ = signal;
    if (stop_signal_ != 0) return false;
  }
  store_comes_again_ = store::comes_again(*store);
  hosts_ = std::make_unique<Rendezvous>(
      hosts.job.empty() ? store : make_prefix_store(store, hosts.job),
      Agent{.host = hosts.address.empty() ? store::own_address(job_.store_address) : hosts.address,
            .ranks = options_.ranks,
            .wish = hosts.node,
            .master_port = job_.master_port,
            .max_restarts = options_.max_restarts,
            .identity = job_.id},
      RendezvousOptions{.least = hosts.least,
                        .most = hosts.most,
                        .last_call = hosts.last_call,
                        .ending = options_.grace,
                        .patience = hosts.patience,
                        .timeout = hosts.timeout});
  return true;
}

void Supervisor::say_silence(const std::string& why) {
  print(why.empty()
            ? "muster: the store answers again\n"
            : text("muster: the store does not answer; ranks continue as long as they do not need it: ", why, '\n'));
}

// Waits for the next plan, and takes from it what this launcher has to run. Returns false if there is none, because the
// user has ended the job, the job has ended without this host, or the hosts do not meet (now_.hosts_error).
bool Supervisor::meet() {
  meeting_ = true;
  for (;;) {
    while (auto event = hosts_->next_event()) {
      if (auto* error = std::get_if<std::exception_ptr>(&*event)) {
        try {
          std::rethrow_exception(*error);
        } catch (const InvalidArgument&) {
          throw;
        } catch (const std::exception&) {
          now_.hosts_error = *error;
          return false;
        }
      }
      if (const auto* silence = std::get_if<StoreSilence>(&*event)) say_silence(silence->why);
      if (const auto* stop = std::get_if<StopRequest>(&*event)) {  // on another host, while we were between two epochs
        handle_stop(stop->signal);
        return false;
      }
      if (const auto* end = std::get_if<EpochEnd>(&*event)) {  // the job has ended without us
        now_.end = *end;
        job_.node = -1;
        meeting_ = false;
        if (!done_)
          print(text("muster: the job has ended without this host",
                     store_comes_again_ ? text(". A new job needs another --job-id or another prefix in ",
                                               job_.store_address, ", or the removal of the key '", options_.hosts->job,
                                               options_.hosts->job.empty() ? "" : "/", "ended' there")
                                        : "",
                     '\n'));
        return false;
      }
      const auto* plan = std::get_if<Plan>(&*event);
      if (!plan) continue;
      done_ = false;
      job_.restarts = plan->restarts();
      max_restarts_ = plan->max_restarts();
      const Agent& first = plan->agents.front();
      if (kept_ && plan->line() != line_) give_up_kept();
      epoch_ = plan->epoch;
      line_ = plan->line();
      job_.first_rank = plan->first_rank();
      job_.world_size = plan->world_size();
      job_.node = plan->node;
      job_.nodes = static_cast<int>(plan->agents.size());
      job_.master_address = first.host;
      job_.master_port = first.master_port;
      const std::string& job = options_.hosts->job;
      job_.store_prefix = text(job, job.empty() ? "" : "/", "ranks/", line_);
      job_.run = first.identity;
      meeting_ = false;
      return true;
    }
    flush_outputs();  // of ranks that were kept
    wait_for_events();
    handle_events();
    handle_deadlines();
    if (stop_signal_ != 0) return false;
  }
}

void Supervisor::handle_hosts() {
  while (!now_.end && !now_.hosts_error) {
    auto event = hosts_->next_event();
    if (!event) return;
    if (const auto* silence = std::get_if<StoreSilence>(&*event)) say_silence(silence->why);
    if (const auto* stop = std::get_if<StopRequest>(&*event)) handle_stop(stop->signal);
    if (const auto* end = std::get_if<EpochEnd>(&*event)) now_.end = *end;
    if (const auto* error = std::get_if<std::exception_ptr>(&*event)) now_.hosts_error = *error;
    const bool over = now_.hosts_error || (now_.end && now_.end->kind != EpochEnd::Kind::kDone);
    if (over && !now_.terminated && !now_.finished && stop_signal_ == 0 && !keep()) terminate();
  }
}

// The user ends the job, here or on another host.
void Supervisor::handle_stop(int signal) {
  const bool first = stop_signal_ == 0;
  stop_signal_ = signal;
  if (!first || meeting_) return;
  give_stop();
  ranks_->signal_groups(signal);
  if (!now_.terminated && !now_.finished) now_.kill_at = Deadline::after(options_.stop_grace);
}

// Tells the other hosts, once, how the attempt ended here. They then end their parts of it too.
void Supervisor::tell_hosts() {
  if (!hosts_ || now_.told || now_.end) return;
  Outcome how = cause();
  if (now_.exec_error) {
    how.status = kNotStarted;
    how.cause = text("'", path_, "' cannot be started\n");
  }
  if (how.status == 0 && now_.finished) {
    hosts_->done();
  } else if (how.status != 0) {
    hosts_->end({.kind = stop_signal_ != 0 ? EpochEnd::Kind::kStopped : EpochEnd::Kind::kFailed,
                 .node = job_.node,
                 .status = how.status,
                 .cause = how.cause,
                 .rank = rank_that_failed(how),
                 .last = stop_signal_ != 0 || now_.exec_error});
  } else {
    return;
  }
  now_.told = true;
}

// Whether this attempt is over on all hosts, and its output is written.
bool Supervisor::over() const {
  return now_.finished && (!hosts_ || now_.end || now_.hosts_error || now_.exec_error) &&
         std::all_of(sinks_.begin(), sinks_.end(), [](const auto& sink) { return sink->empty(); });
}

}  // namespace muster::launch
