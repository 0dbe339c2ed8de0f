// A sorting network as a constant: the same exchanges whatever the data, so that a thread can sort
// values that it holds in registers.
//
// Batcher's odd-even merge sort (Knuth, The Art of Computer Programming 5.2.2, algorithm M).
#pragma once
#include <array>
#include <utility>

#include "shared/activation.h"

namespace guild {

struct Exchange {
  int first, second;  // positions, first < second
};

// Calls f(Exchange) for each exchange of `count` values, a power of two, in order.
template <class F>
constexpr void each_exchange(int count, F&& f) {
  for (int p = 1; p < count; p *= 2) {
    for (int k = p; k >= 1; k /= 2) {
      for (int j = k % p; j + k < count; j += 2 * k) {
        for (int a = j; a < j + k && a + k < count; ++a) {
          if (a / (2 * p) == (a + k) / (2 * p)) f(Exchange{a, a + k});
        }
      }
    }
  }
}

constexpr int exchanges_of(int count) {
  int exchanges = 0;
  each_exchange(count, [&](Exchange) { ++exchanges; });
  return exchanges;
}

template <int count>
constexpr std::array<Exchange, exchanges_of(count)> merge_sort_network() {
  std::array<Exchange, exchanges_of(count)> network{};
  int next = 0;
  each_exchange(count, [&](Exchange exchange) { network[next++] = exchange; });
  return network;
}

template <int count>
inline constexpr auto kMergeSort = merge_sort_network<count>();

template <int first, int second, class V, int count>
GUILD_HD void put_greater_first(V (&values)[count]) {
  V const x = values[first], y = values[second], greater = x > y ? x : y;
  values[first] = greater;
  values[second] = x ^ y ^ greater;  // one comparison for both
}

// Sorts values in falling order: 5 exchanges of 4, 19 of 8, 63 of 16, 191 of 32.
template <class V, int count>
GUILD_HD void sort_falling(V (&values)[count]) {
  [&]<size_t... i>(std::index_sequence<i...>) {
    (put_greater_first<kMergeSort<count>[i].first, kMergeSort<count>[i].second>(values), ...);
  }(std::make_index_sequence<size_t(exchanges_of(count))>());
}

// The four greatest of two falling lists of four, falling, in `best`: the greater halves of a
// bitonic sequence, then its merge.
template <class V>
GUILD_HD void keep_greatest(V (&best)[4], V const (&other)[4]) {
  for (int i = 0; i < 4; ++i) best[i] = best[i] > other[3 - i] ? best[i] : other[3 - i];
  put_greater_first<0, 2>(best);
  put_greater_first<1, 3>(best);
  put_greater_first<0, 1>(best);
  put_greater_first<2, 3>(best);
}

}  // namespace guild
