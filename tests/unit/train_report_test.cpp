// The progress bar on terminals and pipes, and the charts.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <pty.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/text.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"
#include "muster/comm/report_progress.h"
#include "muster/comm/world.h"
#include "muster/train/plot.h"
#include "muster/train/progress.h"
#include "shm/black_box_reader.h"
#include "train/axis.h"

namespace muster {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;

std::string read_available(int fd) {
  std::string all;
  char buffer[4096];
  for (;;) {
    pollfd poll{fd, POLLIN, 0};
    if (::poll(&poll, 1, 0) != 1 || (poll.revents & POLLIN) == 0) return all;
    const auto got = ::read(fd, buffer, sizeof buffer);
    if (got <= 0) return all;
    all.append(buffer, static_cast<size_t>(got));
  }
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, separator);) parts.push_back(part);
  return parts;
}

size_t columns(const std::string& text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

// An environment variable for the duration of a test.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before;
    value != nullptr ? ::setenv(name, value, 1) : ::unsetenv(name);
  }
  ~Variable() { before_ ? ::setenv(name_, before_->c_str(), 1) : ::unsetenv(name_); }

 private:
  const char* name_;
  std::optional<std::string> before_;
};

struct Pipe {
  Pipe() {
    int fds[2];
    EXPECT_EQ(::pipe2(fds, O_CLOEXEC), 0);
    out.reset(fds[0]);
    in.reset(fds[1]);
  }
  UniqueFd out, in;
};

class ProgressBar : public testing::Test {
 protected:
  ProgressOptions to(const UniqueFd& fd) {
    return {.width = 80, .fd = fd.get(), .now = [this] { return time_; }};
  }
  Clock::time_point time_ = Clock::now();
  Variable lang_{"LC_ALL", "C"}, terminal_{"MUSTER_TERMINAL", nullptr}, columns_{"COLUMNS", nullptr},
      term_{"TERM", "xterm"};
  Pipe pipe_;
};

TEST_F(ProgressBar, IsALineForEachTenthOnAPipe) {
  Progress bar(1000, to(pipe_.in));
  bar.set_label("epoch 1/1");
  for (int step = 0; step < 250; ++step) {
    time_ += 40ms;
    bar.advance(4, 0.5);
  }
  bar.finish();
  bar.finish();
  bar.advance(4);
  const auto output = read_available(pipe_.out.get());
  EXPECT_EQ(output.find('\r'), std::string::npos);
  const auto lines = split(output, '\n');
  ASSERT_EQ(lines.size(), 10u) << output;
  EXPECT_EQ(lines[4], "epoch 1/1 ############.............  50%  100 samples/s  loss 0.5000  0:05 left");
  EXPECT_EQ(lines[9], "epoch 1/1 ######################### 100%  100 samples/s  loss 0.5000  in 0:10");
}

TEST_F(ProgressBar, SkipsTenthsThatAreJumpedOver) {
  Progress bar(10, to(pipe_.in));
  bar.advance(7);
  bar.advance(1);
  bar.finish();
  const auto lines = split(read_available(pipe_.out.get()), '\n');
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_NE(lines[0].find(" 70%"), std::string::npos);
  EXPECT_NE(lines[2].find(" 80%"), std::string::npos);  // how far it came
}

TEST_F(ProgressBar, IsRedrawnInPlaceOnATerminal) {
  int controller = -1, terminal = -1;
  winsize size{.ws_row = 24, .ws_col = 60, .ws_xpixel = 0, .ws_ypixel = 0};
  ASSERT_EQ(::openpty(&controller, &terminal, nullptr, nullptr, &size), 0);
  UniqueFd master(controller), slave(terminal);
  Variable utf8("LC_ALL", "en_US.UTF-8");
  auto options = to(slave);
  options.width.reset();
  Progress bar(2000, options);
  bar.set_label("epoch 1/1");
  for (int step = 0; step < 1000; ++step) {
    time_ += 5ms;
    bar.advance(2, 0.25);
  }
  bar.finish();
  const auto output = read_available(master.get());
  auto drawings = split(output, '\r');
  ASSERT_GT(drawings.size(), 1u);
  drawings.erase(drawings.begin());  // before the first '\r'
  // 5 s: at most 10 per second, one for the label, one at the end. The terminal turns the last "\n" into "\r\n".
  EXPECT_LE(drawings.size(), 53u);
  EXPECT_GE(drawings.size(), 45u);
  for (size_t i = 0; i + 1 < drawings.size(); ++i) {
    const auto& drawing = drawings[i];
    EXPECT_TRUE(drawing.ends_with("\x1b[K")) << drawing;
    EXPECT_LT(columns(drawing) - 3, 60u) << drawing;  // the last column stays free
  }
  EXPECT_EQ(std::count(output.begin(), output.end(), '\n'), 1);
  EXPECT_TRUE(output.ends_with("\x1b[K\r\n"));
  EXPECT_NE(output.find("█"), std::string::npos);
  EXPECT_NE(output.find("100%"), std::string::npos);
}

