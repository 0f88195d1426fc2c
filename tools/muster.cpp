// The muster command: a function for each subcommand, which parses its arguments and calls the layer below.
//
// Exit status: the subcommand's own; 2 for a mistake in the arguments; 1 if the system refuses what the command needs.
#include <fcntl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <chrono>
#include <iomanip>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "base/env.h"
#include "base/text.h"
#include "command_line.h"
#include "muster/base/error.h"
#include "muster/launch/launcher.h"

namespace {

using muster::InvalidArgument;
using muster::text;
using std::chrono::milliseconds;

constexpr int kUsageStatus = 2, kSystemStatus = 1;
constexpr const char* kUsage = "muster run -n RANKS [OPTIONS] [--] PROGRAM [ARGUMENTS...]";

int parse_ranks(const std::string& word) {
  int ranks = 0;
  const char* end = word.data() + word.size();
  const auto [stop, error] = std::from_chars(word.data(), end, ranks);
  if (error == std::errc::invalid_argument || stop != end)
    throw InvalidArgument(text("-n: expected a whole number of ranks, got '", word, "'"), "Use for example -n 2");
  if (error != std::errc() || ranks < 1 || ranks > muster::launch::kMaxRanks)
    throw InvalidArgument(text("-n: expected 1 to ", muster::launch::kMaxRanks, " ranks, got ", word),
                          "Use for example -n 2");
  return ranks;
}

// "700", "700ms" or "2s".
milliseconds parse_time(const std::string& option, const std::string& word) {
  constexpr int64_t kMax = muster::launch::kMaxTime.count();
  int64_t number = -1;
  const char* end = word.data() + word.size();
  const auto [stop, error] = std::from_chars(word.data(), end, number);
  const std::string unit(stop, end);
  if (unit == "s" && number <= kMax) number *= 1000;
  if (error != std::errc() || number < 0 || number > kMax || (unit != "" && unit != "ms" && unit != "s"))
    throw InvalidArgument(text(option, ": expected a time in ms or s, of at most a day, got '", word, "'"),
                          text("Use for example ", option, " 700ms or ", option, " 2s"));
  return milliseconds(number);
}

muster::launch::Pin parse_pin(const std::string& word) {
  using muster::launch::Pin;
  if (word == "auto") return Pin::kAuto;
  if (word == "none") return Pin::kNone;
  if (word == "cores") return Pin::kCores;
  throw InvalidArgument(text("--pin: expected auto, none or cores, got '", word, "'"), "Use for example --pin cores");
}

// "2", or "1:4" for any number from 1 to 4.
void parse_hosts(const std::string& word, muster::launch::HostOptions* hosts) {
  const auto number = [&](const std::string& digits) {
    int value = 0;
    const auto [stop, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    if (error != std::errc() || stop != digits.data() + digits.size() || value < 1)
      throw InvalidArgument(text("--nnodes: expected a number of hosts or MIN:MAX, got '", word, "'"),
                            "Use for example --nnodes 2 or --nnodes 1:4");
    return value;
  };
  const auto colon = word.find(':');
  hosts->least = number(word.substr(0, colon));
  hosts->most = colon == std::string::npos ? hosts->least : number(word.substr(colon + 1));
}

struct RunArguments {
  std::string ranks, settle = "50ms", grace = "700ms", stop_grace = "5s", black_box, log_dir, error_file, pin = "auto";
  bool no_prefix = false, tee = false, redirect = false, verbose = false;
  int max_restarts = 0;
  bool keep_going = false;
  std::string hosts = "1", rendezvous, secret_file, job, address, meet = "300s", last_call = "1s", patience = "5s";
  int node = -1;
};

// The number that a scheduler gave this launcher, or -1. srun numbers the tasks of its step, and several of them may be
// on one host. If the step's size is not the number of hosts, its numbers are not the job's: the step is only a part of
// the job, or the launchers are not its tasks, as in a batch script. Then hosts get their numbers as they come.
int scheduled_node(int hosts) {
  const auto number = [](const char* name) { return static_cast<int>(muster::env_int(name).value_or(-1)); };
  if (number("SLURM_STEP_NUM_TASKS") == hosts) return number("SLURM_PROCID");
  if (number("SLURM_STEP_NUM_NODES") == hosts) return number("SLURM_NODEID");
  return number("JOB_COMPLETION_INDEX");
}

std::optional<muster::launch::HostOptions> hosts_of(const RunArguments& arguments) {
  muster::launch::HostOptions hosts;
  parse_hosts(arguments.hosts, &hosts);
  if (hosts.most == 1 && arguments.rendezvous.empty()) return std::nullopt;
  hosts.node = arguments.node;
  if (hosts.node < 0) hosts.node = scheduled_node(hosts.most);
  hosts.rendezvous = arguments.rendezvous;
  hosts.secret_file = arguments.secret_file;
  hosts.job = arguments.job;
  hosts.address = arguments.address;
  hosts.timeout = parse_time("--rdzv-timeout", arguments.meet);
  hosts.last_call = parse_time("--rdzv-last-call", arguments.last_call);
  hosts.patience = parse_time("--rdzv-patience", arguments.patience);
  return hosts;
}

// Nobody wants a report that nobody can read.
std::string report_name(const std::string& word) { return word == "/dev/null" ? "" : word; }

// CLI11 does not know PROGRAM, because it sees only the words before it.
struct RunHelp : CLI::Formatter {
  std::string make_usage(const CLI::App*, std::string) const override { return text("Usage: ", kUsage, '\n'); }
};

void declare_run(CLI::App& run, RunArguments& arguments) {
  run.formatter(std::make_shared<RunHelp>());
  run.add_option("-n,--ranks", arguments.ranks, "how many processes of PROGRAM to start")->type_name("RANKS");
  run.add_flag("--no-prefix", arguments.no_prefix,
               "print the ranks' output as it is, without [RANK] or [HOST:RANK] before each line");
  run.add_option("--settle", arguments.settle, "time from the end of a rank that only lost a peer to SIGTERM for all")
      ->type_name("TIME")
      ->default_str("50ms");
  run.add_option("--grace", arguments.grace, "time from a rank's failure to SIGKILL for the others")
      ->type_name("TIME")
      ->default_str("700ms");
  run.add_option("--stop-grace", arguments.stop_grace, "time from the first Ctrl-C to SIGKILL")
      ->type_name("TIME")
      ->default_str("5s");
  run.add_option("--black-box", arguments.black_box, "where a job that fails writes its ranks' last operations")
      ->type_name("FILE");
  run.add_option("--error-file", arguments.error_file, "where a job that fails writes the cause, as JSON")
      ->type_name("FILE");
  run.add_option("--log-dir", arguments.log_dir, "write what rank N prints to DIR/rank_N.out and DIR/rank_N.err")
      ->type_name("DIR");
  run.add_flag("--tee", arguments.tee, "with --log-dir: print it here too (the default)");
  run.add_flag("--redirect", arguments.redirect, "with --log-dir: do not print it here");
  run.add_option("--pin", arguments.pin, "keep each rank on its own cores; auto: if they are reserved for the job")
      ->type_name("auto|none|cores")
      ->default_str("auto");
  run.add_flag("-v,--verbose", arguments.verbose, "say where each rank runs, and how remote calls reach the others");
  run.add_option("--max-restarts", arguments.max_restarts, "how often the job is restarted after a rank failed")
      ->type_name("TIMES")
      ->default_str("0");
  run.add_flag("--keep-going", arguments.keep_going,
               "a rank that fails ends no other, except rank 0, whose status is the job's");
  run.add_option("--nnodes", arguments.hosts, "how many hosts, with a muster run on each; MIN:MAX for as many as come")
      ->type_name("HOSTS")
      ->default_str("1");
  run.add_option("--node-rank", arguments.node, "this host's number, from 0; by default in the order of arrival")
      ->type_name("NUMBER");
  run.add_option("--rdzv", arguments.rendezvous,
                 "where the hosts meet: HOST:PORT of one of them, or a store: tls://, etcd://")
      ->type_name("ADDRESS");
  run.add_option("--secret-file", arguments.secret_file,
                 "the secret that all hosts of the job share: see muster secret")
      ->type_name("FILE");
  run.add_option("--rdzv-timeout", arguments.meet, "how long to wait for the other hosts")
      ->type_name("TIME")
      ->default_str("300s");
  run.add_option("--rdzv-last-call", arguments.last_call, "with MIN:MAX: how long to wait for one more host than came")
      ->type_name("TIME")
      ->default_str("1s");
  run.add_option("--rdzv-patience", arguments.patience,
                 "how long a host may give no sign of life before it counts as lost")
      ->type_name("TIME")
      ->default_str("5s");
  run.add_option("--job-id", arguments.job, "the job's name, if several jobs meet in one store")->type_name("NAME");
  run.add_option("--host", arguments.address, "this host's address for the others, if the one found is wrong")
      ->type_name("ADDRESS");
  run.footer(
      "Each rank finds its place in RANK, WORLD_SIZE and torchrun's other variables; muster::init() reads them.\n"
      "The first rank that fails ends the job and gives the exit status.\n"
      "Rank 0 has the standard input, unless that is a terminal.\n"
      "All processes that a rank started end with the job.\n"
      "muster blackbox prints what the ranks did last; muster top shows what they do now.\n"
      "\n"
      "Examples:\n"
      "  muster run -n 2 ./train --lr 0.1\n"
      "  muster run -n 8 --black-box failed.boxes -- python train.py\n"
      "  muster run -n 4 --log-dir logs --redirect ./train");
}

// The index at which our own words end and PROGRAM begins. All words after it belong to the program, also those that
// look like options of ours.
size_t program_index(const CLI::App& run, const std::vector<std::string>& words) {
  size_t index = 0;
  while (index < words.size() && words[index].size() > 1 && words[index][0] == '-' && words[index] != "--") {
    const auto& word = words[index];
    const bool is_long = word.starts_with("--");
    const auto name = is_long ? word.substr(0, word.find('=')) : word.substr(0, 2);
    const auto* option = run.get_option_no_throw(name);
    const bool takes_value = option && option->get_items_expected_max() > 0;
    index += takes_value && name.size() == word.size() ? 2 : 1;
  }
  return std::min(index, words.size());
}

int run_command(std::vector<std::string> words) {
  CLI::App run(
      "Starts PROGRAM as the ranks of one job on this host, watches them, and says which failed first and why.",
      "muster run");
  RunArguments arguments;
  declare_run(run, arguments);
  const size_t index = program_index(run, words);
  std::vector<std::string> program(words.begin() + static_cast<ptrdiff_t>(index), words.end());
  if (!program.empty() && program.front() == "--") program.erase(program.begin());
  words.resize(index);
  if (!muster::tools::parse(run, words, "muster run --help")) return 0;
  if (arguments.ranks.empty()) throw InvalidArgument("the number of ranks is missing", text("Use ", kUsage));

  muster::launch::LaunchOptions options;
  options.ranks = parse_ranks(arguments.ranks);
  options.output = arguments.no_prefix ? muster::launch::RankOutput::kUnchanged : muster::launch::RankOutput::kPrefixed;
  options.settle = parse_time("--settle", arguments.settle);
  options.grace = parse_time("--grace", arguments.grace);
  options.stop_grace = parse_time("--stop-grace", arguments.stop_grace);
  options.black_box_file = report_name(arguments.black_box);
  options.error_file = report_name(arguments.error_file);
  options.max_restarts = arguments.max_restarts;
  options.keep_going = arguments.keep_going;
  options.hosts = hosts_of(arguments);
  if (run.count("--rdzv") > 0 && arguments.rendezvous.empty())
    throw InvalidArgument("--rdzv: expected an address, got nothing", "Use for example --rdzv host0:29400");
  if (arguments.node < -1)
    throw InvalidArgument(text("--node-rank: expected 0 or more, or -1 for any number, got ", arguments.node));
  if (!options.hosts && arguments.node > 0)
    throw InvalidArgument(text("--node-rank ", arguments.node, " is for a job of several hosts, and this one has none"),
                          "Use it with --nnodes and --rdzv");
  options.own_process = true;
  options.verbose = arguments.verbose;
  options.pin = parse_pin(arguments.pin);
  if (arguments.log_dir.empty() && (arguments.tee || arguments.redirect))
    throw InvalidArgument(text(arguments.tee ? "--tee" : "--redirect", " needs a folder"), "Use it with --log-dir DIR");
  if (arguments.tee && arguments.redirect)
    throw InvalidArgument("--tee and --redirect contradict each other", "Give one of them");
  options.log_folder = arguments.log_dir;
  options.log_files_only = arguments.redirect;
  if (program.empty()) throw InvalidArgument("there is no program to run", text("Use ", kUsage));
  options.command = std::move(program);

  const auto outcome = muster::launch::launch_command(options);
  if (!outcome.warnings.empty()) std::cerr << "muster: " << outcome.warnings << std::flush;
  if (!outcome.cause.empty()) std::cerr << "muster: " << outcome.cause << std::flush;
  return outcome.status;
}

struct Subcommand {
  const char* name;
  const char* what;
  int (*run)(std::vector<std::string> words);
};

constexpr Subcommand kSubcommands[] = {
    {"run", "starts a program as the ranks of one job on this host", run_command},
    {"blackbox", "prints what the ranks of a job did last, and who waits for whom", muster::tools::blackbox_command},
    {"checkpoint", "looks into snapshots and other safetensors files", muster::tools::checkpoint_command},
    {"secret", "makes the secret that the hosts of a job share", muster::tools::secret_command},
    {"ledger", "proves that every sample of a training counts once", muster::tools::ledger_command},
    {"ps", "lists the jobs of this user on this host", muster::tools::ps_command},
    {"top", "shows what the ranks of a job do: step, speed, time in communication, memory", muster::tools::top_command},
    {"doctor", "checks this machine, and says what to change for a job", muster::tools::doctor_command},
};

void print_help(std::ostream& out) {
  out << "Usage: muster COMMAND [ARGUMENTS...]\n\n";
  for (const auto& command : kSubcommands)
    out << "  " << std::left << std::setw(12) << command.name << command.what << "\n";
  out << "\n  --version   says which Muster this is\n\nmuster COMMAND --help says more.\n";
}

int dispatch(std::vector<std::string> words) {
  if (words.empty()) {
    print_help(std::cerr);
    return kUsageStatus;
  }
  if (words[0] == "--help" || words[0] == "-h" || words[0] == "help") {
    print_help(std::cout);
    return 0;
  }
  if (words[0] == "--version") {
    std::cout << "muster " << MUSTER_VERSION << std::endl;
    return 0;
  }
  for (const auto& command : kSubcommands)
    if (words[0] == command.name) return command.run({words.begin() + 1, words.end()});
  throw InvalidArgument(text("muster has no command '", words[0], "'"), "See muster --help");
}

}  // namespace

int main(int argc, char** argv) {
  // Descriptors that this process opens must never become the standard output of another one.
  for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; ++fd)
    if (::fcntl(fd, F_GETFD) < 0) [[maybe_unused]]
      const int null = ::open("/dev/null", O_RDWR);
  try {
    const int status = dispatch({argv + 1, argv + argc});
    if (std::cout.flush()) return status;
    std::cerr << "muster: the standard output cannot be written" << std::endl;
    return status != 0 ? status : kSystemStatus;
  } catch (const InvalidArgument& error) {
    std::cerr << "muster: " << error.what() << std::endl;
    return kUsageStatus;
  } catch (const std::exception& error) {
    std::cerr << "muster: " << error.what() << std::endl;
    return kSystemStatus;
  }
}
