// The calls of one training step: route, sort, forward, backward, router gradient.
#include "layer.h"

#include <bit>
#include <random>

using guild::DType;

namespace {

uint16_t to_bf16(float value) {
  uint32_t const bits = std::bit_cast<uint32_t>(value);
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float from_bf16(uint16_t bits) { return std::bit_cast<float>(uint32_t(bits) << 16); }

std::vector<float> random_values(std::mt19937& generator, int64_t count, float scale) {
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> values(count);
  for (float& v : values) v = from_bf16(to_bf16(normal(generator)));
  return values;
}

// A tensor of the layer's type, float32 or bfloat16, filled from and read as floats.
class Tensor {
 public:
  Tensor(Place place, DType dtype, int64_t count)
      : wide_(place, dtype == DType::float32 ? count : 0),
        narrow_(place, dtype == DType::float32 ? 0 : count),
        is_wide_(dtype == DType::float32) {}

  Tensor(Place place, DType dtype, std::vector<float> const& values)
      : Tensor(place, dtype, int64_t(values.size())) {
    if (is_wide_) {
      wide_ = Array<float>(place, values);
      return;
    }
    std::vector<uint16_t> bits;
    for (float v : values) bits.push_back(to_bf16(v));
    narrow_ = Array<uint16_t>(place, bits);
  }

  void* data() const { return is_wide_ ? static_cast<void*>(wide_.data()) : narrow_.data(); }
  guild::Rows rows() const { return {data(), 0}; }

  std::vector<float> values() const {
    if (is_wide_) return wide_.values();
    std::vector<float> out;
    for (uint16_t bits : narrow_.values()) out.push_back(from_bf16(bits));
    return out;
  }

 private:
  Array<float> wide_;
  Array<uint16_t> narrow_;
  bool is_wide_;
};

// The same calls on either backend.
struct Backend {
  Place place;
  template <class Args>
  void operator()(void (*on_cpu)(Args const&), void (*on_gpu)(Args const&, guild::cuda::Queue),
                  Args const& args) const {
    place == Place::cpu ? on_cpu(args) : on_gpu(args, {});
  }
};

// Each token's top_k experts, and the (token, choice) slots sorted by expert.
struct Routed {
  Array<float> logits, scores, row_score;
  Array<int32_t> ids, offsets, row_token, slot_row;

  Routed(Problem const& p, Backend const& run)
      : logits(run.place, p.logits),
        scores(run.place, p.sizes.rows()),
        row_score(run.place, p.sizes.rows()),
        ids(run.place, p.sizes.rows()),
        offsets(run.place, p.sizes.experts + 1),
        row_token(run.place, p.sizes.rows()),
        slot_row(run.place, p.sizes.rows()) {
    guild::Sizes const& s = p.sizes;
    Array<char> const work(run.place, guild::sort_workspace_bytes(s.tokens, s.experts, s.top_k));
    run(guild::cpu::route, guild::cuda::route,
        guild::Route{.tokens = s.tokens,
                     .experts = s.experts,
                     .top_k = s.top_k,
                     .logits = {logits.data()},
                     .ids = ids.data(),
                     .scores = scores.data()});
    run(guild::cpu::sort_by_expert, guild::cuda::sort_by_expert,
        guild::Sort{.tokens = s.tokens,
                    .experts = s.experts,
                    .top_k = s.top_k,
                    .ids = ids.data(),
                    .scores = scores.data(),
                    .offsets = offsets.data(),
                    .row_token = row_token.data(),
                    .slot_row = slot_row.data(),
                    .row_score = row_score.data(),
                    .workspace = work.data()});
  }

  guild::Routing view() const {
    return {.offsets = offsets.data(),
            .row_token = row_token.data(),
            .slot_row = slot_row.data(),
            .row_score = row_score.data(),
            .slot_score = scores.data()};
  }

  std::vector<float> gradient(guild::Sizes const& s, Array<float> const& dscores,
                              Backend const& run) const {
    Array<float> const dlogits(run.place, s.tokens * s.experts);
    run(guild::cpu::router_gradient, guild::cuda::router_gradient,
        guild::RouterGradient{.tokens = s.tokens,
                              .experts = s.experts,
                              .top_k = s.top_k,
                              .ids = ids.data(),
                              .scores = scores.data(),
                              .dscores = dscores.data(),
                              .dlogits = {dlogits.data()}});
    return dlogits.values();
  }
};

}  // namespace

Problem random_problem(guild::Sizes const& s) {
  std::mt19937 generator(0);
  Problem p;
  p.sizes = s;
  p.logits = random_values(generator, s.tokens * s.experts, 1);
  p.x = random_values(generator, s.tokens * s.hidden, 1);
  p.dout = random_values(generator, s.tokens * s.hidden, 1);
  p.w_up = random_values(generator, s.experts * 2 * s.intermediate * s.hidden, 0.1f);
  p.w_down = random_values(generator, s.experts * s.hidden * s.intermediate, 0.1f);
  return p;
}

Results run_layer(Problem const& p, DType dtype, Place place) {
  guild::Sizes const& s = p.sizes;
  Backend const run{place};

  Routed const routed(p, run);
  Tensor const x(place, dtype, p.x), dout(place, dtype, p.dout);
  Tensor const w_up(place, dtype, p.w_up), w_down(place, dtype, p.w_down);
  Tensor const h(place, dtype, s.rows() * 2 * s.intermediate);
  Tensor const o(place, dtype, s.tokens * s.hidden), dx(place, dtype, s.tokens * s.hidden);
  Tensor const dw_up(place, dtype, int64_t(p.w_up.size()));
  Tensor const dw_down(place, dtype, int64_t(p.w_down.size()));
  Array<float> const dscores(place, s.rows());
  int64_t const bytes = dtype == DType::float32 ? 4 : 2;
  Array<char> const forward_work(place, guild::moe_forward_workspace_bytes(s, dtype));
  Array<char> const backward_work(place, guild::moe_backward_workspace_bytes(s, dtype, true));

  guild::MoeForward f;
  f.sizes = s;
  f.dtype = dtype;
  f.activation = p.activation;
  f.routing = routed.view();
  f.x = x.rows();
  f.w_up = guild::up_weight<guild::ConstWeight>(w_up.data(), s, true, f.order, false, bytes);
  f.w_down = {w_down.data(), s.hidden * s.intermediate, s.intermediate, 1};
  f.h = h.rows();  // all that backward needs besides the inputs
  f.o = o.rows();
  f.workspace = forward_work.data();
  run(guild::cpu::moe_forward, guild::cuda::moe_forward, f);

  guild::MoeBackward b;
  b.sizes = s;
  b.dtype = b.dw_dtype = dtype;
  b.activation = p.activation;
  b.routing = f.routing;
  b.dout = dout.rows();
  b.x = f.x;
  b.h = h.rows();
  b.w_up = f.w_up;
  b.w_down = f.w_down;
  b.dx = dx.rows();
  b.dw_up = guild::up_weight<guild::Weight>(dw_up.data(), s, true, f.order, false, bytes);
  b.dw_down = {dw_down.data(), s.hidden * s.intermediate, s.intermediate, 1};
  b.dscores = dscores.data();
  b.workspace = backward_work.data();
  run(guild::cpu::moe_backward, guild::cuda::moe_backward, b);
  return {o.values(), dx.values(), dw_up.values(), dw_down.values(),
          routed.gradient(s, dscores, run)};
}