TEST_F(ProgressBar, BelievesTheLauncherAboutATerminalBehindAPipe) {
  Variable told("MUSTER_TERMINAL", "1"), width("COLUMNS", "50");
  auto options = to(pipe_.in);
  options.width.reset();
  {
    Progress bar(10, options);
    bar.advance(5, 1.0);
  }
  const auto output = read_available(pipe_.out.get());
  EXPECT_EQ(output[0], '\r');
  EXPECT_EQ(output.back(), '\n');  // even without finish() the line is ended
  EXPECT_EQ(output.find("100%"), std::string::npos);

  // What the launcher says about the output does not hold for a file.
  char name[] = "/tmp/muster-progress-XXXXXX";
  UniqueFd file(::mkostemp(name, O_CLOEXEC));
  ASSERT_TRUE(file);
  options.fd = file.get();
  Progress(10, options).finish();
  struct stat status {};
  ::fstat(file.get(), &status);
  std::string written(static_cast<size_t>(status.st_size), 0);
  EXPECT_EQ(::pread(file.get(), written.data(), written.size(), 0), status.st_size);
  ::unlink(name);
  EXPECT_EQ(written.find('\r'), std::string::npos);
  EXPECT_NE(written.find("0%"), std::string::npos);
}

TEST_F(ProgressBar, FitsEveryWidthAndIsSilentWhereTold) {
  for (int width = 1; width < 130; ++width) {
    auto options = to(pipe_.in);
    options.width = width;
    options.terminal = true;
    options.unicode = true;
    Progress bar(100, options);
    bar.set_label("epoch 10/10");
    time_ += 1s;
    bar.advance(33, 2.5);
    bar.finish();
    for (auto& line : split(read_available(pipe_.out.get()), '\r')) {
      line = line.substr(0, line.find('\x1b'));
      EXPECT_LE(columns(line), std::max(4u, static_cast<unsigned>(width) - 1)) << line;
    }
  }
  auto options = to(pipe_.in);
  options.draw = false;
  Progress bar(100, options);
  bar.set_label("silent");
  bar.advance(100);
  bar.finish();
  EXPECT_EQ(bar.done(), 100);
  EXPECT_EQ(read_available(pipe_.out.get()), "");
}

// What the black boxes of this process hold, found as `muster top` finds them; by rank.
std::vector<shm::BlackBoxTraining> reported(int ranks) {
  std::vector<shm::BlackBoxTraining> all(static_cast<size_t>(ranks));
  for (int fd = 0; fd < 1024; ++fd) {
    char target[64] = {};
    if (::readlink(text("/proc/self/fd/", fd).c_str(), target, sizeof target - 1) < 0 ||
        std::string(target).find(shm::kBlackBoxName) == std::string::npos)
      continue;
    const auto box = shm::read_black_box(fd);
    if (box.world_size == ranks) all.at(static_cast<size_t>(box.rank)) = box.training;
  }
  return all;
}

TEST(ReportProgress, ReachesTheRanksBlackBox) {
  report_progress({.step = 1});  // without a World: nothing happens
  run_threads(2, [](World& world) {
    const auto mine = [&] { return reported(2).at(static_cast<size_t>(world.rank())); };
    EXPECT_EQ(mine().reports, 0u);
    report_progress({.step = 10 + world.rank(), .samples = 640});
    EXPECT_EQ(mine().step, static_cast<uint64_t>(10 + world.rank()));
    EXPECT_EQ(mine().samples, 640u);
    report_progress({.samples = 700});
    EXPECT_EQ(mine().step, static_cast<uint64_t>(10 + world.rank())) << "as it was";
    EXPECT_EQ(mine().samples, 700u);
    barrier();  // the other rank reads this rank's box too
  });
}

TEST(ReportProgress, ProgressDoesItOnEveryRank) {
  const UniqueFd null(::open("/dev/null", O_WRONLY | O_CLOEXEC));
  run_threads(2, [&](World& world) {
    Progress bar(1000, {.fd = null.get()});
    for (int step = 0; step < 3; ++step) bar.advance(64, 0.5);
    const auto mine = reported(2).at(static_cast<size_t>(world.rank()));
    EXPECT_EQ(mine.step, 3u);
    EXPECT_EQ(mine.samples, 192u);
    barrier();  // the other rank reads this rank's box too
  });
}

