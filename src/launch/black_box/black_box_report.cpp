#include "launch/black_box/black_box_report.h"

#include <algorithm>
#include <ctime>
#include <iomanip>
#include <map>
#include <set>
#include <tuple>

#include "base/text.h"
#include "launch/kit/text_table.h"

namespace muster::launch {
namespace {

using shm::BlackBoxOperation;
using shm::BlackBoxSnapshot;
using shm::BlackBoxState;

constexpr size_t kMostNamed = 8;  // ranks or messages, before it becomes unreadable

uint64_t between(uint64_t from, uint64_t to) { return to > from ? to - from : 0; }

// "all_reduce #12", "send (peer 1, tag 7)"
std::string name_of(const BlackBoxOperation& operation) {
  if (operation.is_collective()) return text(operation.name, " #", operation.sequence);
  if (operation.peer < 0) return operation.name;
  return text(operation.name, " (peer ", operation.peer, operation.tag == 0 ? "" : ", tag ",
              operation.tag == 0 ? "" : text(operation.tag), ')');
}

std::string group_of(const BlackBoxSnapshot& box, const BlackBoxOperation& operation) {
  return operation.group < 0 ? "?" : box.groups[static_cast<size_t>(operation.group)].name;
}

// "running for 3.1 s", "done 2 ms ago"
std::string state_of(const BlackBoxOperation& operation, uint64_t now_ns) {
  if (!operation.under_way())
    return text(to_string(operation.state), ' ', human_time(between(operation.end_ns, now_ns)), " ago");
  return text(to_string(operation.state), " for ", human_time(between(operation.since_ns(), now_ns)));
}

std::string size_of(const BlackBoxOperation& operation) {
  return operation.bytes == 0 ? "" : ", " + human_bytes(operation.bytes);
}

// One rank in one group.
struct Member {
  const RankBox* rank;
  const BlackBoxOperation* last = nullptr;           // the collective furthest in the group's order that it has begun
  size_t posted = 0;                                 // collectives that wait for their turn
  std::vector<const BlackBoxOperation*> messages{};  // under way
};

struct GroupView {
  std::string name;
  uint64_t size = 0;
  std::vector<Member> members;
};

std::vector<GroupView> groups_of(const JobBoxes& job) {
  std::vector<GroupView> groups;
  std::map<std::tuple<std::string, uint64_t, uint64_t>, size_t> index_of;
  for (const auto& rank : job.ranks) {
    std::vector<size_t> places;  // of the box's groups in `groups`
    for (const auto& group : rank.box.groups) {
      const auto [found, is_new] = index_of.try_emplace({group.name, group.size, group.members}, groups.size());
      if (is_new) groups.push_back({group.name, group.size, {}});
      groups[found->second].members.push_back({&rank});
      places.push_back(found->second);
    }
    for (const auto& operation : rank.box.operations) {
      if (operation.group < 0) continue;
      Member& member = groups[places[static_cast<size_t>(operation.group)]].members.back();
      if (!operation.is_collective()) {
        if (operation.under_way()) member.messages.push_back(&operation);
      } else if (operation.state == BlackBoxState::kPosted) {
        ++member.posted;
      } else if (!member.last || operation.sequence >= member.last->sequence) {
        member.last = &operation;
      }
    }
  }
  return groups;
}

std::string ranks(const std::vector<const Member*>& members) {
  std::vector<int> numbers;
  for (const auto* member : members) numbers.push_back(member->rank->box.rank);
  const bool many = std::set<int>(numbers.begin(), numbers.end()).size() > 1;
  return text(many ? "ranks " : "rank ", human_ranks(std::move(numbers)));
}

// What a rank is doing while the others wait for it in an operation.
std::string occupation(const RankBox& rank, uint64_t now_ns) {
  const BlackBoxOperation* current = nullptr;
  for (const auto& operation : rank.box.operations)
    if (operation.state == BlackBoxState::kRunning) current = &operation;
  std::string words = text("rank ", rank.box.rank, " (", rank.end, ") is in ");
  if (!current) return words + "no operation of Muster";
  return words +
         text(name_of(*current), " of group '", group_of(rank.box, *current), "', ", state_of(*current, now_ns));
}

// Lines that say where the members are. Members at the same place share a line.
std::string positions(const GroupView& group, uint64_t now_ns) {
  using Key = std::tuple<std::string, BlackBoxState, uint64_t, size_t>;
  std::vector<std::pair<Key, std::vector<const Member*>>> lines;
  for (const auto& member : group.members) {
    const Key key = member.last ? Key(name_of(*member.last), member.last->state, member.last->bytes, member.posted)
                                : Key("", BlackBoxState::kPosted, 0, member.posted);
    const auto line = std::find_if(lines.begin(), lines.end(), [&](const auto& item) { return item.first == key; });
    if (line != lines.end()) {
      line->second.push_back(&member);
    } else {
      lines.push_back({key, {&member}});
    }
  }
  std::string out;
  for (const auto& [key, members] : lines) {
    const auto longest = [](const Member* a, const Member* b) {
      const auto time = [](const BlackBoxOperation& o) { return o.end_ns != 0 ? o.end_ns : o.since_ns(); };
      return time(*a->last) < time(*b->last);
    };
    const auto* first =
        members.front()->last ? (*std::min_element(members.begin(), members.end(), longest))->last : nullptr;
    out += text("  ", ranks(members), ": ",
                first ? text(name_of(*first), size_of(*first), ", ", state_of(*first, now_ns)) : "no collective yet");
    const auto posted = members.front()->posted;
    out += posted == 0 ? "\n" : text(", and ", posted, " more posted\n");
  }
  size_t messages = 0;
  for (const auto& member : group.members)
    for (const auto* message : member.messages)
      if (++messages <= kMostNamed)
        out += text("  rank ", member.rank->box.rank, ": ", name_of(*message), size_of(*message), ", ",
                    state_of(*message, now_ns), '\n');
  if (messages > kMostNamed) out += text("  and ", messages - kMostNamed, " more messages\n");
  return out;
}

// Which rank waits for which; empty if this is unknown.
// `has_all`: whether the boxes of all members are here.
std::string conclusion(const GroupView& group, uint64_t now_ns, bool has_all) {
  const BlackBoxOperation* front = nullptr;
  for (const auto& member : group.members)
    if (member.last && (!front || member.last->sequence > front->sequence)) front = member.last;
  if (!front) return {};
  std::vector<const Member*> behind, waiting, through;
  bool same = true;
  for (const auto& member : group.members) {
    const bool there = member.last && member.last->sequence == front->sequence;
    (!there ? behind : member.last->under_way() ? waiting : through).push_back(&member);
    same = same && (!there || member.last->name == front->name);
  }
  std::string out;
  const auto line = [&](const std::string& words) { out += "  => " + words + '\n'; };
  if (!same) line(text("#", front->sequence, " is not the same operation on all ranks"));
  if (!behind.empty()) {
    line(text(ranks(behind), behind.size() == 1 ? " has" : " have", " not begun ", name_of(*front),
              waiting.empty() ? "" : text(", for which ", ranks(waiting), waiting.size() == 1 ? " waits" : " wait")));
    for (size_t i = 0; i < std::min(behind.size(), kMostNamed); ++i) line(occupation(*behind[i]->rank, now_ns));
  } else if (!waiting.empty() && through.empty() && same) {
    line(has_all ? text("all are in ", name_of(*front), ": nobody is missing")
                 : text("all of these are in ", name_of(*front)));
  } else if (!waiting.empty() && same) {
    line(text(ranks(waiting), waiting.size() == 1 ? " is" : " are", " still in ", name_of(*front), "; ", ranks(through),
              through.size() == 1 ? " has" : " have", " left it"));
  }
  return out;
}

}  // namespace

std::string describe_ranks(const JobBoxes& job) {
  if (job.ranks.empty()) return {};
  const auto& first = job.ranks.front().box;
  const auto when = static_cast<time_t>((job.taken_ns + static_cast<uint64_t>(first.realtime_ahead)) / 1'000'000'000);
  tm local{};
  ::localtime_r(&when, &local);
  std::string out = text("job ", job.job, " on ", first.host, ", as of ", std::put_time(&local, "%F %T"), '\n');
  std::vector<std::vector<std::string>> rows;
  for (const auto& [box, end, holders] : job.ranks)
    rows.push_back(
        {text("  rank ", box.rank, " of ", box.world_size), box.pid == 0 ? "" : text("pid ", box.pid), end,
         text(box.begun, " operations", box.unreadable == 0 ? "" : text(", ", box.unreadable, " unreadable"))});
  return out + aligned(rows, {false, false, false, false});
}

std::string operations_table(const JobBoxes& job, size_t each) {
  std::vector<std::pair<const BlackBoxOperation*, const RankBox*>> shown;
  for (const auto& rank : job.ranks) {
    const auto& operations = rank.box.operations;
    for (size_t i = operations.size() - std::min(each, operations.size()); i < operations.size(); ++i)
      shown.push_back({&operations[i], &rank});
  }
  std::stable_sort(shown.begin(), shown.end(),
                   [](const auto& a, const auto& b) { return a.first->since_ns() < b.first->since_ns(); });
  std::vector<std::vector<std::string>> rows{{"seconds", "rank", "group", "#", "operation", "bytes", "took", "state"}};
  for (const auto& [operation, rank] : shown) {
    const uint64_t end = operation->end_ns != 0 ? operation->end_ns : job.taken_ns;
    auto name = name_of(*operation);
    if (operation->is_collective()) name = operation->name;
    rows.push_back({fixed(-static_cast<double>(between(operation->since_ns(), job.taken_ns)) / 1e9, 6),
                    text(rank->box.rank), group_of(rank->box, *operation),
                    operation->is_collective() ? text(operation->sequence) : "-", name,
                    operation->bytes == 0 ? "-" : human_bytes(operation->bytes),
                    operation->start_ns == 0 ? "-" : human_time(between(operation->start_ns, end)),
                    std::string(to_string(operation->state))});
  }
  return rows.size() == 1 ? "no operations\n" : aligned(rows, {true, true, false, true, false, true, true, false});
}

std::string diagnosis(const JobBoxes& job) {
  // Ranks of other hosts, and those that are gone with their boxes, have none here.
  std::set<int> with_box;
  int world_size = 0;
  for (const auto& rank : job.ranks) {
    with_box.insert(rank.box.rank);
    world_size = std::max(world_size, rank.box.world_size);
  }
  const bool lacks_boxes = with_box.size() < static_cast<size_t>(std::max(world_size, 0));
  std::string out;
  for (const auto& group : groups_of(job)) {
    const auto here = group.members.size();
    const bool has_all = !lacks_boxes || group.size <= here;
    out += text("group '", group.name, "'",
                group.size == 0 ? "" : text(" of ", group.size, group.size == 1 ? " rank" : " ranks"),
                group.size <= here ? ""
                : has_all
                    ? text(", of which ", group.size - here, " never joined it")
                    : text(", of which ", group.size - here, group.size - here == 1 ? " has" : " have", " no box here"),
                ":\n");
    out += positions(group, job.taken_ns) + conclusion(group, job.taken_ns, has_all);
  }
  return out;
}

std::vector<std::string> last_operations(const BlackBoxSnapshot& box, uint64_t now_ns, size_t count) {
  // Running operations say most, even if later operations have ended.
  std::vector<const BlackBoxOperation*> chosen;
  for (const bool under_way : {true, false})
    for (size_t i = box.operations.size(); i-- > 0 && chosen.size() < count;)
      if (box.operations[i].under_way() == under_way) chosen.push_back(&box.operations[i]);
  std::sort(chosen.begin(), chosen.end(), [](const auto* a, const auto* b) { return a->ticket < b->ticket; });
  std::vector<std::string> lines;
  for (const auto* operation : chosen)
    lines.push_back(text(name_of(*operation), " of group '", group_of(box, *operation), "'", size_of(*operation), ", ",
                         state_of(*operation, now_ns)));
  return lines;
}

}  // namespace muster::launch
