// Which counter a launch claims its tiles from.
#include <functional>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "cuda/device.h"
#include "cuda/sm90/decode/claims.h"

namespace guild::cuda::sm90 {
namespace {

using Key = std::pair<void const*, void const*>;

struct HashOfKey {
  size_t operator()(Key const& key) const {
    std::hash<void const*> const hash;
    return hash(key.first) ^ (hash(key.second) << 1);
  }
};

}  // namespace

// A launch cannot clear its own counter: its first blocks would claim before its last block has
// begun. So every launch leaves its counter at 0, in memory that nothing else writes, and launches
// that may run concurrently, in eager calls or in graphs, need counters of their own. The address
// of the result identifies a launch; launches on concurrent streams that write parts of one result
// are told apart by their queues' counters.
int claims_of(void const* out, Queue const& queue) {
  static std::mutex mutex;
  static std::unordered_map<Key, int, HashOfKey> counter_of;
  int32_t const* const own = queue.counters == nullptr ? queue.counter : queue.counters->first;
  Key const key{out, queue.shared ? own : nullptr};
  std::lock_guard const lock(mutex);
  auto const found = counter_of.find(key);
  if (found != counter_of.end()) return found->second;
  int const next = int(counter_of.size());
  if (next == kClaimCounters) return -1;
  counter_of.emplace(key, next);
  return next;
}

}  // namespace guild::cuda::sm90
