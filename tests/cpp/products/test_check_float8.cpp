// Wrong calls of FP8 steps: each throws an Error that names the argument, its value and what was
// expected, and touches no memory.
#include "wrong_call.h"

namespace guild::test {

namespace {

int32_t const some_expert = 0;

// Formats, kinds of scales and element types, by their names.
template <class Args, class Of>
void expect_format(WrongCalls<Args> const& wrong, char const* name, Of of) {
  wrong.expect(text_of(name, ": expected 0 (e4m3) or 1 (e5m2), got 2"),
               [&](Args& x) { std::invoke(of, x) = Float8(2); });
}

template <class Args>
void expect_kind(WrongCalls<Args> const& wrong) {
  wrong.expect("scale: expected 0 (exact) or 1 (power of two), got 2",
               [](Args& x) { x.scale = ScaleKind(2); });
}

template <class Args, class Of>
void expect_element(WrongCalls<Args> const& wrong, char const* name, Of of) {
  wrong.dtype(name, of);
  wrong.expect(text_of(name, ": expected bfloat16, float16 or float32, got float64"),
               [&](Args& x) { std::invoke(of, x) = DType::float64; });
}

template <class Args, class Of>
void expect_scale_strides(WrongCalls<Args> const& wrong, char const* name, Of of) {
  wrong.expect(text_of(name, ": expected strides of at least 0, got (0, -1, 1)"), [&](Args& x) {
    auto& scales = std::invoke(of, x);
    scales.expert_stride = 0, scales.row_stride = -1, scales.col_stride = 1;
  });
}

template <class Args, class Of>
void expect_scales(WrongCalls<Args> const& wrong, char const* name, Of of) {
  wrong.pointer(name, [=](Args& x) -> auto& { return std::invoke(of, x).data; });
  expect_scale_strides(wrong, name, of);
}

// Scales that are read, of two rows at least.
template <class Args, class Of>
void expect_near_scales(WrongCalls<Args> const& wrong, char const* name, Of of, int64_t experts,
                        int64_t rows, int64_t cols) {
  int64_t const stride = wrong.kFarStride;
  wrong.expect(text_of(name, wrong.far(experts, rows, cols), "(0, ", stride, ", 1)"), [&](Args& x) {
    auto& scales = std::invoke(of, x);
    scales.expert_stride = 0, scales.row_stride = stride, scales.col_stride = 1;
  });
}

// Scales that are written, `rows` x `cols` of `experts`.
template <class Args, class Of>
void expect_made_scales(WrongCalls<Args> const& wrong, char const* name, Of of, int64_t experts,
                        int64_t rows, int64_t cols) {
  expect_scales(wrong, name, of);
  if (rows > 1) expect_near_scales(wrong, name, of, experts, rows, cols);
  auto const expect = [&](int64_t expert, int64_t row, int64_t col) {
    wrong.expect(text_of(name, ": expected strides of scales that do not overlap, ", experts,
                         " of ", rows, " x ", cols, ", got (", expert, ", ", row, ", ", col, ")"),
                 [&](Args& x) {
                   auto& scales = std::invoke(of, x);
                   scales.expert_stride = expert, scales.row_stride = row, scales.col_stride = col;
                 });
  };
  expect(0, 0, 1);  // the strides of a struct in which nobody set them
  if (cols > 1) expect(0, cols - 1, 1);
  if (experts > 1) expect(rows - 1, 1, rows);
}

// The error of kernels that index scales with 32 bits, for strides that reach too far.
constexpr char const* kFarScales = ": expected fewer than 2^32 elements on CUDA, got strides ";

TEST(CheckFloat8, QuantizeRows) {
  using Q = QuantizeRows;
  WrongCalls<Q> const wrong(&Calls::quantize_rows, cpu::quantize_rows, cuda::quantize_rows);
  wrong.size("rows", &Q::rows, 0, 2147483647);
  wrong.size("columns", &Q::columns, 1, 1073741760);
  expect_element(wrong, "dtype", &Q::dtype);
  expect_format(wrong, "format", &Q::format);
  expect_kind(wrong);
  wrong.rows("x", &Q::x, 4, 16);
  wrong.rows("codes", &Q::codes, 4, 16);
  expect_made_scales(wrong, "scales", &Q::scales, 1, 4, 1);
}

TEST(CheckFloat8, QuantizeWeights) {
  using Q = QuantizeWeights;
  WrongCalls<Q> const wrong(&Calls::quantize_weights, cpu::quantize_weights,
                            cuda::quantize_weights);
  wrong.size("experts", &Q::experts, 1, 4096);
  wrong.size("out", &Q::out, 1, 1073741760);
  wrong.size("in", &Q::in, 1, 1073741760);
  expect_element(wrong, "dtype", &Q::dtype);
  expect_format(wrong, "format", &Q::format);
  expect_kind(wrong);
  wrong.weight("w.gate", [](Q& x) -> auto& { return x.w.gate; }, 8, 16);
  wrong.expect("w.up: expected strides of at least 0, got (-1, 16, 1)",
               [](Q& x) { x.w.up.expert_stride = -1; });
  wrong.output_weight("codes", &Q::codes, 16, 16);
  wrong.expect("codes: expected evenly spaced matrices, without expert_at, got a pointer",
               [](Q& x) { x.transposed.expert_at = &some_expert; });
  wrong.output_weight("transposed", &Q::transposed, 16, 16);
  wrong.expect_on_cuda("transposed: expected `out` contiguous on CUDA, got stride 32", [](Q& x) {
    x.out = 1;  // of each half, so that there are two
    x.transposed = {x.transposed.data, 64, 32, 2};
  });
  expect_made_scales(wrong, "scales", &Q::scales, 2, 2, 1);
}

TEST(CheckFloat8, QuantizeChunks) {
  using Q = QuantizeChunks;
  WrongCalls<Q> const wrong(&Calls::quantize_chunks, cpu::quantize_chunks, cuda::quantize_chunks);
  wrong.size("rows", &Q::rows, 0, 2147483647);
  wrong.size("tokens", &Q::tokens, 0, 2147483647);
  wrong.size("groups", &Q::groups, 1, 4096);
  wrong.size("columns", &Q::columns, 1, 1073741760);
  wrong.size("halves", &Q::halves, 1, 2);
  expect_element(wrong, "dtype", &Q::dtype);
  expect_format(wrong, "format", &Q::format);
  expect_kind(wrong);
  wrong.pointer("offsets", &Q::offsets);
  wrong.rows("x", &Q::x, 4, 16);
  expect_scale_strides(wrong, "x_scales", &Q::x_scales);
  wrong.pointer("codes", &Q::codes);
  expect_made_scales(wrong, "scales", &Q::scales, 1, 2, 1);
}

TEST(CheckFloat8, ChunkProduct) {
  using P = ChunkProduct;
  WrongCalls<P> const wrong(&Calls::chunk_product, cpu::chunk_product, cuda::chunk_product);
  wrong.size("rows", &P::rows, 0, 2147483647);
  wrong.size("groups", &P::groups, 1, 4096);
  wrong.size("out", &P::out, 1, 1073741760);
  wrong.size("in", &P::in, 1, 1073741760);
  expect_format(wrong, "a_format", &P::a_format);
  expect_element(wrong, "d_dtype", &P::d_dtype);
  wrong.pointer("offsets", &P::offsets);
  for (bool const first : {true, false}) {
    auto const of = [=](P& x) -> auto& { return first ? x.a : x.b; };
    std::string const name = first ? "a" : "b", codes = name + ".codes", scale = name + ".scales";
    int const least = (first ? 8 : 16) * 128;
    wrong.pointer(codes.c_str(), [=](P& x) -> auto& { return of(x).codes; });
    wrong.expect(
        text_of(name, ".slot_stride: expected at least ", least, ", or 0, got ", least - 1),
        [=](P& x) { of(x).slot_stride = least - 1; });
    auto const scales = [=](P& x) -> auto& { return of(x).scales; };
    expect_scales(wrong, scale.c_str(), scales);
    expect_near_scales(wrong, scale.c_str(), scales, 1, 2, 1);
    wrong.expect(text_of(codes, wrong.far(1, 2, least), "(0, ", wrong.kFarStride, ", 1)"),
                 [=](P& x) { of(x).slot_stride = wrong.kFarStride; });
    // Of two slots and one block of columns.
    wrong.expect_on_cuda(text_of(name, ".scales", kFarScales, "(1, 4294967296, 1)"),
                         [=](P& x) { of(x).scales.row_stride = int64_t(1) << 32; });
  }
  wrong.output_weight("d", &P::d, 8, 16);
}

TEST(CheckFloat8, ScaledGroupedGemm) {
  using G = ScaledGroupedGemm;
  WrongCalls<G> const wrong(&Calls::scaled_gemm, cpu::scaled_grouped_gemm,
                            cuda::scaled_grouped_gemm);
  wrong.size("m", &G::m, 0, 2147483647);
  wrong.size("n", &G::n, 1, 1073741760);
  wrong.size("k", &G::k, 1, 1073741760);
  wrong.size("groups", &G::groups, 1, 4096);
  wrong.size("halves", &G::halves, 1, 2);
  expect_format(wrong, "a_format", &G::a_format);
  expect_format(wrong, "b_format", &G::b_format);
  expect_element(wrong, "out_dtype", &G::out_dtype);
  wrong.pointer("offsets", &G::offsets);
  wrong.rows("a", &G::a, 4, 16);
  expect_scales(wrong, "a_scales", &G::a_scales);
  expect_near_scales(wrong, "a_scales", &G::a_scales, 1, 4, 1);
  wrong.weight("b", &G::b, 8, 16);
  wrong.expect("b: expected K contiguous, got stride 8", [](G& x) { x.b = {x.b.data, 128, 1, 8}; });
  expect_scales(wrong, "b_scales", &G::b_scales);
  // Of four rows, and of two matrices, of one block each.
  wrong.expect_on_cuda("m: expected at most 2147475456 on CUDA, got 2147483647",
                       [](G& x) { x.m = (int64_t(1) << 31) - 1; });
  wrong.expect_on_cuda(text_of("a_scales", kFarScales, "(1, 2147483648, 1)"),
                       [](G& x) { x.a_scales.row_stride = int64_t(1) << 31; });
  wrong.expect_on_cuda(text_of("b_scales", kFarScales, "(4294967296, 1, 1)"),
                       [](G& x) { x.b_scales.expert_stride = int64_t(1) << 32; });
  wrong.rows("d", &G::d, 4, 8);
  wrong.optional_rows("bias", &G::bias, 8);
}

// The conditions that both steps of a layer have.
template <class Args>
void expect_step(WrongCalls<Args> const& wrong) {
  wrong.sizes();
  expect_element(wrong, "dtype", &Args::dtype);
  wrong.pointer("routing.offsets", [](Args& x) -> auto& { return x.routing.offsets; });
  wrong.expect("activation.kind: expected 0 to 4, got 5",
               [](Args& x) { x.activation.kind = Activation::Kind(5); });
  wrong.expect("order: expected 0 (concatenated) or 1 (interleaved), got 2",
               [](Args& x) { x.order = GateUp(2); });
  expect_format(wrong, "w_format", &Args::w_format);
  expect_format(wrong, "format", &Args::format);
  expect_kind(wrong);
}

TEST(CheckFloat8, ScaledUp) {
  using U = ScaledUp;
  WrongCalls<U> const wrong(&Calls::scaled_up, cpu::scaled_up, cuda::scaled_up);
  expect_step(wrong);
  expect_format(wrong, "x_format", &U::x_format);
  wrong.rows("x", &U::x, 4, 16);
  expect_scales(wrong, "x_scales", &U::x_scales);
  for (bool const first : {true, false}) {
    std::string const part = first ? "gate" : "up";
    auto const of = [=](U& x) -> auto& { return first ? x.w_up.gate : x.w_up.up; };
    wrong.weight(("w_up." + part).c_str(), of, 8, 16);
    wrong.expect("w_up." + part + ": expected H contiguous, got stride 8",
                 [=](U& x) { of(x) = {of(x).data, 128, 1, 8}; });
    expect_scales(wrong, ("w_scales." + part).c_str(),
                  [=](U& x) -> auto& { return first ? x.w_scales.gate : x.w_scales.up; });
  }
  auto const widen = [](U& x, int64_t intermediate, int64_t slots) {
    x.sizes.intermediate = intermediate, x.sizes.slots = slots;
    x.a_scales.row_stride = 1, x.a_scales.col_stride = slots;
  };
  wrong.expect_on_cuda("rows: expected at most 2147475456 on CUDA, got 2147483647",
                       [=](U& x) { widen(x, 16, (int64_t(1) << 31) - 1); });
  wrong.expect_on_cuda("intermediate: expected at most 268435456 on CUDA, got 268435472",
                       [=](U& x) { widen(x, (int64_t(1) << 28) + 16, 8); });
  wrong.optional_rows("bias", &U::bias, 16);
  wrong.optional_rows("h", &U::h, 16);
  wrong.optional_rows("h_codes", &U::h_codes, 16);
  wrong.expect("h_scales: expected a pointer, got null", [](U& x) { x.h_codes = x.a; });
  wrong.rows("a", &U::a, 8, 8);
  expect_made_scales(wrong, "a_scales", &U::a_scales, 1, 8, 1);
  wrong.expect(
      "h_scales: expected strides of scales that do not overlap, 1 of 8 x 2, got (4, 1, 1)",
      [](U& x) { x.h_codes = x.a, x.h_scales = x.a_scales, x.h_scales.row_stride = 1; });
}

TEST(CheckFloat8, ScaledDownGradient) {
  using D = ScaledDownGradient;
  WrongCalls<D> const wrong(&Calls::scaled_down_gradient, cpu::scaled_down_gradient,
                            cuda::scaled_down_gradient);
  expect_step(wrong);
  expect_format(wrong, "dout_format", &D::dout_format);
  expect_format(wrong, "h_format", &D::h_format);
  wrong.rows("dout", &D::dout, 4, 16);
  expect_scales(wrong, "dout_scales", &D::dout_scales);
  wrong.weight("w_down", &D::w_down, 16, 8);
  wrong.expect("w_down: expected H contiguous, got stride 8",
               [](D& x) { x.w_down = {x.w_down.data, 128, 8, 1}; });
  expect_scales(wrong, "w_scales", &D::w_scales);
  wrong.rows("h", &D::h, 8, 16);
  wrong.expect("h_codes: expected null with h, got a pointer", [](D& x) { x.h_codes = x.h; });
  wrong.expect("h_scales: expected a pointer, got null", [](D& x) { x.h_codes = x.h, x.h = {}; });
  wrong.rows("dh_codes", &D::dh_codes, 8, 16);
  expect_made_scales(wrong, "dh_scales", &D::dh_scales, 1, 8, 2);
  wrong.optional_rows("dh", &D::dh, 16);
  wrong.optional_rows("a_scaled", &D::a_scaled, 8);
  wrong.expect("dh_chunks: expected null with scale 0 (exact), got a pointer",
               [](D& x) { x.scale = ScaleKind::exact; });
  auto const dh_chunks = [](D& x) -> auto& { return x.dh_chunks.scales; };
  auto const a_chunks = [](D& x) -> auto& { return x.a_chunks.scales; };
  expect_made_scales(wrong, "dh_chunks.scales", dh_chunks, 1, 2, 2);
  expect_made_scales(wrong, "a_chunks.scales", a_chunks, 1, 2, 1);
}

// Without rows there are no chunks, and nothing is required of where their scales would go.
TEST(CheckFloat8, ChunksOfNoRows) {
  Calls calls;
  ScaledDownGradient d = calls.scaled_down_gradient();
  d.sizes.tokens = 0;
  d.dh_chunks.scales = d.a_chunks.scales = {};
  EXPECT_NO_THROW(check(d));
  EXPECT_NO_THROW(cpu::scaled_down_gradient(d));
}

TEST(CheckFloat8, QuantizeMicro) {
  using Q = QuantizeMicro;
  WrongCalls<Q> const wrong(&Calls::quantize_micro, cpu::quantize_micro, cuda::quantize_micro);
  wrong.size("rows", &Q::rows, 0, 2147483647);
  wrong.size("columns", &Q::columns, 1, 1073741760);
  expect_element(wrong, "dtype", &Q::dtype);
  wrong.expect("format: expected 0 to 2, got 3", [](Q& x) { x.format = Microscaling(3); });
  wrong.expect("columns: expected an even number for NVFP4, got 15",
               [](Q& x) { x.format = Microscaling::nvfp4, x.columns = 15; });
  wrong.expect("rounding: expected 0 (floor) or 1 (ceil), got 2",
               [](Q& x) { x.rounding = MicroRounding(2); });
  wrong.expect("order: expected 0 (rows) or 1 (swizzled), got 2",
               [](Q& x) { x.order = ScaleOrder(2); });
  wrong.rows("x", &Q::x, 4, 16);
  wrong.rows("codes", &Q::codes, 4, 16);
  wrong.pointer("scales", &Q::scales);
  wrong.expect("global: expected a pointer, got null",
               [](Q& x) { x.format = Microscaling::nvfp4; });
}

TEST(CheckFloat8, RegroupMicro) {
  using R = RegroupMicro;
  WrongCalls<R> const wrong(&Calls::regroup_micro, cpu::regroup_micro, cuda::regroup_micro);
  wrong.size("rows", &R::rows, 0, 2147483647);
  wrong.size("columns", &R::columns, 1, 1073741760);
  expect_format(wrong, "format", &R::format);
  wrong.rows("x", &R::x, 4, 16);
  wrong.pointer("x_scales", &R::x_scales);
  wrong.rows("codes", &R::codes, 4, 16);
  expect_made_scales(wrong, "scales", &R::scales, 1, 4, 1);
}

}  // namespace
}  // namespace guild::test
