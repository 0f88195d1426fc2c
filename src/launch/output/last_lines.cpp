#include "launch/output/last_lines.h"

#include <algorithm>

namespace muster::launch {
namespace {

constexpr std::string_view kThrown = "terminate called after throwing an instance of '";
constexpr std::string_view kWhat = "  what():  ";
constexpr std::string_view kFault = "muster: SIG", kInThread = ", in thread ";

}  // namespace

void LastLines::feed(std::string_view bytes) {
  while (!bytes.empty()) {
    const size_t size = std::min(bytes.find_first_of("\r\n"), bytes.size());
    if (size > 0) {
      if (replaced_) line_.clear(), cut_ = false;
      replaced_ = false;
      const size_t room = kMaxLineBytes - line_.size();
      line_.append(bytes.substr(0, std::min(room, size)));
      cut_ = cut_ || size > room;
    }
    if (size == bytes.size()) return;
    if (bytes[size] == '\r') {
      replaced_ = true;
    } else {
      end_line();
    }
    bytes.remove_prefix(size + 1);
  }
}

void LastLines::finish() {
  if (!line_.empty()) end_line();
}

void LastLines::end_line() {
  const std::string_view line = line_;
  if (line.starts_with(kThrown)) {
    exception_type_ = line.substr(kThrown.size(), line.rfind('\'') - kThrown.size());
    exception_text_.clear();
  } else if (line.starts_with(kWhat) && !exception_type_.empty()) {
    exception_text_ = line.substr(kWhat.size());
  }
  if (line.starts_with(kFault) && line.find(kInThread) != std::string_view::npos) {
    fault_ = line.substr(kFault.size() - 3);
    stack_.clear();
  } else if (line.starts_with(kStackLine) && !fault_.empty()) {
    if (stack_.size() < kMaxFrames) stack_.emplace_back(line.substr(kStackLine.size()));
  } else {
    if (cut_) line_ += "…";
    lines_.push_back(std::move(line_));
    if (lines_.size() > kMaxLines) lines_.pop_front();
  }
  line_.clear();
  replaced_ = cut_ = false;
}

}  // namespace muster::launch
