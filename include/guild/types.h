// Building blocks of every step's arguments: sizes, element types, views of memory, activations.
//
// Nothing here owns memory. A view is a pointer plus strides in elements; its shape follows from
// the Sizes beside it and is given in the comment of each field.
#pragma once
#include <cstdint>
#include <limits>
#include <type_traits>

namespace guild {

enum class DType : int { float32, bfloat16, float16, float64 };

// The sizes of one layer. A slot is one (token, k-th choice) pair or, where each token has a list
// of experts of varying length, one entry of a list. A row is a slot after sorting by expert.
// Buffers of rows hold rows() rows, of which min(offsets[experts], rows()) are in use.
struct Sizes {
  int64_t tokens = 0;        // T >= 0
  int64_t hidden = 0;        // H >= 1
  int64_t intermediate = 0;  // I >= 1: one expert's width after the gate
  int64_t experts = 0;       // E >= 1
  int64_t top_k = 1;         // K >= 1
  int64_t slots = -1;        // length of all lists together (Routing::token_offsets); -1: T * K
  int64_t room = -1;         // capacity of row buffers, if below the number of slots; -1: all slots
  constexpr int64_t slot_count() const { return slots < 0 ? tokens * top_k : slots; }
  constexpr int64_t rows() const {  // R
    return room < 0 || room > slot_count() ? slot_count() : room;
  }
};

// Rows of a matrix with contiguous columns. stride: elements from one row to the next; 0 = packed.
struct Rows {
  void* data = nullptr;
  int64_t stride = 0;
};
struct ConstRows {
  void const* data = nullptr;
  int64_t stride = 0;
  ConstRows() = default;
  ConstRows(void const* first, int64_t apart = 0) : data(first), stride(apart) {}
  ConstRows(Rows rows) : data(rows.data), stride(rows.stride) {}
};

// One matrix per expert, seen as (E, out, in) whatever its layout: element (e, o, i) is at
// data[e * expert_stride + o * out_stride + i * in_stride]. For matrices that are not evenly
// spaced, set expert_at, (E) in the backend's memory: expert_at[e] >= 0 then replaces e, so
// expert_stride must divide the distances between the matrices. Inputs may have strides of 0, which
// broadcast.
struct Weight {
  void* data = nullptr;
  int64_t expert_stride = 0, out_stride = 0, in_stride = 1;
  int32_t const* expert_at = nullptr;
};
struct ConstWeight {
  void const* data = nullptr;
  int64_t expert_stride = 0, out_stride = 0, in_stride = 1;
  int32_t const* expert_at = nullptr;
  ConstWeight() = default;
  ConstWeight(void const* first, int64_t by_expert, int64_t by_out, int64_t by_in,
              int32_t const* places = nullptr)
      : data(first),
        expert_stride(by_expert),
        out_stride(by_out),
        in_stride(by_in),
        expert_at(places) {}
  ConstWeight(Weight w)
      : ConstWeight(w.data, w.expert_stride, w.out_stride, w.in_stride, w.expert_at) {}
};

// The order of gate and up among the 2I columns of the pre-activations H, their gradient and the
// bias b1:
//   concatenated   gate_0 .. gate_{I-1}, up_0 .. up_{I-1}
//   interleaved    gate_0, up_0, gate_1, up_1, ...
enum class GateUp : int { concatenated, interleaved };

// The up projection's weight as a gate half and an up half, each (E, I, H) as (E, out, in). The
// strides cover every layout in use; up_weight() below sets them. up is unused without a gate.
template <class W>
struct GatedWeight {
  W gate = {}, up = {};
};
using UpWeight = GatedWeight<Weight>;
using ConstUpWeight = GatedWeight<ConstWeight>;
inline ConstUpWeight as_const(UpWeight const& w) { return {w.gate, w.up}; }

// The halves of one packed tensor, whose matrices have `width` = 2I (gated) or I rows:
//   transposed = false   [E, width, H], as torch.nn.Linear stores it
//   transposed = true    [E, H, width]
template <class W>
constexpr GatedWeight<W> up_weight(decltype(W::data) data, Sizes const& sizes, bool gated,
                                   GateUp order, bool transposed, int64_t element_bytes) {
  int64_t const width = sizes.intermediate * (gated ? 2 : 1);
  int64_t const out_stride = transposed ? 1 : sizes.hidden;
  int64_t const in_stride = transposed ? width : 1;
  bool const alternate = gated && order == GateUp::interleaved;
  int64_t const up_offset = alternate ? out_stride : sizes.intermediate * out_stride;
  using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(W::data)>>,
                                  char const, char>;
  W gate{data, width * sizes.hidden, out_stride * (alternate ? 2 : 1), in_stride};
  W up = gate;
  if (data != nullptr && gated) up.data = static_cast<Byte*>(data) + up_offset * element_bytes;
  return {gate, up};
}

// a = act(gate) * (up + up_offset), or a = act(gate) without a gate, with
//   act(g) = g * sigmoid(alpha * g)   silu        (alpha = 1: SiLU; 1.702: gpt-oss)
//            gelu, tanh form          gelu_tanh
//            gelu, exact              gelu_erf
//            max(g, 0), max(g, 0)^2   relu, relu_squared
// `gate` is clamped to at most `limit`, before act (the default) or after it, and `up` to [-limit,
// limit]. Gradients are zero where a clamp is active; NaN passes through. Computed in fp32 (float64
// in float64). The gate is from Shazeer, arXiv:2002.05202, the clamped form from gpt-oss. F is the
// type of the parameters: double in the API, float in kernels.
enum class ActivationKind : int { silu, gelu_tanh, gelu_erf, relu, relu_squared };
template <class F>
struct ActivationOf {
  using Kind = ActivationKind;
  Kind kind = Kind::silu;
  bool gated = true;
  F alpha = 1;
  F limit = std::numeric_limits<F>::infinity();
  F up_offset = 0;
  bool clamp_after = false;  // clamp act(gate) instead of gate
};
using Activation = ActivationOf<double>;

// Which rows belong to which expert and token; written by sort_by_expert(). Index arrays are int32.
// With row_token, slot_row and token_offsets null there are no slots: the caller's rows are already
// sorted, row r reads row r of X and dO, and nothing is combined. Scores are float32, or float64
// where the layer's dtype is float64.
struct Routing {
  int32_t const* offsets = nullptr;    // (E + 1) expert e has rows [offsets[e], offsets[e + 1])
  int32_t const* row_token = nullptr;  // (R) the token of each row
  int32_t const* slot_row = nullptr;   // (T, K) the row of each slot, or -1: see Sort
  void const* row_score = nullptr;     // (R) the slot's score; null: 1
  void const* slot_score = nullptr;    // (T, K) the same by slot; null: 1
  // (T + 1), with Sizes::slots: token t has slots [token_offsets[t], token_offsets[t + 1]), and
  // arrays by slot are (slots) instead of (T, K). Null: K slots each.
  int32_t const* token_offsets = nullptr;
};

}  // namespace guild
