// muster checkpoint: looks into snapshots and other safetensors files. The work is done by muster-checkpoint beside
// this program, because it needs libtorch, and all other commands start without it.
#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include "command_line.h"

namespace muster::tools {
namespace {

constexpr const char* kUsage = "muster checkpoint --help";

[[noreturn]] void run_helper(std::vector<std::string> words) {
  const auto helper = std::filesystem::read_symlink("/proc/self/exe").parent_path() / "muster-checkpoint";
  words.insert(words.begin(), helper.string());
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  ::execv(arguments[0], arguments.data());
  throw_errno(errno, text("cannot start ", helper.string()), "Build and install Muster with libtorch");
}

}  // namespace

int checkpoint_command(std::vector<std::string> words) {
  const std::string command = words.empty() || words.front().starts_with('-') ? "" : words.front();
  if (!command.empty()) words.erase(words.begin());
  CLI::App app("Looks into snapshots, safetensors files and files of torch.save(): ls, verify, diff, convert.",
               "muster checkpoint");
  std::vector<std::string> paths;
  std::string tolerance = "0", prefix;
  bool force = false;
  app.add_option("PATH", paths, "a file, or a folder of snapshots, which stands for its newest one")->type_name("...");
  app.add_option("--tolerance", tolerance, "with diff: differences of values that do not count")
      ->type_name("NUMBER")
      ->default_str("0");
  app.add_option("--prefix", prefix, "with convert: only tensors whose names begin with it, and without it")
      ->type_name("TEXT");
  app.add_flag("--force", force, "with convert: replace the target");
  app.footer(
      "  ls PATH                      the snapshots in a folder, or the tensors in a file\n"
      "  verify PATH...               compare every byte with its checksum; status 1 if one is corrupt\n"
      "  diff PATH PATH               what differs; status 1 if something does\n"
      "  convert PATH... TARGET       to TARGET.safetensors from files of torch.save(), or the reverse\n"
      "\n"
      "Examples:\n"
      "  muster checkpoint ls run1\n"
      "  muster checkpoint verify run1\n"
      "  muster checkpoint diff run1 run2 --tolerance 1e-6\n"
      "  muster checkpoint convert --prefix model/ run1 model.pt");
  if (!parse(app, words, kUsage)) return 0;
  const auto require = [&](bool fine, const char* what) {
    if (!fine) throw InvalidArgument(text("muster checkpoint ", command, " needs ", what), text("See ", kUsage));
  };
  std::vector<std::string> passed{command};
  if (command == "ls") {
    require(paths.size() == 1, "one path");
  } else if (command == "verify") {
    require(!paths.empty(), "a path");
  } else if (command == "diff") {
    require(paths.size() == 2, "two paths");
    double number = -1;
    const auto [stop, error] = std::from_chars(tolerance.data(), tolerance.data() + tolerance.size(), number);
    require(error == std::errc() && stop == tolerance.data() + tolerance.size() && number >= 0,
            "a --tolerance of 0 or more");
    passed.push_back(tolerance);
  } else if (command == "convert") {
    require(paths.size() >= 2, "a source and a target");
    passed.insert(passed.end(), {prefix, force ? "1" : "0", paths.back()});
    paths.pop_back();
  } else {
    throw InvalidArgument(text("muster checkpoint has no command '", command, "'"), text("See ", kUsage));
  }
  passed.insert(passed.end(), paths.begin(), paths.end());
  run_helper(std::move(passed));
}

}  // namespace muster::tools
