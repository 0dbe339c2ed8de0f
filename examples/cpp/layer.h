// A Mixture-of-Experts layer run forward and backward through Guild's C++ API.
#pragma once
#include <vector>

#include "guild/guild.h"
#include "memory.h"

// A layer's inputs, of values that bfloat16 holds exactly.
struct Problem {
  guild::Sizes sizes;
  guild::Activation activation;
  std::vector<float> logits;   // (T, E)
  std::vector<float> x, dout;  // (T, H)
  std::vector<float> w_up;     // (E, 2I, H): gate rows, then up rows
  std::vector<float> w_down;   // (E, H, I)
};

struct Results {
  std::vector<float> o, dx;           // (T, H)
  std::vector<float> dw_up, dw_down;  // as the weights
  std::vector<float> dlogits;         // (T, E)
};

Problem random_problem(guild::Sizes const& sizes);

// Router, layer, and the gradients of everything, on the CPU or the GPU; the GPU takes bfloat16.
Results run_layer(Problem const& problem, guild::DType dtype, Place place);
