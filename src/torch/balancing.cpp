// Sums over tokens for balancing a router, and their gradient.
#include "torch/ops.h"
#include "torch/routing.h"

namespace guild::binding {

namespace {

// -> shares (sequences, E), squares (sequences), counts (sequences, E) int32
Tensors3 balance_sums(Tensor const& logits, Tensor const& ids, MaybeTensor const& token_mask,
                      int64_t score, int64_t sequences) {
  Place const place(logits, "logits");
  require_dims(logits, "logits", 2);
  require_dims(ids, "ids", 2);
  require(sequences >= 1, "sequences: expected at least 1, got ", sequences);
  int64_t const tokens = logits.size(0), experts = logits.size(1), top_k = ids.size(1);
  BalanceSums args;
  args.tokens = tokens;
  args.experts = experts;
  args.top_k = top_k;
  args.sequences = sequences;
  args.dtype = dtype_of(logits, "logits");
  args.score = score_of(score);
  args.logits = place.rows(logits, "logits", args.dtype, {tokens, experts});
  args.ids = place.indices(ids, "ids", {tokens, top_k});
  if (token_mask.has_value()) {
    args.token_mask = place.flags(*token_mask, "token_mask", {tokens});
  }
  Tensor shares = place.empty({sequences, experts}, args.dtype);
  Tensor squares = place.empty({sequences}, args.dtype);
  Tensor counts = place.empty_int32({sequences, experts});
  args.shares = shares.data_ptr();
  args.squares = squares.data_ptr();
  args.counts = static_cast<int32_t*>(counts.data_ptr());
  Tensor const workspace = place.workspace(balance_workspace_bytes(tokens, experts, sequences));
  args.workspace = workspace.data_ptr();
  place.run(cpu::balance_sums, cuda::balance_sums, args);
  return {shares, squares, counts};
}

Tensor balance_sums_backward(Tensor const& dshares, Tensor const& dsquares, Tensor const& logits,
                             MaybeTensor const& token_mask, int64_t score) {
  Place const place(logits, "logits");
  require_dims(logits, "logits", 2);
  require_dims(dshares, "dshares", 2);
  int64_t const tokens = logits.size(0), experts = logits.size(1), sequences = dshares.size(0);
  BalanceGradient args;
  args.tokens = tokens;
  args.experts = experts;
  args.sequences = sequences;
  args.dtype = dtype_of(logits, "logits");
  args.score = score_of(score);
  args.logits = place.rows(logits, "logits", args.dtype, {tokens, experts});
  if (token_mask.has_value()) {
    args.token_mask = place.flags(*token_mask, "token_mask", {tokens});
  }
  args.dshares = place.packed(dshares, "dshares", args.dtype, {sequences, experts});
  args.dsquares = place.packed(dsquares, "dsquares", args.dtype, {sequences});
  Tensor dlogits = place.empty({tokens, experts}, args.dtype);
  args.dlogits = {dlogits.data_ptr(), 0};
  place.run(cpu::balance_gradient, cuda::balance_gradient, args);
  return dlogits;
}

}  // namespace

void define_balancing(Library& m) {
  m.def(
      "balance_sums(Tensor logits, Tensor ids, Tensor? token_mask, int score, int sequences) -> "
      "(Tensor shares, Tensor squares, Tensor counts)");
  m.def(
      "balance_sums_backward(Tensor dshares, Tensor dsquares, Tensor logits, Tensor? token_mask, "
      "int score) -> Tensor");
}

void implement_balancing(Library& m) {
  m.impl("balance_sums", TORCH_BOX(&balance_sums));
  m.impl("balance_sums_backward", TORCH_BOX(&balance_sums_backward));
}

}  // namespace guild::binding
