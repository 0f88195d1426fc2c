// The picture that an example draws of its learning: one value per outer step.
#pragma once

#include <muster/train/plot.h>

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <string>
#include <vector>

// Draws the values in `file`, an SVG, and says so. "": no picture.
inline void draw_curve(const std::string& file, const std::string& title, const std::string& subtitle,
                       const std::string& y_label, const std::vector<double>& values,
                       const std::string& x_label = "outer step") {
  if (file.empty()) return;
  std::vector<double> steps(values.size());
  std::iota(steps.begin(), steps.end(), 1);
  muster::write_svg(file, {.title = title,
                           .subtitle = subtitle,
                           .panels = {{.title = y_label,
                                       .x_label = x_label,
                                       .series = {{.x = steps, .y = values}},
                                       .x_whole = true,
                                       .y_min = std::min(0.0, *std::min_element(values.begin(), values.end()))}}});
  std::printf("the curve is in %s\n", file.c_str());
}
