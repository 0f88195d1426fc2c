// How the agents of a job meet: one agent per host (`muster run`), through a store, epoch by epoch.
//
// An epoch is one membership: which agents, in which order, with how many ranks each. It ends when all ranks are done,
// when a rank failed, when an agent is lost, or when another agent wants to join; then the remaining agents meet in the
// next epoch. Keys, under "agents/<epoch>/":
//
//   seats, seat/<s>   An agent that joins adds 1 to `seats`; the result is its seat. It writes its Agent to seat/<s>,
//                     and erases that again if it leaves before there is a plan.
//   beat/<s>          Grows every kBeat while the agent of that seat lives, and faster while it waits for a plan. Only
//                     an agent whose beat was seen to grow gets a place.
//   plan              The agents of the epoch, in order. Written once, by the first agent that finds that agents that
//                     beat have taken `most` seats, or at least `least` and no further one for `last_call`, or until
//                     `timeout`. An agent that comes later, or is not in the plan, ends the epoch if there is room for
//                     it. Otherwise it waits for the epoch's end.
//   stop              The signal by which the user ends the job, which all agents forward. Between two epochs it
//                     belongs to the next one, which then needs no plan: every agent that comes to meet reads it.
//   seen              How many agents have read the last end, or that stop. The agent that serves the store waits for
//                     them before it ends.
//   gone              How many agents' ranks have ended since.
//   done, done/<n>    The ranks of node <n> have all succeeded. The last agent to write its key finds all others' keys,
//                     and writes the end.
//   end               Written once, by the first agent that knows: how the epoch ended, and whether it was the last.
//
// Each agent watches the beats of the next one, in a ring. A beat that stands still for `patience` means that its agent
// is lost, unless that agent's ranks are done; then the agent after it is watched instead. An agent that waits for a
// place watches all: when all beats stand still, the epoch has been abandoned.
//
// In a store that outlives its users (etcd), an epoch's keys are erased when the next plan exists, and so are those of
// the ranks. Only `plan` and `end` stay, so that agents that come late find the current epoch. The last agent whose
// ranks have ended erases all keys of the job but one, "ended", which holds the last end: an agent that comes now comes
// too late. If that agent dies before, the keys stay.
//
// Order: agents keep the node numbers that they had. The others fill the gaps: first those that had a number that does
// not exist any more, then new ones. With wishes (--node-rank), the wishes decide; if two agents have one wish and only
// one of them beats, the other is a launcher that died, and gets no place. Agents that were in the epoch before get
// places before new ones. The plan carries the number of restarts, so that all agents count alike.
//
// Lines: ranks may stay while agents meet (elastic_words.h). A line is a sequence of epochs through which at least one
// rank always stayed; the first epoch names it. All ranks of a line use one part of the store. An agent announces the
// line of the ranks that stayed with it. The plan takes the newest line, and an agent whose ranks are of another line
// starts new ranks.
//
// If an epoch ended to make room, and its ranks had just succeeded everywhere, it was the job's last epoch: instead of
// a plan, the next epoch gets an end of kind kDone, which tells the agents that came that the job is over.
//
// After a rank's failure, a plan is made as soon as all agents of the epoch before are there. After an agent was lost
// or another one came, more than those may come.
//
// A store that does not answer. If a process of the job serves the store (TLS, a Unix socket), the store has gone when
// that process ends, or when it has not answered a call for kStillFor; the rendezvous then ends with that error. A
// store that others run (etcd) may come back with its data. Running ranks do not need it, so an epoch continues without
// it as long as the supervisor has nothing to report. When agents meet, or when there is something to report, the
// rendezvous ends after kNeeded of silence; if the user wants to stop, after kStopTakes. Both are multiples of
// `patience`. The time in which the store did not answer counts against no agent.
//
// All this happens on a separate thread, because stores block. The supervisor polls events_fd().
//
// Thread-safety: of one Rendezvous, none (one thread calls it); many of them may share a store.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "base/fd.h"
#include "muster/base/deadline.h"
#include "muster/base/error.h"
#include "muster/store/store.h"

