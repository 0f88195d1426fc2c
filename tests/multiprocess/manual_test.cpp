// The manual page and bash's completion know every option that --help has.
#include <gmock/gmock.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <sstream>

#include "multiprocess/job_test.h"

namespace muster::test {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;
using ::testing::Not;

std::string help_of(const std::string& command) {
  Process help(command.empty() ? Words{kMusterCommand, "--help"} : Words{kMusterCommand, command, "--help"});
  EXPECT_EQ(help.finish(), 0);
  return help.out;
}

Words matches(const std::string& text, const std::string& pattern) {
  Words found;
  const std::regex regex(pattern);
  for (const auto& line : lines_of(text))
    if (std::smatch match; std::regex_search(line, match, regex)) found.push_back(match[1]);
  return found;
}

Words commands() { return matches(help_of(""), "^  ([a-z]+) "); }

// "-n", "--ranks", …
Words options_of(const std::string& command) {
  Words options;
  for (const auto& names : matches(help_of(command), "^  ((-[a-z],)?(--[a-z-]+)|-[a-z]) ")) {
    std::istringstream each(names);
    for (std::string name; std::getline(each, name, ',');) options.push_back(name);
  }
  return options;
}

std::string source(const std::string& path) {
  std::ifstream file(text(kSourceFolder, '/', path));
  EXPECT_TRUE(file.good()) << path;
  return {std::istreambuf_iterator<char>(file), {}};
}

// What bash would offer for these words, the last of which is being typed.
Words completions(const Words& words) {
  std::string array;
  for (const auto& word : words) array += " '" + word + "'";
  Process bash({"/bin/bash", "--norc", "-c",
                text("source ", kSourceFolder, "/tools/completion/muster.bash; COMP_WORDS=('", kMusterCommand, "'",
                     array, "); COMP_CWORD=", words.size(), "; _muster; printf '%s\\n' \"${COMPREPLY[@]}\"")});
  EXPECT_EQ(bash.finish(), 0) << bash.err;
  EXPECT_EQ(bash.err, "");
  Words offered = lines_of(bash.out);
  std::erase(offered, "");
  return offered;
}

TEST(Manual, TheCommandSaysItsVersion) {
  Process version({kMusterCommand, "--version"});
  EXPECT_EQ(version.finish(), 0) << version.err;
  EXPECT_TRUE(std::regex_match(version.out, std::regex("muster \\d+\\.\\d+\\.\\d+\n"))) << version.out;
}

TEST(Manual, HelpHasExamplesForEveryCommand) {
  EXPECT_THAT(commands(), IsSupersetOf({"run", "blackbox", "ps", "top", "doctor"}));
  for (const auto& command : commands()) {
    EXPECT_THAT(help_of(command), HasSubstr("\nExamples:\n  ")) << command;
    EXPECT_THAT(options_of(command), Contains("--help")) << command;
  }
}

TEST(Manual, ThePageHasEveryOptionInItsCommandsSection) {
  auto page = source("docs/man/muster.1");
  page = std::regex_replace(page, std::regex("\\\\-"), "-");
  for (const auto& command : commands()) {
    std::string head = ".SH MUSTER " + command;
    std::transform(head.begin(), head.end(), head.begin(), [](unsigned char c) { return std::toupper(c); });
    const auto begin = page.find(head + '\n');
    ASSERT_NE(begin, std::string::npos) << "no section for " << command;
    const auto section = page.substr(begin, page.find("\n.SH ", begin) - begin);
    for (const auto& option : options_of(command)) {
      if (option == "-h" || option == "--help") continue;  // said once for all
      EXPECT_TRUE(std::regex_search(section, std::regex("\n\\.BR? [^\n]*" + option + "(?![a-z-])")))
          << command << ' ' << option;
    }
  }
}

TEST(Manual, ThePageNamesNoOptionThatIsGone) {
  const auto page = std::regex_replace(source("docs/man/muster.1"), std::regex("\\\\-"), "-");
  Words all{"--lr"};  // of a program, in an example
  Words of{""};       // muster itself
  for (const auto& command : commands()) of.push_back(command);
  for (const auto& command : of)
    for (const auto& option : options_of(command)) all.push_back(option);
  const std::regex option("--[a-z][a-z-]*");
  for (std::sregex_iterator at(page.begin(), page.end(), option), end; at != end; ++at)
    EXPECT_THAT(all, Contains(at->str()));
}

TEST(Manual, ThePageIsWellFormed) {
  if (!std::filesystem::exists("/usr/bin/groff")) GTEST_SKIP() << "no groff here: apt-get install groff";
  Process groff({"/usr/bin/groff", "-man", "-Tutf8", "-ww", text(kSourceFolder, "/docs/man/muster.1")});
  EXPECT_EQ(groff.finish(), 0);
  EXPECT_EQ(groff.err, "");
}

TEST(Completion, OffersEveryCommandAndOption) {
  EXPECT_THAT(completions({""}), IsSupersetOf(commands()));
  EXPECT_THAT(completions({"bl"}), ElementsAre("blackbox"));
  for (const auto& command : commands()) {
    EXPECT_THAT(completions({command, "-"}), IsSupersetOf(options_of(command))) << command;
    EXPECT_THAT(completions({command, "--he"}), ElementsAre("--help"));
  }
}

TEST(Completion, KnowsTheKindsOfValues) {
  const auto folder = std::filesystem::temp_directory_path() / text("muster-completion-", ::getpid());
  std::filesystem::create_directories(folder / "logs");
  std::ofstream(folder / "logfile") << "";
  const auto begin = (folder / "log").string();
  EXPECT_THAT(completions({"run", "--log-dir", begin}), ElementsAre((folder / "logs").string())) << "a folder";
  EXPECT_THAT(completions({"run", "--log-dir", "=", begin}), ElementsAre((folder / "logs").string()));
  EXPECT_EQ(completions({"run", "-n", "2", "--error-file", begin}).size(), 2u) << "a file";
  EXPECT_EQ(completions({"blackbox", "--last", "3", begin}).size(), 2u) << "a file";
  EXPECT_THAT(completions({"run", "-n", ""}), ElementsAre()) << "a number";
  EXPECT_THAT(completions({"run", "-n", "2", "true", "--r"}), ElementsAre()) << "the program's own options";
  EXPECT_THAT(completions({"run", "--", "true", "--r"}), ElementsAre());
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace muster::test
