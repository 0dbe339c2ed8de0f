// The cases of the tests, from tests/cases.csv and tests/activations.csv.
#pragma once
#include <string>
#include <vector>

#include "guild/types.h"

namespace guild::test {

// One line of tests/cases.csv.
struct Case {
  std::string name;
  Sizes sizes;
  std::string routing;
  bool quick = false, matrix = false, sorted = false, strided = false;
  bool cpu_only = false, cuda_matrix = false;
};

// One line of tests/activations.csv.
struct NamedActivation {
  std::string name;
  Activation activation;
};

// How the up projection's weight lies in memory, and with it the columns of H.
enum class Layout {
  concatenated,             // (E, 2I, H)
  interleaved,              // (E, 2I, H)
  concatenated_transposed,  // (E, H, 2I)
  interleaved_transposed,   // (E, H, 2I)
  separate,                 // gate (E, I, H), up (E, I, H)
  separate_interleaved,     // the same, H interleaved
};
inline constexpr Layout kLayouts[] = {
    Layout::concatenated,           Layout::interleaved, Layout::concatenated_transposed,
    Layout::interleaved_transposed, Layout::separate,    Layout::separate_interleaved};

std::vector<Case> const& cases();
std::vector<NamedActivation> const& activations();

// A case with everything that is chosen per run of it.
struct LayerParam {
  Case shape;
  NamedActivation act;
  Layout layout = Layout::concatenated;
  bool bias = false;
  DType dtype = DType::float32;
  bool on_cuda = false;
  int config = -1;  // on CUDA, which of kConfigs the products take where it serves them; -1: any

  std::string name() const;
  bool gated() const { return act.activation.gated; }
  int64_t width() const { return shape.sizes.intermediate * (gated() ? 2 : 1); }
  GateUp order() const;
};

// Every run of the quick or of the other cases, in two variants; with `matrix`, the matrix cases in
// all combinations of activation, layout and bias. On CUDA only where there is a device.
std::vector<LayerParam> layer_params(bool quick, bool matrix);

// Cases for the kernels of every GEMM config, on CUDA alone: experts of whole tiles of pairs of
// blocks (256 rows), and of parts of them.
std::vector<LayerParam> config_params();

char const* name_of(DType dtype);

}  // namespace guild::test
