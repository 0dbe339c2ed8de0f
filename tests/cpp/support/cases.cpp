// Reads the case files, which CMake embeds so that the test program needs no other file.
#include "cases.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <sstream>
#include <stdexcept>

#include "case_files.h"
#include "device.h"
#include "shared/gemm_config.h"

namespace guild::test {

namespace {

std::vector<std::string> split(std::string const& text, char separator) {
  std::vector<std::string> parts;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

// The lines of a CSV file as maps from column to cell.
std::vector<std::map<std::string, std::string>> read_csv(char const* text) {
  std::vector<std::map<std::string, std::string>> lines;
  std::vector<std::string> header;
  for (std::string const& line : split(text, '\n')) {
    if (line.empty() || line[0] == '#') continue;
    auto cells = split(line, ',');
    if (header.empty()) {
      header = cells;
      continue;
    }
    cells.resize(header.size());  // an empty last cell is not split off
    auto& cell = lines.emplace_back();
    for (size_t i = 0; i < header.size(); ++i) cell[header[i]] = cells[i];
  }
  return lines;
}

Case read_case(std::map<std::string, std::string> const& cell) {
  Case c;
  c.name = cell.at("name");
  c.sizes = {std::stoll(cell.at("tokens")), std::stoll(cell.at("hidden")),
             std::stoll(cell.at("intermediate")), std::stoll(cell.at("experts")),
             std::stoll(cell.at("top_k"))};
  c.routing = cell.at("routing");
  for (std::string const& flag : split(cell.at("flags"), ' ')) {
    bool Case::* const field = flag == "quick"    ? &Case::quick
                               : flag == "matrix" ? &Case::matrix
                               : flag == "cpu"    ? &Case::cpu_only
                               : flag == "cuda"   ? &Case::cuda_matrix
                               : flag == "sorted" ? &Case::sorted
                                                  : &Case::strided;
    c.*field = true;
  }
  return c;
}

NamedActivation read_activation(std::map<std::string, std::string> const& cell) {
  using Kind = Activation::Kind;
  static std::map<std::string, Kind> const kinds = {{"silu", Kind::silu},
                                                    {"gelu_tanh", Kind::gelu_tanh},
                                                    {"gelu_erf", Kind::gelu_erf},
                                                    {"relu", Kind::relu},
                                                    {"relu_squared", Kind::relu_squared}};
  Activation a;
  a.kind = kinds.at(cell.at("kind"));
  a.gated = cell.at("gated") == "1";
  a.alpha = std::stod(cell.at("alpha"));
  a.limit = std::stod(cell.at("limit"));
  a.up_offset = std::stod(cell.at("up_offset"));
  a.clamp_after = cell.at("clamp_after") == "1";
  return {cell.at("name"), a};
}

char const* name_of(Layout layout) {
  char const* const names[] = {"concatenated",           "interleaved", "concatenated_transposed",
                               "interleaved_transposed", "separate",    "separate_interleaved"};
  return names[int(layout)];
}

// The element types and backends a case runs on, with everything else given.
void add_params(std::vector<LayerParam>& all, LayerParam p, bool on_cpu, bool on_cuda) {
  p.on_cuda = false;
  for (DType dtype : {DType::float32, DType::bfloat16, DType::float16, DType::float64}) {
    p.dtype = dtype;
    if (on_cpu) all.push_back(p);
  }
  p.on_cuda = true;
  for (DType dtype : {DType::bfloat16, DType::float16}) {
    p.dtype = dtype;
    if (on_cuda) all.push_back(p);
  }
}

}  // namespace

std::vector<Case> const& cases() {
  static std::vector<Case> const all = [] {
    std::vector<Case> list;
    for (auto const& line : read_csv(kCasesCsv)) list.push_back(read_case(line));
    return list;
  }();
  return all;
}

std::vector<NamedActivation> const& activations() {
  static std::vector<NamedActivation> const all = [] {
    std::vector<NamedActivation> list;
    for (auto const& line : read_csv(kActivationsCsv)) list.push_back(read_activation(line));
    return list;
  }();
  return all;
}

GateUp LayerParam::order() const {
  bool const alternate = layout == Layout::interleaved ||
                         layout == Layout::interleaved_transposed ||
                         layout == Layout::separate_interleaved;
  return alternate ? GateUp::interleaved : GateUp::concatenated;
}

std::string LayerParam::name() const {
  std::string const text = shape.name + "_" + act.name + "_" + name_of(layout) +
                           (bias ? "_bias_" : "_") + test::name_of(dtype);
  std::string const forced = config < 0 ? "" : "_config" + std::to_string(config);
  return text + forced + (on_cuda ? "_cuda" : "_cpu");
}

std::vector<LayerParam> layer_params(bool quick, bool matrix) {
  std::vector<LayerParam> all;
  auto const& acts = activations();
  char const* why = "";
  bool const cuda = cuda_device(&why) != nullptr;
  for (Case const& c : cases()) {
    bool const on_cuda = cuda && !c.cpu_only;
    if (c.quick == quick) {  // the quick ones are a list of their own
      add_params(all, {c, acts[0], Layout::concatenated, false}, true, on_cuda);
      add_params(all, {c, acts[1], Layout::interleaved, true}, true, on_cuda);
    }
    if (quick || !matrix || !c.matrix) continue;
    for (auto const& act : acts) {
      for (Layout layout : kLayouts) {
        for (bool bias : {false, true}) {
          bool const first = &act == &acts[0] && layout == Layout::concatenated && !bias;
          bool const second = &act == &acts[1] && layout == Layout::interleaved && bias;
          if ((first || second) && !c.quick) continue;  // listed above
          // The CUDA backend keeps H as the weights lie.
          bool const taken = layout != Layout::separate_interleaved;
          add_params(all, {c, act, layout, bias}, !c.cuda_matrix, on_cuda && taken);
        }
      }
    }
  }
  return all;
}

std::vector<LayerParam> config_params() {
  std::vector<LayerParam> all;
  char const* why = "";
  if (cuda_device(&why) == nullptr) return all;
  auto const act = [](char const* name) {
    return *std::find_if(activations().begin(), activations().end(),
                         [&](NamedActivation const& a) { return a.name == name; });
  };
  // Two tiles of columns for each product but the down gradient, and more steps of sums than there
  // are stages.
  Case gathered, sorted;
  gathered.name = "pairs", gathered.sizes = {460, 328, 168, 5, 2};
  gathered.routing = "512|256|151|0|1";
  sorted = gathered;
  sorted.name = "sorted_pairs", sorted.sizes.tokens = 920, sorted.sizes.top_k = 1;
  sorted.sorted = true;
  // Every number of rows at which a last tile or a last step takes another path.
  Case tails = gathered;
  tails.name = "tails", tails.sizes = {400, 328, 168, 13, 2};
  tails.routing = "0|1|15|16|17|63|64|65|127|128|129|0|175";
  Case sorted_tails = tails;
  sorted_tails.name = "sorted_tails", sorted_tails.sizes.tokens = 800;
  sorted_tails.sizes.top_k = 1, sorted_tails.sorted = true;
  LayerParam const variants[] = {
      {gathered, act("swiglu"), Layout::concatenated, true},
      {sorted, act("silu"), Layout::concatenated_transposed, false},
      {tails, act("swiglu"), Layout::concatenated, false},
      {sorted_tails, act("gpt_oss"), Layout::interleaved_transposed, true},
      {gathered, act("silu"), Layout::concatenated, true},
      {sorted, act("gpt_oss"), Layout::interleaved, true},
      {gathered, act("gpt_oss"), Layout::interleaved_transposed, false},
      {gathered, act("swiglu"), Layout::concatenated_transposed, false},
  };
  for (int config = 0; config < int(std::size(kConfigs)); ++config) {
    // There are many kernels for pairs, and no other case is large enough for them.
    int const count = kConfigs[config].config.cluster > 1 ? int(std::size(variants)) : 4;
    for (int i = 0; i < count; ++i) {
      LayerParam p = variants[i];
      p.config = config;
      add_params(all, p, /*on_cpu=*/false, /*on_cuda=*/true);
    }
  }
  return all;
}

char const* name_of(DType dtype) {
  char const* const names[] = {"float32", "bfloat16", "float16", "float64"};
  return names[int(dtype)];
}

}  // namespace guild::test
