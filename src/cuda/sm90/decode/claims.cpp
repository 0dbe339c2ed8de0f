// Which counter a launch claims its tiles from.
#include <mutex>
#include <unordered_map>

#include "cuda/sm90/decode/claims.h"
#include "cuda/sm90/decode/decode.h"

namespace guild::cuda::sm90 {

// A launch cannot clear its counter itself: its first blocks would claim before the last one has
// begun. So every launch leaves its counter at 0, which requires memory that nothing else writes,
// and two launches that run at the same time, in eager calls or in graphs, need two counters. The
// addresses of their results distinguish such launches, since these must not be written by two at
// the same time either.
int claims_of(void const* out) {
  static std::mutex mutex;
  static std::unordered_map<void const*, int> counter_of;
  std::lock_guard const lock(mutex);
  auto const found = counter_of.find(out);
  if (found != counter_of.end()) return found->second;
  int const next = int(counter_of.size());
  if (next == kClaimCounters) return -1;
  counter_of.emplace(out, next);
  return next;
}

}  // namespace guild::cuda::sm90
