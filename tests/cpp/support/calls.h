// Correct calls of every step of a small layer.
#pragma once
#include "guild/guild.h"

namespace guild::test {

// Correct calls, over memory that a wrong one must not touch.
struct Calls {
  alignas(16) char memory[8] = {};
  alignas(16) char more[8] = {};  // for the second of two matrices
  int32_t index[8] = {};
  Sizes sizes{4, 16, 8, 2, 2};
  Routing routing{index, index, index, memory, memory};
  ConstWeight weight{memory, 128, 16, 1}, second{more, 128, 16, 1};
  Activation activation;

  UpProjection up() {
    return {sizes,    DType::float32,   activation, GateUp::concatenated, routing,
            {memory}, {weight, weight}, {memory},   {memory, 0},          {memory, 0}};
  }
  DownProjection down() {
    return {sizes, DType::float32, routing, {memory}, {memory, 128, 8, 1}, {memory}, {memory, 0}};
  }
  Combine combine() {
    Routing rows = routing;
    rows.slot_score = nullptr;
    return {sizes, DType::float32, rows, {memory}, {memory, 0}, {}, {{memory}, index, {memory}}};
  }
  DownGradient down_gradient() {
    DownGradient d;
    d.sizes = sizes, d.dtype = DType::float16, d.routing = routing;
    d.dout = d.h = {memory}, d.w_down = {memory, 128, 8, 1}, d.dh = {memory, 0};
    d.db_up = d.db_down = {memory, 0}, d.db_dtype = DType::float32, d.workspace = memory;
    return d;
  }
  UpWeightGradient dw() {
    Weight const gate{memory, 128, 16, 1}, up{more, 128, 16, 1};
    return {sizes,   DType::float32, DType::float32, false,     true, GateUp::concatenated,
            routing, {memory},       {memory},       {gate, up}};
  }
  DownWeightGradient dw_down() {
    return {sizes,   DType::float32, DType::float32, false,
            routing, {memory},       {memory},       {memory, 128, 8, 1}};
  }
  ScoreGradient score_gradient() {
    return {sizes, DType::float32, routing, memory, {memory}, {memory}, memory};
  }
  UpGradient up_gradient() {
    return {sizes,    DType::float32,   true,       GateUp::concatenated, routing,
            {memory}, {weight, weight}, {memory, 0}};
  }
  BiasGradient db() {
    return {8, 16, 2, DType::bfloat16, DType::float32, false, routing, {memory}, {memory, 0}, 4};
  }
  Route route() { return {4, 8, 2, DType::float32, {}, {memory}, nullptr, index, memory, nullptr}; }
  RouterLogits router_logits() {
    return {4, 16, 8, DType::bfloat16, {memory}, {memory}, {memory, 0}, memory};
  }
  RouterGradient router_gradient() {
    return {4, 8, 2, DType::float32, {}, index, memory, nullptr, memory, {}, {memory, 0}};
  }
  Sort sort() {
    return {4, 8, 2, DType::float32, false, index, memory, index, index, index, memory, memory};
  }
  TokenRounding rounding() {
    return {4,     8,       2,     DType::float32, {},     Rounding::nearest, 128,   {memory},
            index, nullptr, index, index,          memory, nullptr,           memory};
  }
  BalanceSums balance() {
    return {4,     8,       2,      1,      DType::float32, Score::softmax, {memory},
            index, nullptr, memory, memory, index,          memory};
  }
  BalanceGradient balance_gradient() {
    return {4,        8,       1,      DType::float32, Score::softmax,
            {memory}, nullptr, memory, memory,         {memory, 0}};
  }
  GroupedGemm gemm() {
    GroupedGemm g;
    g.m = 4, g.n = 8, g.k = 16, g.groups = 2, g.offsets = index;
    g.a = {memory, 0, 16, 1}, g.b = {memory, 128, 8, 1}, g.d = {memory, 0, 8, 1};
    return g;
  }
  MoeForward forward() {
    MoeForward f;
    f.sizes = sizes, f.dtype = DType::float32, f.routing = routing, f.x = {memory};
    f.w_up = {weight, weight}, f.w_down = {memory, 128, 8, 1}, f.o = {memory, 0};
    f.workspace = memory;
    return f;
  }
  MoeBackward backward() {
    MoeBackward b;
    b.sizes = sizes, b.dtype = b.dw_dtype = DType::float32, b.routing = routing;
    b.dout = b.x = b.h = {memory};
    b.w_up = {weight, weight}, b.w_down = {memory, 128, 8, 1}, b.workspace = memory;
    Weight const gate{memory, 128, 16, 1}, up{more, 128, 16, 1};
    b.dx = {memory, 0}, b.dw_up = {gate, up}, b.dw_down = {memory, 128, 8, 1};
    b.b_down = {memory}, b.db_up = b.db_down = {memory, 0}, b.dscores = memory;
    b.dh = b.a_scaled = {memory, 0};
    return b;
  }
  MoeWeightGradients weight_gradients() {
    MoeWeightGradients g;
    g.sizes = sizes, g.dtype = g.dw_dtype = DType::float32, g.routing = routing;
    g.x = g.dout = g.dh = g.a_scaled = {memory}, g.workspace = memory;
    Weight const gate{memory, 128, 16, 1}, up{more, 128, 16, 1};
    g.dw_up = {gate, up}, g.dw_down = {memory, 128, 8, 1};
    return g;
  }
  // FP8. Scales of rows, and of weights of one block.
  float scale[8] = {};
  uint8_t* codes = reinterpret_cast<uint8_t*>(memory);
  Scales scales{scale, 4, 2, 1};
  ConstScales block_scales{scale, 1, 1, 1};

