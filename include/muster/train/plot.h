// Line charts as SVG: the curves of a training, side by side, drawn without a plotting library.
//
//   muster::write_svg("curves.svg", {.title = "Fashion-MNIST",
//                                    .panels = {{.title = "loss", .x_label = "epoch", .series = {{"train", x, y}}}}});
//
// Colours are Okabe and Ito's, which people with any kind of colour vision can tell apart. The n-th series of every
// panel has the same colour. A point that is not finite, or beyond 1e100, is a gap in its line. A panel without any
// point says so. Texts may hold any UTF-8; characters that XML cannot hold become '?'.
//
// Thread-safety: any number of threads may call these functions.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace muster {

struct Series {
  std::string name;          // in the legend; an empty name is left out
  std::vector<double> x, y;  // of the same length
  bool markers = false;  // a dot at each point, which shows its values when pointed at, and the last value in writing
  bool faint = false;    // for a noisy line behind its smoothed one
  std::optional<int> color;  // number in the palette of 7; default: the series' place in its panel
};

struct Panel {
  std::string title, x_label;
  std::vector<Series> series;
  bool x_whole = false;                       // x counts something: no ticks between whole numbers
  std::string y_unit;                         // after the numbers of the y axis, e.g. " %"
  std::optional<double> x_min, y_min, y_max;  // default: what the data need; points beyond are cut off
};

struct Chart {
  std::string title, subtitle;
  std::vector<Panel> panels;  // from left to right
};

// The chart as an SVG document. InvalidArgument if a series' x and y differ in length.
std::string to_svg(const Chart& chart);

// Writes it to a file atomically: a reader never sees half of it. Unavailable if the file cannot be written.
void write_svg(const std::filesystem::path& path, const Chart& chart);

}  // namespace muster