namespace muster::launch {

inline constexpr std::chrono::milliseconds kBeat{500};
inline constexpr std::chrono::milliseconds kStillFor{10'000};  // or twice the patience, if that is more
inline constexpr int kNeeded = 12, kStopTakes = 2;             // times the patience

struct Agent {
  std::string host;      // at which the others reach it
  int ranks = 1;         // number of ranks that it starts
  int wish = -1;         // the node number that its user asked for; -1: none
  int was = -1;          // its node number in the epoch before; -1: none
  int master_port = 0;   // a free port there, for scripts that bring their own TCPStore
  int restarts = 0;      // of the job after failures, as far as it knows
  int max_restarts = 0;  // as its user said
  int line = -1;         // of its ranks that stayed; -1: none did
  bool done = false;     // its ranks had all ended well when the epoch before ended
  int64_t seat = 0;      // in this epoch
  std::string identity;  // fresh for each agent
};

struct Plan {
  int epoch = 0;
  std::vector<Agent> agents;  // by node number
  int node = 0;               // this agent

  int first_rank() const;  // of this agent's
  int world_size() const;
  int restarts() const;      // the largest number that an agent knows
  int max_restarts() const;  // the smallest number that a user allows
  int line() const;          // this epoch, if no rank stayed
};

struct EpochEnd {
  enum class Kind { kDone, kFailed, kLost, kRoom, kStopped };  // kRoom: another agent wants to join
  Kind kind = Kind::kDone;
  int node = -1;      // whose
  int status = 0;     // of the job, if this was its last epoch
  std::string cause;  // for people; empty for kDone
  std::string rank;   // rank_that_failed() (error_file.h); empty if none did
  bool last = false;  // whether the job ends with this epoch
};

// The user ends the job by a signal to one of the launchers. All launchers forward it to their ranks.
struct StopRequest {
  int signal = 0;
};

// The store does not answer, and the ranks go on without it; or it answers again (`why` is empty).
struct StoreSilence {
  std::string why;
};

struct RendezvousOptions {
  int least = 1, most = 1;                    // agents
  std::chrono::milliseconds last_call{1000};  // how long to wait for more agents than `least`
  std::chrono::milliseconds ending{0};        // how much longer after an epoch: until the others have ended their ranks
  std::chrono::milliseconds patience{5000};   // an agent without a heartbeat for this long is lost
  std::chrono::milliseconds timeout{300000};  // to meet
};

class Rendezvous {
 public:
  // Starts to join the first epoch that takes it. The destructor waits a moment for the others to read the last end.
  Rendezvous(std::shared_ptr<Store> store, Agent self, const RendezvousOptions& options);
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;
  ~Rendezvous();

  // A plan, the user's wish to stop, the end of that epoch, or why there is no plan: TimeoutError (which agents came),
  // InvalidArgument (two agents with one wish), Unavailable (the store is gone). In that order.
  using Event = std::variant<Plan, StopRequest, EpochEnd, std::exception_ptr, StoreSilence>;
  int events_fd() const { return events_fd_.get(); }  // readable when next_event() has one
  std::optional<Event> next_event();

  // Of the epoch of the last plan. The end comes as an event to all of its agents, this one included; if there was one
  // already, that.
  void end(EpochEnd end);
  void done();  // all ranks here have succeeded
  // Sends an event to all agents. Between two epochs, leave() must follow, not meet_again(). Before this agent's first
  // epoch, no other agent is told.
  void stop(int signal);
  // Meets in the next epoch, after an end. `done`: all ranks here had succeeded by then. If that is true for all
  // agents, the next event is the end of the job.
  void meet_again(int restarts, int master_port, int line = -1, bool done = false);
  void leave();  // starts to leave; the destructor waits for it

 private:
  struct Words {  // of the supervisor
    std::optional<EpochEnd> end;
    bool done = false;
    int stop = 0;
  };

  struct Pulse {                      // what this agent has seen of another agent's beat
    std::optional<std::string> last;  // its value at the last look
    int still = 0;                    // number of looks since it changed
    bool seen = false;                // it has changed at least once
    int rivalled = 0;                 // number of looks at which it had changed while another agent has the same wish
    int64_t outages = 0;              // outages_ at the last look
  };

  void work();
  void take_part();
  std::optional<Plan> join(int* epoch);
  std::optional<Plan> await_plan(int epoch, Deadline deadline);
  std::optional<int> stop_of(int epoch) const;
  bool hears_stop(int epoch);
  void tell_stop(int epoch);
  static bool settle_wishes(std::vector<Agent>& here, std::map<int64_t, Pulse>& pulses);
  void propose(int epoch, std::vector<Agent> agents);
  bool await_room(const Plan& plan);
  bool has_ended();
  void sweep_before(const Plan& plan);
  void sweep(const Plan& plan, const EpochEnd& end);
  void await_others(const Plan& plan);
  void beat(int epoch);
  bool beats(int epoch, int64_t seat, Pulse* pulse, std::chrono::milliseconds between = kBeat) const;
  std::optional<EpochEnd> run(const Plan& plan);
  std::optional<Plan> plan_of(int epoch, std::chrono::milliseconds wait) const;
  std::optional<EpochEnd> end_of(int epoch, std::chrono::milliseconds wait) const;
  void write_end(int epoch, const EpochEnd& end);
  void post(Event event);
  std::shared_ptr<Store> patient(std::shared_ptr<Store> store);
  bool bears_silence(const Error& error);
  void heard();
  bool all_done(const Plan& plan);
  bool stopping() const;
  bool ask_again();
  Words take_words();

  const RendezvousOptions options_;
  const std::shared_ptr<Store> bare_;   // repeats no call
  const std::shared_ptr<Store> store_;  // the same store; repeats a call as long as bears_silence()
  Agent self_;
  UniqueFd events_fd_;

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<Event> events_;
  std::optional<EpochEnd> to_write_;
  int to_stop_ = 0;  // the signal by which the user has ended the job, if we know of one
  bool done_ = false, again_ = false, stop_ = false, were_done_ = false;
  int restarts_ = 0, master_port_ = 0, line_ = -1;  // for the next epoch
  bool meeting_ = true;                             // no epoch runs
  std::optional<Clock::time_point> silent_since_;   // the store
  std::optional<Clock::time_point> wanted_since_;   // the supervisor has something to say
  std::optional<Clock::time_point> stopped_since_;  // the user wants to stop

  // Used only by thread_:
  size_t before_ = 0;                  // number of agents in this agent's last epoch
  int swept_ = 0;                      // number of epochs whose keys have been erased
  std::vector<std::string> expected_;  // the identities of the next epoch's agents; empty: not known
  Deadline next_beat_ = Deadline::after(std::chrono::milliseconds(0));
  int64_t outages_ = 0;  // how often the store has fallen silent

  std::thread thread_;
};

}  // namespace muster::launch
