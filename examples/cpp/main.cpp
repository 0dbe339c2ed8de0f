// Runs a Mixture-of-Experts layer forward and backward on the CPU and, where there is one, on the
// GPU, and checks one against the other. Without a GPU bfloat16 is checked against float32.
#include <cmath>
#include <cstdio>

#include "layer.h"

namespace {

double relative_error(std::vector<float> const& a, std::vector<float> const& b) {
  double difference = 0, size = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (double(a[i]) - b[i]) * (double(a[i]) - b[i]);
    size += double(b[i]) * b[i];
  }
  return std::sqrt(difference / size);
}

bool agree(Results const& a, Results const& b, double allowed) {
  struct {
    char const* name;
    double error;
  } const errors[] = {{"o", relative_error(a.o, b.o)},
                      {"dx", relative_error(a.dx, b.dx)},
                      {"dw_up", relative_error(a.dw_up, b.dw_up)},
                      {"dw_down", relative_error(a.dw_down, b.dw_down)},
                      {"dlogits", relative_error(a.dlogits, b.dlogits)}};
  bool all = true;
  for (auto const& e : errors) {
    bool const close = e.error <= allowed;  // false for NaN
    std::printf("  %-8s relative difference %.1e%s\n", e.name, e.error, close ? "" : "  TOO LARGE");
    all = all && close;
  }
  return all;
}

}  // namespace

int main() try {
  guild::Sizes const sizes{
      .tokens = 512, .hidden = 256, .intermediate = 128, .experts = 8, .top_k = 2};
  Problem const problem = random_problem(sizes);
  Results const on_cpu = run_layer(problem, guild::DType::bfloat16, Place::cpu);
  bool right;
  if (has_gpu()) {
    std::printf("GPU against CPU, bfloat16:\n");
    right = agree(run_layer(problem, guild::DType::bfloat16, Place::gpu), on_cpu, 0.01);
  } else {
    std::printf("CPU, bfloat16 against float32:\n");
    right = agree(on_cpu, run_layer(problem, guild::DType::float32, Place::cpu), 0.02);
  }
  std::printf(right ? "they agree\n" : "THEY DO NOT AGREE\n");
  return right ? 0 : 1;
} catch (guild::Error const& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 2;
}
