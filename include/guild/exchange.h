// Exchange of token rows between ranks that read and write each other's memory: the GPUs of one
// host with peer access, or processes that share memory.
//
// Every rank has one piece of memory, laid out alike and mapped by all others. A layer's tokens go
// through it in two halves, each with a barrier in the middle:
//
//   publish   this rank's rows, and in forward its routing, into its own memory
//   meet      the barrier
//   tables    all ranks' routing, with this rank's experts numbered from 0 and others' -1
//   pull      rows of all ranks that have an expert here, each once
//   ... the experts ...
//   push      results, into the memory of the rank that they belong to
//   meet      the barrier
//   collect   for each token, the sum of its results over the ranks
//
// Only meet(), a single block on a GPU, waits for other ranks, and only for a limited time.
// Published data is double-buffered, so that the next rows need not wait until every rank has read
// the last ones. guild/peer_layer.h has the whole layer, where rows travel while products run.
#pragma once
#include "guild/cuda.h"
#include "guild/types.h"

namespace guild {

inline constexpr int kMostRanks = 32;
inline constexpr int kMostFacts = 14;

// The memory that ranks share. It serves calls of any size up to these.
struct PeerMemory {
  int64_t ranks = 1, rank = 0;
  int64_t tokens = 0;     // Tm: the most of any rank
  int64_t top_k = 1;      // the most choices of a token
  int64_t row_bytes = 0;  // of the widest row
  int64_t returned = 1;   // the most rows that come back for one token, in units of Tm
  // (ranks) each rank's memory as this rank addresses it, 16-byte aligned. On the CPU a null or
  // misaligned one throws Error; for CUDA the list too is in device memory and cannot be checked.
  void* const* peers = nullptr;
};

// The size of each rank's memory, which must be zeroed before first use. These three functions do
// not read `peers`; sizes whose product is too large throw Error, as in every call below.
int64_t peer_memory_bytes(PeerMemory const& memory);
// The offsets, in bytes, of what came back for this rank's tokens: rows, and gradients of scores.
int64_t returned_rows_offset(PeerMemory const& memory);
int64_t returned_scores_offset(PeerMemory const& memory);

// Why the ranks cannot go on.
enum class PeerFailure : int { none, late, differs, overflow };

// The record of a failure for the host, in host memory that the device writes to.
struct PeerReport {
  int64_t failure = 0;   // PeerFailure; written last
  int64_t rank = 0;      // the rank that is late, differs or had too many rows
  int64_t reporter = 0;  // the rank that noticed first
  int64_t fact = 0;      // index of the fact that differs
  int64_t rows = 0;      // how many would have been needed
};

// Publishes rows and, with ids, the routing of this rank's tokens. T <= Tm.
struct Publish {
  PeerMemory memory = {};
  int64_t tokens = 0, top_k = 1;
  int64_t experts = 1;  // of all ranks
  int64_t row_bytes = 0, score_bytes = 4;
  void const* rows = nullptr;    // (T) rows
  int64_t row_stride = 0;        // bytes from one to the next, at least row_bytes where T > 1
  int32_t const* ids = nullptr;  // (T, K) in [0, experts); others are skipped; null: none
  void const* scores = nullptr;  // (T, K)
  int32_t* token_row = nullptr;  // (T, ranks) out: r T + t where token t has an expert on r, or -1
};

// Waits until all ranks have arrived, and compares their `facts`. If facts differ, if a rank is
// late or if one had too many rows, every rank's report says so, what came back becomes NaN, and
// nothing is pulled or pushed from then on. Later calls wait for nobody and report the same again.
struct Meet {
  PeerMemory memory = {};
  bool published = false;  // the barrier after publish
  double seconds = 0;      // to wait at most, for all ranks together
  int64_t count = 0;       // number of facts
  int64_t facts[kMostFacts] = {};
  PeerReport* report = nullptr;  // never null
  // (1) how many rows were needed, where there was room for `capacity`; null: not checked.
  int32_t const* needed = nullptr;
  int64_t capacity = 0;
};

// The routing of all ranks' tokens; slots of tokens that a rank does not have are -1.
struct Tables {
  PeerMemory memory = {};
  int64_t top_k = 1, experts = 1, score_bytes = 4;
  int32_t* ids = nullptr;     // (ranks * Tm, K) out: of this rank's experts, or -1
  void* scores = nullptr;     // (ranks * Tm, K) out; 0 where the id is -1
  int32_t* tokens = nullptr;  // (ranks) out: how many each rank has
};

// How much of a step a call does: all of it, or one of two parts.
enum class Part : int { whole, first, rest };

// Pulls the tokens' rows: row r Tm + t is that of rank r's token t if that has an expert here,
// otherwise zeros.
//
// In two calls, the first pulls this rank's own tokens and those that have one of the first experts
// here; the products of these experts then need no other rows.
struct Pull {
  PeerMemory memory = {};
  int64_t top_k = 1, row_bytes = 0;
  int32_t const* ids = nullptr;  // (ranks * Tm, K) of Tables
  void* rows = nullptr;          // (ranks * Tm) rows out, packed
  Part part = Part::whole;
  int64_t first_experts = 0;  // how many count as the first; not read with Part::whole
};

// Pushes results to the ranks that they belong to:
//   by token   sum over k of score[p, k] * y[row_of[p, k]], fp32, to row (this rank) T_r + t of r
//   by slot    y[row_of[p, k]] to row t K + k of r
// with p = r Tm + t. A token without a row here has no result.
//
// By token it can be in two calls, where the last experts' rows are computed last: the first pushes
// the sums of tokens whose rows all lie before *rest_from, the second those of the others. On CUDA
// all tokens with more than 32 slots are among the others.
struct Push {
  PeerMemory memory = {};
  DType dtype = DType::float32;
  int64_t hidden = 0, rows = 0, top_k = 1;
  bool by_slot = false;
  ConstRows y = {};                        // (rows, H)
  int32_t const* row_of = nullptr;         // (ranks * Tm, K), or (slots) with lists; -1: none
  void const* scores = nullptr;            // as row_of; null: 1; not read by slot
  int32_t const* token_offsets = nullptr;  // (ranks * Tm + 1) of lists of `rows` slots, or null
  int32_t const* tokens = nullptr;         // (ranks) of Tables; not read by slot
  Part part = Part::whole;
  int32_t const* rest_from = nullptr;  // (1); not read with Part::whole
};

// After the barrier: o[t] = residual[t] + sum over ranks of row token_row[t, r] that came back, in
// the order of the ranks, fp32.
struct Collect {
  PeerMemory memory = {};
  DType dtype = DType::float32;
  int64_t tokens = 0, hidden = 0;
  int32_t const* token_row = nullptr;  // (T, ranks) of Publish
  ConstRows residual = {};             // (T, H); null: none
  void* o = nullptr;                   // (T, H) out, packed
};

// Pushes score[p, k] to score t K + k of rank r, p = r Tm + t, where ids[p, k] >= 0.
struct PushScores {
  PeerMemory memory = {};
  int64_t top_k = 1, score_bytes = 4;
  int32_t const* ids = nullptr;  // (ranks * Tm, K) of Tables
  void const* scores = nullptr;  // (ranks * Tm, K)
};

// Gradients of scores that come back for this rank's slots. clear_scores() comes before the barrier
// after which they are pushed, so that slots to which no rank pushes have zeros.
struct ReturnedScores {
  PeerMemory memory = {};
  int64_t slots = 0, score_bytes = 4;
  void* scores = nullptr;  // (slots) out of collect_scores(); clear_scores() does not use it
};

namespace cpu {
void publish(Publish const& args);
void meet(Meet const& args);
void tables(Tables const& args);
void pull(Pull const& args);
void push(Push const& args);
void collect(Collect const& args);
void push_scores(PushScores const& args);
void clear_scores(ReturnedScores const& args);
void collect_scores(ReturnedScores const& args);
}  // namespace cpu

namespace cuda {
void publish(Publish const& args, Queue queue = {});
void meet(Meet const& args, Queue queue = {});
void tables(Tables const& args, Queue queue = {});
void pull(Pull const& args, Queue queue = {});
void push(Push const& args, Queue queue = {});
void collect(Collect const& args, Queue queue = {});
void push_scores(PushScores const& args, Queue queue = {});
void clear_scores(ReturnedScores const& args, Queue queue = {});
void collect_scores(ReturnedScores const& args, Queue queue = {});
}  // namespace cuda

}  // namespace guild
