// A progress bar for the whole job, drawn by rank 0; on the other ranks nothing is drawn.
//
//   muster::Progress bar(epochs * images);
//   bar.set_label("epoch 3/10");
//   bar.advance(global_batch, loss);
//   bar.finish();
//
//   epoch 3/10 ███████████▍             46%  9,214 samples/s  loss 0.2518  0:31 left
//
// On a terminal, which is what isatty(3) or MUSTER_TERMINAL=1 (set by `muster run`, whose ranks write into pipes) calls
// one, the bar is redrawn in place, at most ten times a second; elsewhere it is a line for each tenth of the way. Each
// drawing is one write(2), so other output cannot tear it. The width is COLUMNS, else the terminal's; what does not fit
// is left out, the bar first.
//
// On every rank, each advance() is also a step for `muster top` (muster/comm/report_progress.h).
//
// advance() costs nanoseconds between two drawings. Nothing here throws: a bar that cannot be drawn is no reason to
// lose a training.
//
// Thread-safety: none; one thread.
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
  std::optional<bool> draw;      // default: on rank 0 of the calling thread's World, and where there is none
  std::optional<bool> terminal;  // default: as above
  std::optional<bool> unicode;   // block characters; default: where the locale is UTF-8
  std::optional<int> width;      // in columns; default: as above
  int fd = STDERR_FILENO;        // not owned
  std::string unit = "samples";
  std::function<Clock::time_point()> now = Clock::now;  // for tests
};

class Progress {
 public:
  // `total`: how far it is, in units of the whole job (not of one rank).
  explicit Progress(int64_t total, ProgressOptions options = {});
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress();  // ends the line where finish() was not called, e.g. by an exception

  void set_label(std::string label);
  // `units` further, with the newest loss where there is one. The bar shows a moving average of about 20.
  void advance(int64_t units, std::optional<double> loss = std::nullopt);
  // Draws the bar as it stands a last time, with the time taken, and ends its line. Later calls do nothing.
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
