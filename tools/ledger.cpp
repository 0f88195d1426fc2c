// muster ledger: proves from a ledger that every sample of every epoch counts once.
#include "launch/jobs/ledger_check.h"

#include <filesystem>
#include <limits>
#include <system_error>

#include "command_line.h"

namespace muster::tools {

int ledger_command(std::vector<std::string> words) {
  CLI::App app("Proves from the ledger of a training that every sample of every epoch counts once.",
               "muster ledger check");
  std::vector<std::string> files;
  std::string epochs, spare = "0";
  app.add_option("FILE", files, "what muster::Ledger has written; of several hosts, all files")
      ->type_name("...")
      ->required();
  app.add_option("--epochs", epochs, "these must be there and complete; else the last one may be under way")
      ->type_name("N");
  app.add_option("--spare", spare, "samples of an epoch that may be missing or repeated, if the sampler pads or drops")
      ->type_name("N")
      ->default_str("0");
  app.footer(
      "Status 1: samples are missing or count twice, and are named.\n"
      "\n"
      "Examples:\n"
      "  muster ledger check run.ledger\n"
      "  muster ledger check --epochs 10 host1.ledger host2.ledger");
  if (!words.empty() && words.front() == "check")
    words.erase(words.begin());
  else if (words.empty() || !words.front().starts_with('-'))
    throw InvalidArgument(text("muster ledger has no command '", words.empty() ? "" : words.front(), "'"),
                          "Use muster ledger check FILE...");
  if (!parse(app, words, "muster ledger --help")) return 0;
  constexpr uint64_t kMost = std::numeric_limits<int64_t>::max();
  launch::LedgerCheckOptions options;
  if (!epochs.empty()) options.epochs = parse_number("--epochs", epochs, kMost);
  options.spare = parse_number("--spare", spare, kMost);
  for (auto one = files.begin(); one != files.end(); ++one)
    for (auto other = files.begin(); other != one; ++other)
      if (std::error_code ignored; std::filesystem::equivalent(*one, *other, ignored))
        throw InvalidArgument(text("'", *other, "' and '", *one, "' are one file"), "Give each ledger once");
  const launch::LedgerCheck result = launch::check_ledger(files, options);
  std::cout << result.words << std::flush;
  return result.is_exactly_once ? 0 : 1;
}

}  // namespace muster::tools
