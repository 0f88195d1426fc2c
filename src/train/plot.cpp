#include "muster/train/plot.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string_view>

#include "base/atomic_file.h"
#include "base/text.h"
#include "muster/base/error.h"
#include "train/axis.h"

namespace muster {
namespace {

using plot::Axis;
using plot::fixed;

// Okabe and Ito, "Color Universal Design", 2008; without black, and without yellow, which is hard to see on white.
constexpr std::array<const char*, 7> kColors = {"#0072B2", "#D55E00", "#009E73", "#CC79A7",
                                                "#E69F00", "#56B4E9", "#555555"};
constexpr double kLargest = 1e100;

// In pixels.
constexpr double kMargin = 24, kPlotWidth = 400, kPlotHeight = 250, kAxisWidth = 52, kEndWidth = 58, kPanelGap = 20;
constexpr double kPanelHead = 64, kPanelFoot = 46;

std::string escape(std::string_view raw) {
  std::string out;
  for (size_t i = 0; i < raw.size();) {
    const auto byte = static_cast<unsigned char>(raw[i]);
    const size_t length = byte < 0x80                   ? 1
                          : byte >= 0xC2 && byte < 0xE0 ? 2
                          : byte >= 0xE0 && byte < 0xF0 ? 3
                          : byte >= 0xF0 && byte < 0xF5 ? 4
                                                        : 0;
    bool valid = length > 0 && i + length <= raw.size() && (byte >= 0x20 || byte == '\t' || byte == '\n');
    uint32_t code = length < 2 ? byte : byte & (0x7Fu >> length);
    for (size_t k = 1; valid && k < length; ++k) {
      const auto next = static_cast<unsigned char>(raw[i + k]);
      valid = (next & 0xC0) == 0x80;
      code = code << 6 | (next & 0x3Fu);
    }
    // Overlong forms, surrogates and the two code points that XML leaves out.
    constexpr uint32_t kFirstOf[] = {0, 0, 0x80, 0x800, 0x10000};
    valid = valid && code >= kFirstOf[length] && code <= 0x10FFFF && (code < 0xD800 || code > 0xDFFF) &&
            code != 0xFFFE && code != 0xFFFF;
    if (!valid) {
      out += '?';
      ++i;
      continue;
    }
    switch (byte) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&apos;";
        break;
      default:
        out += raw.substr(i, length);
    }
    i += length;
  }
  return out;
}

// About the width of the text in a font of 12 pixels. Counts characters, not bytes.
double text_width(std::string_view text) {
  return 6.9 * static_cast<double>(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

bool visible(double x, double y) { return std::abs(x) < kLargest && std::abs(y) < kLargest; }  // false for NaN

struct Range {
  double low = std::numeric_limits<double>::infinity(), high = -std::numeric_limits<double>::infinity();
  void add(double value) {
    low = std::min(low, value);
    high = std::max(high, value);
  }
  bool empty() const { return low > high; }
};

class PanelDrawing {
 public:
  PanelDrawing(std::ostream& out, const Panel& panel, size_t number, double left, double top)
      : out_(out), panel_(panel), clip_(text("panel", number)), left_(left + kAxisWidth), top_(top + kPanelHead) {}

  void draw() {
    write(left_, top_ - 34, escape(panel_.title), "class=\"panel\"");
    Range x, y;
    for (const auto& series : panel_.series) {
      for (size_t i = 0; i < series.x.size(); ++i) {
        if (!visible(series.x[i], series.y[i])) continue;
        x.add(series.x[i]);
        y.add(series.y[i]);
      }
    }
    const bool empty = x.empty();
    x_ = empty ? Axis{} : x_axis(x);
    y_ = empty ? Axis{} : y_axis(y);
    grid();
    if (empty)
      write(left_ + kPlotWidth / 2, top_ + kPlotHeight / 2, "no data", "class=\"tick\" text-anchor=\"middle\"");
    legend();
    // y_min and y_max may leave points out. The clip is a few pixels larger than the plotting area, so that no line on
    // the area's border is cut in half.
    out_ << "<clipPath id=\"" << clip_ << "\"><rect x=\"" << fixed(left_ - 3, 1) << "\" y=\"" << fixed(top_ - 3, 1)
         << "\" width=\"" << fixed(kPlotWidth + 6, 1) << "\" height=\"" << fixed(kPlotHeight + 6, 1)
         << "\"/></clipPath>\n";
    for (size_t i = 0; i < panel_.series.size(); ++i) line(panel_.series[i], color(i));
    for (size_t i = 0; i < panel_.series.size(); ++i) {
      if (panel_.series[i].markers) markers(panel_.series[i], color(i));
    }
    end_labels();
  }

 private:
  Axis x_axis(const Range& data) const {
    const double low = panel_.x_min.value_or(data.low);
    const int ticks = panel_.x_whole ? static_cast<int>(std::clamp(data.high - low, 1.0, 8.0)) : 8;
    return plot::make_axis(low, data.high, ticks, false);
  }
  Axis y_axis(const Range& data) const {
    const double low = panel_.y_min.value_or(std::min(data.low, panel_.y_max.value_or(data.low)));
    const double high = panel_.y_max.value_or(std::max(data.high, panel_.y_min.value_or(data.high)));
    return plot::make_axis(low, high, 5, true);
  }

  const char* color(size_t i) const {
    const auto number =
        panel_.series[i].color ? static_cast<unsigned>(*panel_.series[i].color) : static_cast<unsigned>(i);
    return kColors[number % kColors.size()];
  }
  double px(double x) const { return left_ + kPlotWidth * x_.fraction(x); }
  // Bounds the coordinate, so that a point far outside does not get one of a hundred digits.
  double py(double y) const { return top_ + kPlotHeight * (1 - std::clamp(y_.fraction(y), -1.0, 2.0)); }

  void write(double x, double y, const std::string& escaped, std::string_view attributes) {
    out_ << "<text x=\"" << fixed(x, 1) << "\" y=\"" << fixed(y, 1) << "\" " << attributes << ">" << escaped
         << "</text>\n";
  }
  void rule(double x1, double y1, double x2, double y2, std::string_view kind) {
    out_ << "<line x1=\"" << fixed(x1, 1) << "\" y1=\"" << fixed(y1, 1) << "\" x2=\"" << fixed(x2, 1) << "\" y2=\""
         << fixed(y2, 1) << "\" class=\"" << kind << "\"/>\n";
  }

  void grid() {
    const double right = left_ + kPlotWidth, bottom = top_ + kPlotHeight;
    for (const double tick : y_.ticks) {
      rule(left_, py(tick), right, py(tick), "grid");
      write(left_ - 9, py(tick) + 4, y_.label(tick) + escape(panel_.y_unit), "class=\"tick\" text-anchor=\"end\"");
    }
    rule(left_, bottom, right, bottom, "axis");
    for (const double tick : x_.ticks) {
      rule(px(tick), bottom, px(tick), bottom + 5, "axis");
      write(px(tick), bottom + 19, x_.label(tick), "class=\"tick\" text-anchor=\"middle\"");
    }
    write(left_ + kPlotWidth / 2, bottom + 38, escape(panel_.x_label), "class=\"tick\" text-anchor=\"middle\"");
  }

  void legend() {
    double x = left_;
    for (size_t i = 0; i < panel_.series.size(); ++i) {
      const auto& series = panel_.series[i];
      if (series.name.empty()) continue;
      const double y = top_ - 14;
      out_ << "<line x1=\"" << fixed(x, 1) << "\" y1=\"" << fixed(y, 1) << "\" x2=\"" << fixed(x + 18, 1) << "\" y2=\""
           << fixed(y, 1) << "\" class=\"line\" stroke=\"" << color(i) << "\"/>\n";
      if (series.markers) dot(x + 9, y, color(i), "");
      write(x + 24, y + 4, escape(series.name), "class=\"legend\"");
      x += 24 + text_width(series.name) + 18;
    }
  }

  void dot(double x, double y, const char* color, const std::string& title) {
    out_ << "<circle cx=\"" << fixed(x, 1) << "\" cy=\"" << fixed(y, 1) << "\" r=\"3.5\" class=\"dot\" fill=\"" << color
         << "\"";
    out_ << (title.empty() ? "/>\n" : "><title>" + title + "</title></circle>\n");
  }

  void line(const Series& series, const char* color) {
    std::string path;
    bool pen_down = false;
    for (size_t i = 0; i < series.x.size(); ++i) {
      const bool here = visible(series.x[i], series.y[i]);
      // A lone point becomes a line to itself. The round line cap draws that as a dot.
      if (here) {
        const auto place = fixed(px(series.x[i]), 1) + " " + fixed(py(series.y[i]), 1);
        path += pen_down ? "L" + place : "M" + place + "L" + place;
      }
      pen_down = here;
    }
    if (path.empty()) return;
    out_ << "<path class=\"" << (series.faint ? "faint" : "line") << "\" stroke=\"" << color << "\" clip-path=\"url(#"
         << clip_ << ")\" d=\"" << path << "\"/>\n";
  }

  void markers(const Series& series, const char* color) {
    for (size_t i = 0; i < series.x.size(); ++i) {
      if (!visible(series.x[i], series.y[i]) || y_.fraction(series.y[i]) < -0.01 || y_.fraction(series.y[i]) > 1.01)
        continue;
      std::string title = escape(series.name);
      if (!title.empty()) title += ": ";
      title += escape(panel_.x_label) + (panel_.x_label.empty() ? "" : " ") + plot::general(series.x[i], 6) + ", " +
               value(series.y[i]);
      dot(px(series.x[i]), py(series.y[i]), color, title);
    }
  }

  std::string value(double y) const { return fixed(y, std::min(y_.decimals + 1, 8)) + escape(panel_.y_unit); }

  // Writes the last value of each series with markers beside its point. Moves labels apart that would overlap.
  void end_labels() {
    struct Label {
      double x, y;
      std::string text;
      const char* color;
    };
    std::vector<Label> labels;
    for (size_t i = 0; i < panel_.series.size(); ++i) {
      const auto& series = panel_.series[i];
      if (!series.markers || series.x.empty() || !visible(series.x.back(), series.y.back())) continue;
      if (const double at = y_.fraction(series.y.back()); at < -0.01 || at > 1.01) continue;
      labels.push_back({px(series.x.back()) + 9, py(series.y.back()) + 4, value(series.y.back()), color(i)});
    }
    std::sort(labels.begin(), labels.end(), [](const Label& a, const Label& b) { return a.y < b.y; });
    for (size_t i = 1; i < labels.size(); ++i) {
      const double overlap = 14 - (labels[i].y - labels[i - 1].y);
      if (overlap <= 0) continue;
      if (i == 1) labels[0].y -= overlap / 2;  // the first two share the move; the others move down only
      labels[i].y = labels[i - 1].y + 14;
    }
    for (const auto& label : labels)
      write(label.x, label.y, label.text, text("class=\"end\" style=\"fill: ", label.color, "\""));
  }

  std::ostream& out_;
  const Panel& panel_;
  std::string clip_;
  double left_, top_;  // of the plotting area
  Axis x_, y_;
};

void check(const Chart& chart) {
  for (const auto& panel : chart.panels) {
    for (const auto& series : panel.series) {
      if (series.x.size() == series.y.size()) continue;
      throw InvalidArgument(text("the series \"", series.name, "\": expected a y for each of ", series.x.size(),
                                 " x, got ", series.y.size()),
                            "Give each point an x and a y");
    }
  }
}

}  // namespace

std::string to_svg(const Chart& chart) {
  check(chart);
  const double panel_width = kAxisWidth + kPlotWidth + kEndWidth;
  const auto panels = static_cast<double>(std::max<size_t>(chart.panels.size(), 1));
  const double head = kMargin + (chart.title.empty() ? 0 : 24) + (chart.subtitle.empty() ? 0 : 20);
  const double width = 2 * kMargin + panels * panel_width + (panels - 1) * kPanelGap;
  const double height = head + kPanelHead + kPlotHeight + kPanelFoot + kMargin / 2;

  PlainOutput out;
  out << "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" << fixed(width, 0) << "\" height=\"" << fixed(height, 0)
      << "\" viewBox=\"0 0 " << fixed(width, 0) << " " << fixed(height, 0) << "\" role=\"img\">\n";
  out << "<title>" << escape(chart.title) << "</title>\n";
  out << "<style>\n"
         "text { font-family: 'Inter', 'Helvetica Neue', 'Segoe UI', 'Noto Sans', 'DejaVu Sans', sans-serif; fill: "
         "#24292f }\n"
         ".title { font-size: 19px; font-weight: 600 } .sub { font-size: 13px; fill: #57606a }\n"
         ".panel { font-size: 14px; font-weight: 600 } .legend { font-size: 12px }\n"
         ".tick { font-size: 12px; fill: #57606a } .end { font-size: 12px; font-weight: 600 }\n"
         ".grid { stroke: #e7eaee; stroke-width: 1 } .axis { stroke: #8c959f; stroke-width: 1 }\n"
         ".line, .faint { fill: none; stroke-linejoin: round; stroke-linecap: round }\n"
         ".line { stroke-width: 2.2 } .faint { stroke-width: 1.2; opacity: 0.3 }\n"
         ".dot { stroke: #ffffff; stroke-width: 1.4 }\n"
         "</style>\n";
  out << "<rect width=\"100%\" height=\"100%\" rx=\"8\" fill=\"#ffffff\"/>\n";

  double y = kMargin;
  if (!chart.title.empty()) {
    out << "<text x=\"" << kMargin << "\" y=\"" << fixed(y + 16, 0) << "\" class=\"title\">" << escape(chart.title)
        << "</text>\n";
    y += 24;
  }
  if (!chart.subtitle.empty()) {
    out << "<text x=\"" << kMargin << "\" y=\"" << fixed(y + 14, 0) << "\" class=\"sub\">" << escape(chart.subtitle)
        << "</text>\n";
  }
  for (size_t i = 0; i < chart.panels.size(); ++i) {
    PanelDrawing(out, chart.panels[i], i, kMargin + static_cast<double>(i) * (panel_width + kPanelGap), head).draw();
  }
  out << "</svg>\n";
  return std::move(out).str();
}

void write_svg(const std::filesystem::path& path, const Chart& chart) { write_file(path, to_svg(chart)); }

}  // namespace muster
