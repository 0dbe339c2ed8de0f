// Matrices of more than 2^31 elements on the GPU: a small layer whose tokens are repeated until the
// pre-activations pass the mark, and weights that pass it in one expert's place.
#include <gtest/gtest.h>

#include <algorithm>

#include "device.h"
#include "guild/cuda.h"
#include "layer.h"

namespace guild::test {

namespace {

constexpr int64_t kMark = int64_t(1) << 31;
constexpr DType kType = DType::bfloat16;

// Device memory without canaries; empty if there is not enough.
class Memory {
 public:
  Memory(Device& device, int64_t bytes) : device_(device), data_(device.allocate(bytes)) {}
  ~Memory() {
    if (data_ != nullptr) device_.release(data_);
  }
  Memory(Memory const&) = delete;
  operator bool() const { return data_ != nullptr; }
  char* data() const { return static_cast<char*>(data_); }
  template <class I>
  I* as() const {
    return static_cast<I*>(data_);
  }
  // `count` bf16 elements from `first` on.
  std::vector<double> read(int64_t first, int64_t count) const {
    std::vector<char> raw(count * 2);
    device_.download(raw.data(), data() + first * 2, count * 2);
    std::vector<double> values(count);
    for (int64_t i = 0; i < count; ++i) values[i] = decode(kType, &raw[i * 2]);
    return values;
  }

 private:
  Device& device_;
  void* data_;
};

LayerParam small_case() {
  LayerParam p;
  p.shape.name = "large", p.shape.routing = "random", p.shape.sizes = {64, 64, 704, 8, 4};
  p.act = activations().front();
  p.dtype = kType, p.on_cuda = true;
  return p;
}

template <class T>
void upload_repeated(Device& device, Memory const& to, std::vector<T> const& once, int64_t copies) {
  std::vector<T> all;
  all.reserve(once.size() * copies);
  for (int64_t i = 0; i < copies; ++i) all.insert(all.end(), once.begin(), once.end());
  device.upload(to.data(), all.data(), int64_t(all.size() * sizeof(T)));
}

std::vector<uint16_t> encoded(std::vector<double> const& values) {
  std::vector<uint16_t> bits(values.size());
  for (size_t i = 0; i < values.size(); ++i) encode(kType, values[i], &bits[i]);
  return bits;
}

void expect_near(std::vector<double> const& out, std::vector<double> const& truth,
                 std::string const& what) {
  EXPECT_LE(relative_error(out, truth), 0.01) << what;
}

// A small layer whose tokens are repeated `copies` times, in device memory.
struct Repeated {
  Device& device;
  int64_t copies;
  Layer l{device, small_case()};
  int64_t width = l.p.width();
  Sizes big{l.s.tokens * copies, l.s.hidden, l.s.intermediate, l.s.experts, l.s.top_k};

  Memory x{device, big.tokens * big.hidden * 2}, o{device, big.tokens * big.hidden * 2};
  Memory dx{device, big.tokens * big.hidden * 2}, h{device, big.rows() * width * 2};
  Memory ids{device, big.rows() * 4}, scores{device, big.rows() * 4};
  Memory offsets{device, (big.experts + 1) * 4}, row_token{device, big.rows() * 4};
  Memory slot_row{device, big.rows() * 4}, row_score{device, big.rows() * 4};
  Memory sorting{device, sort_workspace_bytes(big.tokens, big.experts, big.top_k)};
  Memory work{device, std::max(moe_forward_workspace_bytes(big, kType),
                               moe_backward_workspace_bytes(big, kType, true))};

  Matrix x_small = l.random(l.s.tokens, l.s.hidden, 1, kType);
  Matrix halves[2] = {l.random(l.s.experts * l.s.intermediate, l.s.hidden, 0.125, kType),
                      l.random(l.s.experts * l.s.intermediate, l.s.hidden, 0.125, kType)};
  UpWeights w_up{device, l.p, kType}, dw_up{device, l.p, DType::float32};
  Layer::Input w_down = l.input(l.s.experts * l.s.hidden, l.s.intermediate, 0.1);

