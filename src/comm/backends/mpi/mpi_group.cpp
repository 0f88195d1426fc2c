// The groups of the engine: how one begins, says goodbye, and ends when nothing of it is under way any more.
#include <algorithm>

#include "base/text.h"
#include "comm/backends/mpi/engine.h"
#include "store/kit/stored_number.h"

namespace muster::comm::mpi_backend {
namespace {

constexpr int kGoodbye = 0, kAcknowledgement = 1;  // tags of the control communicator
constexpr size_t kMostAbandoned = 400;             // most words in a goodbye, so that MPI buffers it

}  // namespace

bool MpiGroup::all_gone() const {
  for (int r = 0; r < size; ++r)
    if (r != rank && !peers[static_cast<size_t>(r)].gone) return false;
  return true;
}

std::vector<int> MpiGroup::gone() const {
  std::vector<int> ranks;
  for (int r = 0; r < size; ++r) {
    const auto& peer = peers[static_cast<size_t>(r)];
    if (r != rank && peer.gone && (peer.received >= peer.sent_to_us || Clock::now() - peer.gone_at > kLateMessage))
      ranks.push_back(r);
  }
  return ranks;
}

std::shared_ptr<MpiGroup> Engine::join(const WireContext& site) {
  auto group = std::make_shared<MpiGroup>();
  group->rank = site.rank;
  group->size = site.size;
  group->spin = site.spin;
  group->timeout = site.timeout;
  group->peers.resize(static_cast<size_t>(site.size));

  // The members tell each other their ranks in MPI_COMM_WORLD. When all have done so, all are about to make the
  // communicators.
  int own = 0;
  {
    const Lock mine = lock();
    MPI_Comm_rank(MPI_COMM_WORLD, &own);
  }
  const char* job = std::getenv("PMIX_NAMESPACE");
  if (!job) job = std::getenv("SLURM_JOB_ID");
  std::vector<std::string> keys;
  keys.reserve(static_cast<size_t>(site.size));
  for (int r = 0; r < site.size; ++r) keys.push_back(text(site.prefix, "/mpi/", r));
  site.store->set(keys[static_cast<size_t>(site.rank)], text(own, ' ', job ? job : ""));
  site.store->wait(keys, site.deadline);
  group->keys = keys;
  std::vector<int> ranks;
  std::string first;
  for (const auto& key : keys) {
    const std::string said = site.store->get(key, site.deadline);
    const size_t end = said.find(' ');
    const auto rank = store::number_of(said.substr(0, end), 0, INT32_MAX);
    if (!rank || end == std::string::npos)
      site.unavailable(text("the ranks of group '", site.group_name, "' cannot be read from the store"),
                       "Look whether another program uses the same store");
    const std::string theirs = said.substr(end);
    if (first.empty()) first = theirs;
    if (theirs != first)
      site.unavailable(text("the ranks of group '", site.group_name, "' were started by more than one mpirun"),
                       "Start all ranks with one mpirun");
    ranks.push_back(static_cast<int>(*rank));
  }
  if (std::set<int>(ranks.begin(), ranks.end()).size() != ranks.size())
    site.unavailable(
        text("group '", site.group_name, "' has several ranks in one process, but MPI's ranks are processes"),
        "Use backend shm for ranks that are threads");

  Lock mine = lock();
  if (const char* const why = problem()) site.unavailable(why, {});
  // These calls wait for the other members, and two ranks may make the same two groups in another order.
  if (threads_may_call_) mine.unlock();
  const auto check = [&](int error) {
    if (error != MPI_SUCCESS)
      site.unavailable(text("MPI could not make a communicator for group '", site.group_name, "': ", describe(error)),
                       {});
  };
  MPI_Group all = MPI_GROUP_NULL, members = MPI_GROUP_NULL;
  check(MPI_Comm_group(MPI_COMM_WORLD, &all));
  check(MPI_Group_incl(all, site.size, ranks.data(), &members));
  const int tag = static_cast<int>(std::hash<std::string>{}(site.prefix) % kWireTags);  // tells concurrent calls apart
  check(MPI_Comm_create_group(MPI_COMM_WORLD, members, tag, &group->control));
  MPI_Group_free(&members);
  MPI_Group_free(&all);
  MPI_Comm_set_errhandler(group->control, MPI_ERRORS_RETURN);  // the copies inherit it
  for (auto& comm : group->comms) check(MPI_Comm_dup(group->control, &comm));
  if (threads_may_call_) mine = lock();
  groups_.push_back(group);
  thread_wakes_.notify_one();
  return group;
}

void Engine::post_note(MpiGroup& group, int peer, int tag, std::vector<uint64_t> words) {
  group.notes.push_back({std::move(words)});
  auto& note = group.notes.back();
  MPI_Isend(note.words.data(), static_cast<int>(note.words.size()), MPI_UINT64_T, peer, tag, group.control,
            &note.request);
  posted_ = true;
}

void Engine::close(Lock&, MpiGroup& group) {
  if (group.closed) return;
  group.closed = true;
  if (problem()) return wake(group);
  for (Request* const request : std::vector(group.unfinished.begin(), group.unfinished.end())) test(*request);
  for (int r = 0; r < group.size; ++r) {
    if (r == group.rank) continue;
    auto& peer = group.peers[static_cast<size_t>(r)];
    std::vector<uint64_t> words = {peer.sent};
    for (const Request* const request : group.unfinished)
      if (request->sending_ && request->peer_ == r) words.push_back(request->code_);
    if (words.size() > kMostAbandoned) words.assign({peer.sent, kEverything});
    peer.asked = words.size() > 1;
    post_note(group, r, kGoodbye, std::move(words));
  }
  wake(group);
}

void Engine::receive_notes(MpiGroup& group) {
  for (;;) {
    int there = 0, length = 0;
    MPI_Status status;
    if (MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, group.control, &there, &status) != MPI_SUCCESS || !there) return;
    MPI_Get_count(&status, MPI_UINT64_T, &length);
    std::vector<uint64_t> words(static_cast<size_t>(std::max(length, 0)));  // negative: not a number of words
    MPI_Recv(words.data(), static_cast<int>(words.size()), MPI_UINT64_T, status.MPI_SOURCE, status.MPI_TAG,
             group.control, MPI_STATUS_IGNORE);
    auto& peer = group.peers[static_cast<size_t>(status.MPI_SOURCE)];
    if (status.MPI_TAG == kAcknowledgement) {
      peer.acknowledged = true;
      peer.acknowledged_at = Clock::now();
    } else {
      if (words.empty()) words = {0, kEverything};  // no rank of this version says goodbye without a word
      peer.gone = true;
      peer.gone_at = Clock::now();
      peer.sent_to_us = words.at(0);
      for (size_t i = 1; i < words.size(); ++i) peer.abandoned.insert(static_cast<uint32_t>(words[i]));
      // From here on no receive is posted that could match the abandoned messages (Request::refused).
      if (words.size() > 1) post_note(group, status.MPI_SOURCE, kAcknowledgement, {});
      if (group.on_gone && !group.closed) group.on_gone(status.MPI_SOURCE);
    }
    wake(group);
  }
}

void Engine::wake(const MpiGroup& group) {
  for (Request* const request : waiting_)
    if (request->group_.get() == &group) request->changed_.notify_one();
}

// Whether nothing of the group is under way any more, here or towards this rank. If so, frees its communicators; all
// members reach that point.
bool Engine::finished(MpiGroup& group) {
  if (!group.closed || !group.unfinished.empty() || !group.all_gone()) return false;
  for (const auto& peer : group.peers)
    if (peer.asked && !peer.acknowledged) return false;
  for (auto& note : group.notes) {
    int sent = 0;
    MPI_Test(&note.request, &sent, MPI_STATUS_IGNORE);
    if (!sent) return false;
  }
  if (group.holds_requests) return true;
  for (auto& comm : group.comms) MPI_Comm_free(&comm);
  MPI_Comm_free(&group.control);
  return true;
}

}  // namespace muster::comm::mpi_backend
