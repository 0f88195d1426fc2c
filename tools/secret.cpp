// muster secret: makes a new secret for a job, in a private file or on the standard output.
#include "muster/base/secret.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "base/fd.h"
#include "command_line.h"

namespace muster::tools {
namespace {

// The file is new and private; on an error there is no file.
void write_new(const std::string& path, std::string_view bytes) {
  const UniqueFd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!file && errno == EEXIST)
    throw InvalidArgument(text(path, " exists already, and is not overwritten"),
                          "Choose another name, or remove it if no job uses it");
  if (!file) throw_errno(text("cannot create ", path));
  while (!bytes.empty()) {
    const ssize_t n = ::write(file.get(), bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      const int error = errno;
      ::unlink(path.c_str());
      throw_errno(error, text("cannot write to ", path));
    }
    bytes.remove_prefix(static_cast<size_t>(n));
  }
}

}  // namespace

int secret_command(std::vector<std::string> words) {
  CLI::App app("Makes a new secret for the hosts of a job to share.", "muster secret");
  std::string file;
  app.add_option("FILE", file, "a new file that only you can read; without FILE, it is printed")->type_name("");
  app.footer(
      "Copy the file to each host of the job, or give its text to all processes in MUSTER_SECRET. Anybody who has the\n"
      "secret can join the job.\n"
      "\n"
      "Examples:\n"
      "  muster secret job.secret\n"
      "  export MUSTER_SECRET=$(muster secret)");
  if (!parse(app, words, "muster secret --help")) return 0;
  const std::string line = Secret::generate().hex() + "\n";
  if (!file.empty()) {
    write_new(file, line);
    return 0;
  }
  std::cout << line << std::flush;
  if (!std::cout) throw Unavailable("cannot print the secret", "Check where the standard output goes");
  return 0;
}

}  // namespace muster::tools
