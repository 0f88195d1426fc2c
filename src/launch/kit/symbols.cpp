#include "launch/kit/symbols.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <elfutils/libdwfl.h>

#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>

#include "base/text.h"
#include "muster/base/deadline.h"

namespace muster::launch {
namespace {

constexpr std::chrono::seconds kPatience{3};  // for all names: reading gigabytes of debug information takes longer
constexpr size_t kSameShown = 3, kLongName = 120;

// The functions of libdw that are used here.
class Libdw {
 public:
  Libdw() {
    void* handle = ::dlopen("libdw.so.1", RTLD_LAZY | RTLD_LOCAL);  // never closed
    if (!handle) return;
    const auto load = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(handle, name));
      return function != nullptr;
    };
    there_ = load(begin, "dwfl_begin") && load(end, "dwfl_end") && load(report_begin, "dwfl_report_begin") &&
             load(report_end, "dwfl_report_end") && load(report_elf, "dwfl_report_elf") &&
             load(addrinfo, "dwfl_module_addrinfo") && load(getsrc, "dwfl_module_getsrc") &&
             load(lineinfo, "dwfl_lineinfo") && load(section_address, "dwfl_offline_section_address");
  }
  bool there() const { return there_; }

  decltype(&::dwfl_begin) begin = nullptr;
  decltype(&::dwfl_end) end = nullptr;
  decltype(&::dwfl_report_begin) report_begin = nullptr;
  decltype(&::dwfl_report_end) report_end = nullptr;
  decltype(&::dwfl_report_elf) report_elf = nullptr;
  decltype(&::dwfl_module_addrinfo) addrinfo = nullptr;
  decltype(&::dwfl_module_getsrc) getsrc = nullptr;
  decltype(&::dwfl_lineinfo) lineinfo = nullptr;
  decltype(&::dwfl_offline_section_address) section_address = nullptr;

 private:
  bool there_ = false;
};

const Libdw& libdw() {
  static const Libdw loaded;
  return loaded;
}

int no_separate_debug_info(Dwfl_Module*, void**, const char*, Dwarf_Addr, const char*, const char*, GElf_Word, char**) {
  return -1;
}

std::string demangled(const char* name) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> plain(abi::__cxa_demangle(name, nullptr, nullptr, &status), std::free);
  return plain ? plain.get() : name;
}

// Cuts the text in the brackets of a long name: "f<…>(…) const". Names in libtorch may have thousands of characters.
std::string shortened(const std::string& name) {
  if (name.size() <= kLongName) return name;
  constexpr std::string_view kNameless = "(anonymous namespace)", kCall = "operator()";
  std::string out;
  int depth = 0;
  for (size_t at = 0; at < name.size(); ++at) {
    const auto rest = std::string_view(name).substr(at);
    if (depth == 0 && (rest.starts_with(kNameless) || rest.starts_with(kCall))) {
      const size_t size = rest.starts_with(kCall) ? kCall.size() : kNameless.size();
      out += rest.substr(0, size);
      at += size - 1;
      continue;
    }
    const char byte = name[at];
    const bool closes = byte == ')' || (byte == '>' && at > 0 && name[at - 1] != '-');  // "->" closes nothing
    if (closes && depth > 0 && --depth == 0) out += "…";
    if (depth == 0) out += byte;
    if (byte == '(' || byte == '<') ++depth;
  }
  return depth == 0 ? out : name.substr(0, kLongName) + "…";  // unpaired brackets, as in operator<
}

std::string base_name(const std::string& path) { return std::filesystem::path(path).filename().string(); }

// The symbols of one file.
class Symbols {
 public:
  explicit Symbols(const std::string& path) {
    callbacks_.find_elf = nullptr;
    callbacks_.find_debuginfo = no_separate_debug_info;
    callbacks_.section_address = libdw().section_address;
    session_ = libdw().begin(&callbacks_);
    if (!session_) return;
    libdw().report_begin(session_);
    module_ = libdw().report_elf(session_, path.c_str(), path.c_str(), -1, 0, true);
    libdw().report_end(session_, nullptr, nullptr);
  }
  Symbols(const Symbols&) = delete;
  Symbols& operator=(const Symbols&) = delete;
  ~Symbols() {
    if (session_) libdw().end(session_);
  }

  // "crash(int*) at train.cpp:42"; without debug information "crash(int*)"; empty if the file has no such symbol.
  std::string name(uint64_t offset) const {
    if (!module_) return {};
    GElf_Off within = 0;
    GElf_Sym symbol{};
    const char* name = libdw().addrinfo(module_, offset, &within, &symbol, nullptr, nullptr, nullptr);
    if (!name) return {};
    const std::string words = shortened(demangled(name));
    int line = 0;
    if (Dwfl_Line* const source = libdw().getsrc(module_, offset))
      if (const char* file = libdw().lineinfo(source, nullptr, &line, nullptr, nullptr, nullptr); file && line > 0)
        return text(words, " at ", base_name(file), ':', line);
    return words;
  }

 private:
  Dwfl_Callbacks callbacks_{};
  Dwfl* session_ = nullptr;
  Dwfl_Module* module_ = nullptr;
};

}  // namespace

StackFrame parse_stack_frame(std::string_view words) {
  constexpr std::string_view kOffset = " +0x";
  const size_t at = words.rfind(kOffset);
  StackFrame frame;
  if (at == std::string_view::npos) return frame;
  const char* end = words.data() + words.size();
  const auto [stop, error] = std::from_chars(words.data() + at + kOffset.size(), end, frame.offset, 16);
  if (error != std::errc() || stop != end) return {};
  frame.file = words.substr(0, at);
  return frame;
}

std::vector<std::string> name_frames(const std::vector<StackFrame>& frames) {
  const auto deadline = Deadline::after(kPatience);
  std::map<std::string, Symbols> files;
  std::vector<std::string> names;
  std::string last;
  size_t same = 0;
  const auto close = [&] {
    if (same > kSameShown) names.push_back(text("… ", same - kSameShown, " times more"));
    same = 0;
  };
  for (const auto& frame : frames) {
    std::string name;
    std::error_code error;
    // Only a regular file: reading a device or a FIFO of that name might never end.
    if (libdw().there() && !deadline.passed() && std::filesystem::is_regular_file(frame.file, error))
      name = files.try_emplace(frame.file, frame.file).first->second.name(frame.offset);
    if (name.empty())
      name = text(base_name(frame.file), " +0x", std::hex, frame.offset);
    else if (name.find(" at ") == std::string::npos)
      name += " in " + base_name(frame.file);
    if (name != last) close();
    last = name;
    if (++same <= kSameShown) names.push_back(std::move(name));
  }
  close();
  return names;
}

}  // namespace muster::launch
