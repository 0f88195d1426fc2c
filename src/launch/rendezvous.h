// How the agents of a job meet: one agent a host (`muster run`), through a store, epoch by epoch.
//
// An epoch is one membership: which agents, in which order, with how many ranks each. It ends when all ranks are done,
// when a rank failed, when an agent is lost, or when one more wants to come in; then those who are left meet in the
// next one. Keys, under "agents/<epoch>/":
//
//   seats, seat/<s>   An agent that joins adds 1 to `seats`, which gives its seat, and writes there what it brings; it
//                     erases that again if it goes before there is a plan.
//   beat/<s>          Grows every kBeat while the agent of that seat lives, and faster while it waits for a plan. Only
//                     an agent whose beat has been seen to grow gets a place.
//   plan              Who is in the epoch, in order. Written once, by whoever first finds that `most` seats are taken
//                     by agents that beat, or at least `least` and none more for `last_call`. An agent that comes
//                     later, or is not in it, ends the epoch if there is room for it, and else waits for its end.
//   stop              The signal by which the user ends the job, for all to forward. Between two epochs it is the next
//                     one's, which then needs no plan: whoever comes to meet reads it.
//   seen              How many agents have read the last end, or that stop; whoever serves the store stays for them.
//   gone              How many agents' ranks have ended since.
//   done, done/<n>    That an agent's ranks, those of node <n>, have all ended well; the last of them, who finds all
//                     others', writes the end.
//   end               Written once, by the first who knows: how the epoch ended, and whether it was the last. Each
//                     agent watches the next one's beats, in a ring: standing still for `patience` means that it is
//                     lost, unless its ranks are done: then the one after it is watched instead. One that waits for
//                     a place watches all: when all stand still, the epoch has been abandoned.
//
// In a store that outlives its users (etcd), an epoch's keys are erased when the next plan stands, all but `plan` and
// `end`, by which those that come late find their way; so are those of the ranks. The last agent whose ranks have ended
// erases all of the job's keys but one, "ended", which holds the last end: whoever comes now comes too late. If that
// agent dies before, they stay.
//
// Order: agents keep the node numbers that they had; the others fill the holes, first those that had a number which
// there is no more, then new ones. With wishes (--node-rank) those decide; of two with one wish, one that beats and one
// that does not any more, the second is a launcher that died, and gets no place. Agents that were there before get one
// before new ones. How often the job has started again goes along in the plan, so that all count alike.
//
// Lines: ranks may stay while agents meet (elastic_words.h). A line is the epochs through which some rank always
// stayed, named by the first of them; all ranks of a line use one part of the store. An agent says which line those
// that stayed with it are of; the newest is the plan's, and an agent whose ranks are of another starts new ones.
//
// An epoch that ended to make room, when its ranks had just ended well everywhere, was the job's last: instead of a
// plan, the next one gets an end of kind kDone, and who came is told that the job is over.
//
// After a rank's failure, a plan is made as soon as all are there who were in the epoch before. After an agent was lost
// or another has come, there may be more than those.
//
// A store that is silent. One that a process of the job serves (TLS, a Unix socket) has gone with that process, or when
// it has not answered a call for kStillFor; the rendezvous then ends with that error. One that others keep (etcd) may
// come again, with what was in it. Ranks that run need none, so an epoch goes on without it for as long as the
// supervisor has nothing to say. When agents meet, or once there is something to say, kNeeded of silence is the end,
// and kStopTakes of it where the user wants to stop; those are multiples of `patience`. Nobody is missed for a time in
// which the store itself was silent.
//
// All that happens on a thread of its own, since stores block; the supervisor polls events_fd().
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
inline constexpr std::chrono::milliseconds kStillFor{10'000};  // or twice the patience, where that is more
inline constexpr int kNeeded = 12, kStopTakes = 2;             // times the patience

struct Agent {
  std::string host;      // by which the others reach it
  int ranks = 1;         // that it starts
  int wish = -1;         // the node number that its user gave it
  int was = -1;          // its node number in the epoch before
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
  int restarts() const;      // the most that an agent knows of
  int max_restarts() const;  // the least that a user allows
  int line() const;          // this epoch, where no rank stayed
};

struct EpochEnd {
  enum class Kind { kDone, kFailed, kLost, kRoom, kStopped };  // kRoom: one more wants to come in
  Kind kind = Kind::kDone;
  int node = -1;      // whose
  int status = 0;     // of the job, if this was its last epoch
  std::string cause;  // for people; empty where kDone
  bool last = false;  // whether the job ends with it
};

// The user ends the job, by a signal to one of the launchers: all forward it to their ranks.
struct StopRequest {
  int signal = 0;
};

// The store does not answer, and ranks go on without it; or it does again (`why` is empty).
struct StoreSilence {
  std::string why;
};

struct RendezvousOptions {
  int least = 1, most = 1;                    // agents
  std::chrono::milliseconds last_call{1000};  // with `least` there, how long to wait for more
  std::chrono::milliseconds patience{5000};   // with an agent that gives no sign of life
  std::chrono::milliseconds timeout{300000};  // to meet
};

class Rendezvous {
 public:
  // Joins the first epoch that takes it, at once. Destruction waits for the others to read the last end, for a moment.
  Rendezvous(std::shared_ptr<Store> store, Agent self, const RendezvousOptions& options);
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;
  ~Rendezvous();

  // A plan, a wish to stop, the end of that epoch, or why there is no more: Timeout (who has come, of how many),
  // InvalidArgument (two agents with one wish), Unavailable (the store is gone). In that order.
  using Event = std::variant<Plan, StopRequest, EpochEnd, std::exception_ptr, StoreSilence>;
  int events_fd() const { return events_fd_.get(); }  // readable when next_event() has one
  std::optional<Event> next_event();

  // Of the epoch of the last plan. The end comes as an event to all of its agents, this one included; if there was one
  // already, that.
  void end(EpochEnd end);
  void done();  // all ranks here ended well
  // An event for all agents. Also between two epochs: then leave() has to follow, and not meet_again(). Before this
  // agent's first epoch, nobody is told.
  void stop(int signal);
  // In the next epoch, after an end. `done`: all ranks here had ended well by then. Where that goes for all, the next
  // event is the end of the job.
  void meet_again(int restarts, int master_port, int line = -1, bool done = false);
  void leave();  // begins what destruction waits for

 private:
  struct Words {  // of the supervisor
    std::optional<EpochEnd> end;
    bool done = false;
    int stop = 0;
  };

  struct Pulse {  // another agent's beats, as they were last, and for how many looks
    std::optional<std::string> last;
    int still = 0;
    bool seen = false;    // to change, ever
    int rivalled = 0;     // looks at which it had changed, since another agent has the same wish
    int64_t outages = 0;  // of the store, at that look
  };

  void work();
  void take_part();
  std::optional<Plan> join(int* epoch);
  std::optional<Plan> await_plan(int epoch, Deadline deadline);
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
  const std::shared_ptr<Store> bare_;   // tries nothing again
  const std::shared_ptr<Store> store_;  // the same, for as long as its silence can be borne
  Agent self_;
  UniqueFd events_fd_;

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<Event> events_;
  std::optional<EpochEnd> to_write_;
  int to_stop_ = 0;  // the signal by which the user has ended the job, as far as it is known
  bool done_ = false, again_ = false, stop_ = false, were_done_ = false;
  int restarts_ = 0, master_port_ = 0, line_ = -1;  // for the next epoch
  bool meeting_ = true;                             // no epoch runs
  std::optional<Clock::time_point> silent_since_;   // the store
  std::optional<Clock::time_point> wanted_since_;   // the supervisor has something to say
  std::optional<Clock::time_point> stopped_since_;  // the user wants to stop

  size_t before_ = 0;                  // agents in the last epoch of this one. Of the thread alone
  int swept_ = 0;                      // epochs whose keys have been erased. Of the thread alone
  std::vector<std::string> expected_;  // in the next epoch, by identity; empty: not known. Of the thread alone
  Deadline next_beat_ = Deadline::after(std::chrono::milliseconds(0));  // of the thread alone
  int64_t outages_ = 0;                                                 // of the thread alone

  std::thread thread_;
};

}  // namespace muster::launch