TEST_F(ProgressBar, CopesWithStrangeNumbers) {
  Progress nothing(0, to(pipe_.in));
  nothing.finish();
  EXPECT_NE(read_available(pipe_.out.get()).find("100%"), std::string::npos);
  Progress bar(10, to(pipe_.in));
  time_ += 1s;
  bar.advance(20, std::nan(""));  // further than the end
  bar.finish();
  EXPECT_NE(read_available(pipe_.out.get()).find("100%  20 samples/s  loss nan"), std::string::npos);
}

// ------------------------------------------------------------------------------------------------------------- charts

// Checks that it is well-formed XML (of the kind that we write: no comments, no CDATA). Returns "" or what is wrong.
std::string xml_fault(const std::string& xml) {
  std::vector<std::string> open;
  size_t at = 0, roots = 0;
  const auto bad_text = [](std::string_view text) {
    for (size_t i = 0; i < text.size(); ++i) {
      const auto byte = static_cast<unsigned char>(text[i]);
      if (byte < 0x20 && byte != '\n' && byte != '\t') return true;
      if (text[i] != '&') continue;
      const auto rest = text.substr(i);
      if (!rest.starts_with("&amp;") && !rest.starts_with("&lt;") && !rest.starts_with("&gt;") &&
          !rest.starts_with("&quot;") && !rest.starts_with("&apos;")) {
        return true;
      }
    }
    return false;
  };
  while (at < xml.size()) {
    const auto tag = xml.find('<', at);
    const auto between = std::string_view(xml).substr(at, tag == std::string::npos ? std::string::npos : tag - at);
    if (bad_text(between) || (open.empty() && between.find_first_not_of("\n ") != std::string::npos))
      return "text: " + std::string(between);
    if (tag == std::string::npos) break;
    const auto end = xml.find('>', tag);  // '>' is escaped in attributes
    if (end == std::string::npos) return "unclosed tag";
    std::string body = xml.substr(tag + 1, end - tag - 1);
    at = end + 1;
    if (body.starts_with("/")) {
      if (open.empty() || open.back() != body.substr(1)) return "closes " + body;
      open.pop_back();
      continue;
    }
    const bool alone = body.ends_with("/");
    if (alone) body.pop_back();
    const auto name = body.substr(0, body.find(' '));
    if (std::count(body.begin(), body.end(), '"') % 2 != 0 || body.find('<') != std::string::npos || bad_text(body)) {
      return "attributes of " + body;
    }
    if (open.empty()) ++roots;
    if (!alone) open.push_back(name);
  }
  if (!open.empty()) return "open: " + open.back();
  return roots == 1 ? "" : "not one root";
}

