#include "launch/ranks/program.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <system_error>

#include "base/text.h"
#include "muster/base/error.h"

namespace muster::launch {
namespace {

// 0, or the errno that says why `path` is not a program.
int check(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) return errno;
  if (S_ISDIR(status.st_mode)) return EISDIR;
  if (!S_ISREG(status.st_mode)) return EACCES;
  // access(2) lets root execute files without any execute permission.
  if ((status.st_mode & 0111) == 0 || ::access(path.c_str(), X_OK) != 0) return EACCES;
  return 0;
}

// The interpreter that "#!" names on the first line; empty if there is none.
std::string interpreter_of(const std::string& path) {
  std::ifstream file(path);
  std::string line, interpreter;
  if (std::getline(file, line) && line.starts_with("#!")) std::istringstream(line.substr(2)) >> interpreter;
  return interpreter;
}

[[noreturn]] void throw_not_a_program(const std::string& name, int error) {
  switch (error) {
    case ENOENT:
    case ENOTDIR:
      throw InvalidArgument(text("there is no program '", name, "'"), "Check the path");
    case EISDIR:
      throw InvalidArgument(text("'", name, "' is a folder, not a program"), "Name the program in it");
    case EACCES:
      throw InvalidArgument(text("'", name, "' is not executable"),
                            text("Run chmod +x ", name, ", or put its interpreter before it, such as python3 ", name));
    default:
      throw InvalidArgument(text("cannot start '", name, "': ", std::generic_category().message(error)));
  }
}

}  // namespace

std::string find_program(const std::string& name) {
  if (name.empty()) throw InvalidArgument("the program's name is empty", "Name the program to run");
  if (name.find('/') != std::string::npos) {
    if (const int error = check(name)) throw_not_a_program(name, error);
    return name;
  }
  const char* variable = std::getenv("PATH");
  const std::string path = variable ? variable : "/usr/local/bin:/usr/bin:/bin";
  for (size_t begin = 0; begin <= path.size();) {
    const size_t end = std::min(path.find(':', begin), path.size());
    const std::string folder = end == begin ? "." : path.substr(begin, end - begin);
    if (const auto candidate = folder + "/" + name; check(candidate) == 0) return candidate;
    begin = end + 1;
  }
  if (const auto here = "./" + name; check(here) != ENOENT)
    throw InvalidArgument(text("there is no program '", name, "' in PATH"), text("Did you mean ", here, "?"));
  throw InvalidArgument(text("there is no program '", name, "' in PATH or in this folder"), "Check the name");
}

void throw_exec_error(const std::string& path, int error) {
  if (error == ENOEXEC)
    throw InvalidArgument(text("'", path, "' is neither a program for this machine nor a script with an interpreter"),
                          "Put a line such as #!/bin/sh first in it, or put the interpreter before it");
  if (error == ENOENT || error == ENOTDIR) {
    if (const auto interpreter = interpreter_of(path); !interpreter.empty())
      throw InvalidArgument(
          text("the interpreter '", interpreter, "' that the first line of '", path, "' names is not there"),
          "Correct that line (mind a carriage return at its end) or install the interpreter");
    if (check(path) == 0)
      throw InvalidArgument(text("the dynamic loader that '", path, "' needs is not there"),
                            "It was built for another system; build it here");
  }
  if (error == E2BIG)
    throw InvalidArgument("the arguments and the environment are too long for the system",
                          "Pass long arguments in a file");
  if (const int reason = check(path)) throw_not_a_program(path, reason);
  throw_errno(error, text("cannot start '", path, "'"));
}

}  // namespace muster::launch
