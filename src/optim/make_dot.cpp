#include "muster/optim/make_dot.h"

#include <spawn.h>
#include <sys/wait.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <cerrno>
#include <cstdio>
#include <fstream>
#include <map>
#include <system_error>
#include <unordered_map>
#include <vector>

#include "base/log.h"
#include "base/text.h"
#include "muster/base/error.h"

extern char** environ;

namespace muster::optim {
namespace {

using at::Tensor;
using torch::autograd::Edge;
using torch::autograd::Node;

std::string quoted(const std::string& words) {
  std::string result = "\"";
  for (const char c : words) {
    if (c == '"' || c == '\\') result += '\\';
    result += c;
  }
  return result + '"';
}

class Drawing {
 public:
  explicit Drawing(const NamedTensors& names) {
    for (const auto& [name, tensor] : names)
      if (tensor.defined() && tensor.requires_grad()) {
        const Edge edge = torch::autograd::impl::gradient_edge(tensor);
        names_.try_emplace({edge.function.get(), edge.input_nr}, text(name, "\\n", tensor.sizes()));
      }
  }

  void add_result(const Tensor& tensor, size_t number) {
    const std::string id = text("result", number);
    out_ << "  " << id << " [shape=ellipse, peripheries=2, label=\"result " << number << "\\n"
         << tensor.sizes() << "\"];\n";
    if (tensor.requires_grad()) connect(torch::autograd::impl::gradient_edge(tensor), id);
  }

  std::string text_of() const {
    return text("digraph autograd {\n  node [shape=box, fontsize=10];\n", out_.str(), "}\n");
  }

 private:
  // The arrow from what an edge leads to; and, the first time, all that is behind it. Iterative: graphs are deep.
  void connect(const Edge& first, const std::string& to) {
    std::vector<std::pair<Edge, std::string>> ahead{{first, to}};
    while (!ahead.empty()) {
      const auto [edge, target] = std::move(ahead.back());
      ahead.pop_back();
      if (!edge.is_valid()) continue;
      Node* const node = edge.function.get();
      const auto [known, fresh] = ids_.try_emplace(node, ids_.size());
      std::string id = text("n", known->second);
      auto* const leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(node);
      const auto name = names_.find({node, edge.input_nr});
      if (fresh && leaf)
        out_ << "  " << id << " [shape=ellipse, style=filled, fillcolor=lightblue, label="
             << label(name != names_.end() ? name->second : text("leaf\\n", leaf->variable.sizes())) << "];\n";
      else if (fresh)
        out_ << "  " << id << " [label=" << quoted(node->name()) << "];\n";
      if (name != names_.end() && !leaf) {
        const std::string named = text(id, "_", edge.input_nr);
        if (shown_.try_emplace({node, edge.input_nr}, true).second)
          out_ << "  " << named << " [shape=ellipse, style=filled, fillcolor=lightblue, label=" << label(name->second)
               << "];\n  " << id << " -> " << named << ";\n";
        id = named;
      }
      out_ << "  " << id << " -> " << target << ";\n";
      if (!fresh) continue;
      const std::string own = text("n", known->second);
      const auto& edges = node->next_edges();
      for (auto next = edges.rbegin(); next != edges.rend(); ++next) ahead.emplace_back(*next, own);
    }
  }

  // A name with its shape; \n between them is DOT's.
  static std::string label(const std::string& name) {
    const size_t line = name.rfind("\\n");
    std::string result = quoted(name.substr(0, line));
    result.insert(result.size() - 1, name.substr(line));
    return result;
  }

  std::map<std::pair<Node*, uint32_t>, std::string> names_;
  std::map<std::pair<Node*, uint32_t>, bool> shown_;
  std::unordered_map<Node*, size_t> ids_;
  PlainOutput out_;
};

void write(const std::string& path, const std::string& dot) {
  std::ofstream file(path);
  file << dot;
  if (!file.flush()) throw InvalidArgument(text("cannot write to '", path, "'"));
}

// False if there is no program to draw with; then the source stays.
bool draw(const std::string& source, const std::string& path) {
  std::string arguments[] = {"dot", "-Tsvg", "-o", path, source};
  std::vector<char*> argv;
  for (auto& each : arguments) argv.push_back(each.data());
  argv.push_back(nullptr);
  pid_t child;
  const int error = posix_spawnp(&child, "dot", nullptr, nullptr, argv.data(), environ);
  int status = 0;
  if (!error)
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
  if (error == ENOENT) return false;
  std::remove(source.c_str());
  if (error) throw Unavailable(text("cannot start 'dot': ", std::generic_category().message(error)));
  if (status != 0) throw InvalidArgument(text("dot could not draw '", path, "' (status ", status, ")"));
  return true;
}

}  // namespace

std::string make_dot(const Tensors& results, const NamedTensors& names) {
  Drawing drawing(names);
  for (size_t i = 0; i < results.size(); ++i) {
    if (!results[i].defined()) throw InvalidArgument(text("result ", i, " is undefined"));
    drawing.add_result(results[i], i);
  }
  return drawing.text_of();
}

std::string write_dot(const std::string& path, const Tensors& results, const NamedTensors& names) {
  const bool picture = path.ends_with(".svg");
  const std::string source = picture ? path + ".dot" : path;
  write(source, make_dot(results, names));
  if (!picture) return source;
  if (draw(source, path)) return path;
  MUSTER_LOG(kWarning) << "there is no program 'dot' to draw " << path << " (Debian: graphviz), so the graph is in "
                       << source;
  return source;
}

}  // namespace muster::optim