size_t count(const std::string& text, const std::string& part) {
  size_t found = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

TEST(Chart, HoldsItsSeriesAndValues) {
  const auto svg =
      to_svg({.title = "Curves",
              .subtitle = "two ranks",
              .panels = {{.title = "Loss", .x_label = "epoch", .series = {{"training", {0, 1, 2}, {2, 1, 0.5}}}},
                         {.title = "Accuracy",
                          .x_label = "epoch",
                          .series = {{.name = "test", .x = {1, 2}, .y = {88.26, 91.5}, .markers = true, .color = 1}},
                          .y_unit = " %"}}});
  EXPECT_EQ(xml_fault(svg), "");
  for (const auto* part : {">Curves<", ">two ranks<", ">Loss<", ">Accuracy<", ">training<", ">test<", ">epoch<",
                           "<title>test: epoch 1, 88.3 %</title>", ">91.5 %</text>", ">2.0</text>", "#D55E00"}) {
    EXPECT_NE(svg.find(part), std::string::npos) << part;
  }
  EXPECT_EQ(count(svg, "<circle"), 3u);  // two points and the legend
  EXPECT_EQ(count(svg, "<path"), 2u);
}

TEST(Chart, DrawsWhatIsThereAndLeavesGaps) {
  const double nan = std::nan(""), inf = std::numeric_limits<double>::infinity();
  const auto path = [](const Series& series) {
    const auto svg = to_svg({.panels = {{.series = {series}}}});
    EXPECT_EQ(xml_fault(svg), "");
    EXPECT_EQ(svg.find("nan"), std::string::npos);
    EXPECT_EQ(svg.find("inf"), std::string::npos);
    const auto start = svg.find(" d=\"");
    return start == std::string::npos ? svg : svg.substr(start + 4, svg.find('"', start + 4) - start - 4);
  };
  EXPECT_NE(path({}).find("no data"), std::string::npos);
  EXPECT_NE(path({"a", {1, 2}, {nan, nan}}).find("no data"), std::string::npos);
  EXPECT_EQ(count(path({"a", {1, 2, 3, 4}, {1, 2, 3, 4}}), "M"), 1u);
  EXPECT_EQ(count(path({"a", {1, 2, 3, 4}, {1, nan, 3, 4}}), "M"), 2u);
  EXPECT_EQ(count(path({"a", {1, 2, 3, 4}, {1, inf, -inf, 1e300}}), "M"), 1u);
  for (const double value : {0.0, 5.0, -1e-30, 1e99, 91.5}) {
    EXPECT_EQ(count(path({"a", {1, 2}, {value, value}}), "M"), 1u) << value;  // constant
    EXPECT_EQ(count(path({"a", {value}, {value}}), "M"), 1u) << value;        // one point
  }
  EXPECT_EQ(xml_fault(to_svg({})), "");
  EXPECT_THROW(to_svg({.panels = {{.series = {{"a", {1, 2}, {1}}}}}}), InvalidArgument);
}

TEST(Chart, EscapesItsTexts) {
  const std::string texts[] = {"a < b & \"c\" > 'd'", "Verlust für Größe ½ 損失 🚀", std::string("nul\0 bell\a", 10),
                               "\xff\xc3(\xed\xa0\x80 cut \xe6"};
  for (const auto& text : texts) {
    const auto svg = to_svg({.title = text,
                             .subtitle = text,
                             .panels = {{.title = text,
                                         .x_label = text,
                                         .series = {{.name = text, .x = {1}, .y = {1}, .markers = true}},
                                         .y_unit = text}}});
    EXPECT_EQ(xml_fault(svg), "") << text;
  }
  EXPECT_NE(to_svg({.title = texts[0]}).find("a &lt; b &amp; &quot;c&quot; &gt; &apos;d&apos;"), std::string::npos);
  EXPECT_NE(to_svg({.title = texts[1]}).find(texts[1]), std::string::npos);
  EXPECT_NE(to_svg({.title = texts[2]}).find("nul? bell?"), std::string::npos);
  EXPECT_NE(to_svg({.title = texts[3]}).find("?\?(??\? cut ?"), std::string::npos);
}

TEST(Axis, HasRoundTicks) {
  const auto labels = [](const plot::Axis& axis) {
    std::vector<std::string> all;
    for (const double tick : axis.ticks) all.push_back(axis.label(tick));
    return all;
  };
  using Labels = std::vector<std::string>;
  EXPECT_EQ(labels(plot::make_axis(0, 8, 8, false)), (Labels{"0", "1", "2", "3", "4", "5", "6", "7", "8"}));
  EXPECT_EQ(labels(plot::make_axis(83.4, 91.9, 5, true)), (Labels{"82", "84", "86", "88", "90", "92"}));
  EXPECT_EQ(labels(plot::make_axis(0.11, 0.49, 5, true)), (Labels{"0.1", "0.2", "0.3", "0.4", "0.5"}));
  EXPECT_EQ(labels(plot::make_axis(-1, 1, 4, true)), (Labels{"-1.0", "-0.5", "0.0", "0.5", "1.0"}));
  EXPECT_EQ(labels(plot::make_axis(5e6, 1e7, 5, true)).back(), "1e+07");
  for (const double low : {-1e99, -3.7, 0.0, 1e-20, 2.5, 1e9}) {
    for (const double size : {0.0, 1e-12, 0.3, 7.0, 1e15, 1e99}) {
      const auto axis = plot::make_axis(low, low + size, 6, true);
      EXPECT_LT(axis.low, axis.high);
      EXPECT_GE(axis.ticks.size(), 2u) << low << " " << size;
      EXPECT_LE(axis.ticks.size(), 13u) << low << " " << size;
      EXPECT_GE(axis.fraction(low), -1e-6);
      EXPECT_LE(axis.fraction(low + size), 1 + 1e-6);
    }
  }
}

TEST(WriteSvg, ReplacesTheFileWholeOrNotAtAll) {
  std::string pattern = (fs::temp_directory_path() / "muster-svg-XXXXXX").string();
  const fs::path folder = ::mkdtemp(pattern.data());
  const auto path = folder / "curves.svg";
  std::ofstream(path) << "before";
  write_svg(path, {.title = "after"});
  std::stringstream content;
  content << std::ifstream(path).rdbuf();
  EXPECT_EQ(content.str(), to_svg({.title = "after"}));
  EXPECT_THROW(write_svg(folder / "none" / "curves.svg", {}), Unavailable);
  fs::create_directory(folder / "taken.svg");
  EXPECT_THROW(write_svg(folder / "taken.svg", {}), Unavailable);
  size_t files = 0;
  for (const auto& entry : fs::directory_iterator(folder)) files += !entry.path().empty();
  EXPECT_EQ(files, 2u);  // no temporary file is left
  fs::remove_all(folder);
}

}  // namespace
}  // namespace muster