  bool fits() const {
    return x && o && dx && h && ids && scores && offsets && row_token && slot_row && row_score &&
           sorting && work;
  }
  void run();
  void expect_right();
};

// Forward, then backward with dO = X.
void Repeated::run() {
  w_up.set(halves);
  std::vector<float> const score_floats(l.scores.values.begin(), l.scores.values.end());
  upload_repeated(device, x, encoded(x_small.values), copies);
  upload_repeated(device, ids, l.rowing.ids, copies);
  upload_repeated(device, scores, score_floats, copies);
  device.run(Sort{big.tokens, big.experts, big.top_k, DType::float32, false, ids.data(),
                  scores.data(), offsets.as<int32_t>(), row_token.as<int32_t>(),
                  slot_row.as<int32_t>(), row_score.data(), sorting.data()});
  MoeForward f;
  f.sizes = big, f.dtype = kType, f.activation = l.p.act.activation;
  f.routing = {offsets.as<int32_t>(), row_token.as<int32_t>(), slot_row.as<int32_t>(),
               row_score.data(), scores.data()};
  f.x = {x.data()}, f.w_up = {w_up.view().gate, w_up.view().up};
  f.w_down = {w_down.view().data, l.s.hidden * l.s.intermediate, l.s.intermediate, 1};
  f.h = {h.data(), 0}, f.o = {o.data(), 0}, f.workspace = work.data();
  device.run(f);
  MoeBackward b;
  b.sizes = big, b.dtype = kType, b.dw_dtype = DType::float32, b.activation = f.activation;
  b.routing = f.routing, b.dout = b.x = f.x, b.h = f.h, b.w_up = f.w_up, b.w_down = f.w_down;
  b.dx = {dx.data(), 0}, b.dw_up = dw_up.view(), b.workspace = work.data();
  device.run(b);
}

// Every copy has the small layer's numbers; the weights' gradient is `copies` times as large.
void Repeated::expect_right() {
  Matrix h_small, a_small, dh_small, scaled, sums;
  auto const truth = l.truth();
  truth.up_projection(x_small, halves, {}, h_small, a_small);
  Matrix const o_small = truth.combine(truth.down_projection(a_small, w_down.host, {}), l.scores);
  truth.down_gradient(x_small, w_down.host, h_small, l.row_scores, dh_small, scaled, sums);
  Matrix const dx_small = truth.combine(truth.up_gradient(dh_small, halves), {});
  for (int64_t copy : {int64_t(0), copies / 2, copies - 1}) {
    int64_t const first = copy * l.s.tokens * l.s.hidden, count = l.s.tokens * l.s.hidden;
    expect_near(o.read(first, count), o_small.values, "o, copy " + std::to_string(copy));
    expect_near(dx.read(first, count), dx_small.values, "dx, copy " + std::to_string(copy));
  }
  for (int64_t e = 0; e < l.s.experts; ++e) {  // the last copy of each expert's rows
    int64_t const begin = l.rowing.offsets[e], end = l.rowing.offsets[e + 1];
    std::vector<double> const rows(h_small.values.begin() + begin * width,
                                   h_small.values.begin() + end * width);
    auto const last = h.read((end * copies - (end - begin)) * width, int64_t(rows.size()));
    expect_near(last, rows, "h, expert " + std::to_string(e));
  }
  auto const column = [&](int64_t r, int64_t i) { return dh_small(r, i); };
  auto const input = [&](int64_t r, int64_t j) { return x_small(truth.source(r), j); };
  Matrix dw = truth.weight_gradient(l.s.intermediate, l.s.hidden, column, input, {}, kType);
  for (double& v : dw.values) v *= double(copies);
  expect_near(dw_up.half(false).values, dw.values, "dw gate");
}

TEST(Large, PreActivationsBeyondTheMark) {
  char const* why = "";
  Device* const device = cuda_device(&why);
  if (device == nullptr) GTEST_SKIP() << why;
  Repeated layer{*device, 6250};
  ASSERT_GT(layer.big.rows() * layer.width, kMark);
  if (!layer.fits()) GTEST_SKIP() << "too little GPU memory";
  layer.run();
  layer.expect_right();
}

TEST(Large, WeightsBeyondTheMark) {
  char const* why = "";
  Device* const device = cuda_device(&why);
  if (device == nullptr) GTEST_SKIP() << why;
  Sizes const s{16, 4096, 4200, 128, 1};
  int64_t const matrix = s.hidden * s.intermediate;
  ASSERT_GT(s.experts * matrix, kMark);
  Memory const w(*device, s.experts * matrix * 2), y(*device, s.tokens * s.hidden * 2);
  if (!w || !y) GTEST_SKIP() << "too little GPU memory";

  LayerParam p;  // the last expert alone, for inputs and truth
  p.shape.name = "last", p.shape.routing = "one";
  p.shape.sizes = {s.tokens, s.hidden, s.intermediate, 1, 1};
  p.act = activations().front(), p.dtype = kType, p.on_cuda = true;
  Layer l(*device, p);
  auto const a = l.input(s.tokens, s.intermediate), dout = l.input(s.tokens, s.hidden);
  Matrix const last = l.random(s.hidden, s.intermediate, 0.02, kType);
  int64_t const start = (s.experts - 1) * matrix;
  device->upload(w.data() + start * 2, encoded(last.values).data(), matrix * 2);
  std::vector<int32_t> ends(s.experts + 1, 0);
  ends.back() = int32_t(s.tokens);
  Indices<int32_t> const offsets(*device, ends);
  Routing routing;
  routing.offsets = offsets.data();
  device->run(DownProjection{
      s, kType, routing, a.view(), {w.data(), matrix, s.intermediate, 1}, {}, {y.data(), 0}});
  expect_near(y.read(0, s.tokens * s.hidden), l.truth().down_projection(a.host, last, {}).values,
              "y");

  device->run(DownWeightGradient{s,
                                 kType,
                                 kType,
                                 false,
                                 routing,
                                 dout.view(),
                                 a.view(),
                                 {w.data(), matrix, s.intermediate, 1}});
  auto const left = [&](int64_t r, int64_t j) { return dout.host(r, j); };
  auto const right = [&](int64_t r, int64_t i) { return a.host(r, i); };
  Matrix const dw = l.truth().weight_gradient(s.hidden, s.intermediate, left, right, {}, kType);
  expect_near(w.read(start, matrix), dw.values, "dw of the last expert");
  for (int64_t e : {int64_t(0), s.experts - 2}) {
    for (double v : w.read(e * matrix, matrix)) ASSERT_EQ(v, 0) << "dw of expert " << e;
  }
}

}  // namespace

}  // namespace guild::test
