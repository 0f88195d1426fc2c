// The table of backends. A new one is a folder here and a row below.
#include "base/text.h"
#include "comm/backend.h"
#include "comm/backends/shm/shm_backend.h"
#include "muster/base/error.h"

namespace muster::comm {

const std::vector<BackendEntry>& backends() {
  static const std::vector<BackendEntry> table = {
      {"shm", &shm_backend::create, &shm_backend::why_not},
  };
  return table;
}

c10::intrusive_ptr<Backend> create_backend(const std::string& name, const BackendContext& context) {
  std::vector<std::string> reasons;
  for (const auto& entry : backends()) {
    if (name != "auto" && name != entry.name) continue;
    const std::string reason = entry.why_not();
    if (reason.empty()) return entry.create(context);
    reasons.push_back(text(entry.name, ": ", reason));
  }
  if (!reasons.empty()) throw Unavailable(text("no backend works here (", join(reasons, "; "), ")"));
  std::vector<std::string_view> names;
  for (const auto& entry : backends()) names.push_back(entry.name);
  throw InvalidArgument(text("there is no backend '", name, "'"), text("Use auto or one of: ", join(names)));
}

}  // namespace muster::comm
