// A progress bar for the whole job, drawn by rank 0; on the other ranks nothing is drawn.
//
//   muster::Progress bar(epochs * images);
//   bar.set_label("epoch 3/10");
//   bar.advance(global_batch, loss);
//   bar.finish();
//
//   epoch 3/10 ███████████▍             46%  9,214 samples/s  loss 0.2518  0:31 left
//
// On a terminal the bar is redrawn in place, at most ten times per second; elsewhere one line is written per tenth of
// the total. A terminal is what isatty(3) says is one; MUSTER_TERMINAL=1 says it too (`muster run` sets it, whose ranks
// write into pipes). Each drawing is one write(2), so other output cannot split it. The width is COLUMNS, else the
// terminal's; parts that do not fit are left out, the bar first.
//
// On every rank, each advance() is also a step for `muster top` (muster/comm/report_progress.h).
//
// advance() costs nanoseconds between two drawings. Nothing here throws: a bar that cannot be drawn must not end a
// training.
//
// Thread-safety: none; one thread at a time.
#pragma once

#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "muster/base/deadline.h"

namespace muster {

struct ProgressOptions {
  std::optional<bool> draw;      // default: true on rank 0 of the calling thread's World, and without a World
  std::optional<bool> terminal;  // default: as above
  std::optional<bool> unicode;   // block characters; default: true if the locale is UTF-8
  std::optional<int> width;      // in columns; default: as above
  int fd = STDERR_FILENO;        // not owned
  std::string unit = "samples";
  std::function<Clock::time_point()> now = Clock::now;  // for tests
};

class Progress {
 public:
  // `total`: units of the whole job (not of one rank) until it is complete.
  explicit Progress(int64_t total, ProgressOptions options = {});
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress();  // ends the line if finish() was not called, e.g. after an exception

  void set_label(std::string label);
  // Adds `units` to what is done, and the newest loss if given. The bar shows a moving average of about 20 losses.
  void advance(int64_t units, std::optional<double> loss = std::nullopt);
  // Draws the bar one last time, with the time taken, and ends its line. Later calls do nothing.
  void finish();

  int64_t done() const { return done_; }

 private:
  void draw(bool last);
  std::string line(bool last);
  void write(const std::string& bytes) const;

  ProgressOptions options_;
  bool active_ = false, terminal_ = false, unicode_ = false, on_line_ = false;
  int width_ = 80, bar_width_ = 40;
  int64_t total_, done_ = 0, steps_ = 0, next_tenth_ = 1;
  std::string label_;
  std::optional<double> loss_;
  Clock::time_point start_, drawn_;
};

}  // namespace muster