  QuantizeRows quantize_rows() {
    QuantizeRows q;
    q.rows = 4, q.columns = 16, q.x = {memory}, q.codes = {memory, 0}, q.scales = scales;
    return q;
  }
  QuantizeWeights quantize_weights() {
    QuantizeWeights q;
    q.experts = 2, q.out = 8, q.in = 16, q.w = {weight, second}, q.scales = scales;
    q.codes = {memory, 256, 16, 1}, q.transposed = {memory, 256, 1, 16};
    return q;
  }
  QuantizeChunks quantize_chunks() {
    QuantizeChunks q;
    q.rows = 8, q.groups = 2, q.columns = 16, q.tokens = 4, q.offsets = q.row_token = index;
    q.x = {memory}, q.codes = codes, q.scales = scales;
    return q;
  }
  ChunkProduct chunk_product() {
    ChunkProduct p;
    p.rows = 8, p.groups = 2, p.out = 8, p.in = 16, p.offsets = index;
    p.a = p.b = {codes, 0, block_scales}, p.d = {memory, 128, 16, 1};
    return p;
  }
  ScaledGroupedGemm scaled_gemm() {
    ScaledGroupedGemm g;
    g.m = 4, g.n = 8, g.k = 16, g.groups = 2, g.offsets = index;
    g.a = {memory}, g.a_scales = g.b_scales = block_scales, g.b = weight, g.d = {memory, 0};
    return g;
  }
  ScaledUp scaled_up() {
    ScaledUp u;
    u.sizes = sizes, u.routing = routing, u.x = {memory}, u.x_scales = block_scales;
    u.w_up = {weight, weight}, u.w_scales = {block_scales, block_scales};
    u.a = {memory, 0}, u.a_scales = scales;
    return u;
  }
  ScaledDownGradient scaled_down_gradient() {
    ScaledDownGradient d;
    d.sizes = sizes, d.routing = routing, d.scale = ScaleKind::power_of_two;
    d.dout = d.h = {memory}, d.dout_scales = d.w_scales = block_scales;
    d.w_down = {memory, 128, 1, 16}, d.dh_codes = {memory, 0}, d.dh_scales = scales;
    d.dh_chunks = d.a_chunks = {codes, scales};
    return d;
  }
  QuantizeMicro quantize_micro() {
    QuantizeMicro q;
    q.rows = 4, q.columns = 16, q.x = {memory}, q.codes = {memory, 0}, q.scales = codes;
    return q;
  }
  RegroupMicro regroup_micro() {
    RegroupMicro r;
    r.rows = 4, r.columns = 16, r.x = {memory}, r.x_scales = codes, r.codes = {memory, 0};
    r.scales = scales;
    return r;
  }

  // Of two ranks, with room for 4 tokens of 2 choices each.
  void* peers[2] = {memory, memory};
  PeerMemory shared{2, 1, 4, 2, 32, 2, peers};

  Publish publish() { return {shared, 3, 2, 8, 32, 4, memory, 32, index, memory, index}; }
  Meet meet() { return {shared, false, 1, 0, {}, &report}; }
  Tables tables() { return {shared, 2, 8, 4, index, memory, index}; }
  Pull pull() { return {shared, 2, 32, index, memory}; }
  Push push() {
    return {shared, DType::bfloat16, 16, 8, 2, false, {memory}, index, memory, nullptr, index};
  }
  Collect collect() { return {shared, DType::bfloat16, 3, 16, index, {memory}, memory}; }
  PushScores push_scores() { return {shared, 2, 4, index, memory}; }
  ReturnedScores returned_scores() { return {shared, 8, 4, memory}; }
  PeerForward peer_forward() {
    MoeForward layer = forward();
    layer.sizes.tokens = 8, layer.dtype = DType::bfloat16, layer.sort = &of_layer;
    of_layer = sort();
    of_layer.tokens = 8, of_layer.experts = 2, of_layer.scores = memory;
    PeerForward f{publish(), meet(), tables(), pull(), layer, push(), meet(), collect()};
    f.publish.experts = f.tables.experts = 4, f.push.rows = 16, f.published.published = true;
    return f;
  }
  PeerBackward peer_backward() {
    PeerBackward b;
    b.publish = publish(), b.published = b.returned = meet(), b.pull = pull();
    b.layer = backward(), b.push = push(), b.scores = push_scores();
    b.published.published = true, b.publish.ids = nullptr;
    b.layer.sizes.tokens = 8, b.layer.dtype = b.layer.dw_dtype = DType::bfloat16;
    b.layer.dx_rows = b.layer.dx, b.layer.dx = b.layer.dh = b.layer.a_scaled = {};
    b.push.rows = 16, b.push.scores = nullptr;
    b.collect = collect(), b.own_scores = returned_scores();
    return b;
  }
  Sort of_layer;
  PeerReport report;
};

}  // namespace guild::test
