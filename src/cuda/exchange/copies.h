// Steps of a layer over ranks that overlap with others, and the offsets of a product that may have
// nothing to do.
#pragma once
#include <cuda_runtime_api.h>

#include "guild/exchange.h"

namespace guild {
struct OffsetsBeyond;
}

namespace guild::cuda {

// begun: an event to record when all blocks of the kernel have a multiprocessor, or null. A product
// that waits for it can take all multiprocessors that are left, and the others once the rows have
// arrived. push() by slot does not record it.
void pull(Pull const& x, Queue const& queue, cudaEvent_t begun);
void push(Push const& x, Queue const& queue, cudaEvent_t begun);

// push() by token, with arguments that have been checked.
void push_sums(Push const& x, Queue const& queue, cudaEvent_t begun);

// tables() and the sort of the slots that it writes, in one launch where there are few.
void tables_and_sort(Tables const& x, Sort const& sort, Queue const& queue);

// sort_by_expert() of slots that were complete before the previous kernel on the queue started,
// which therefore may still run meanwhile.
void sort_beside(Sort const& x, Queue const& queue);

void only_beyond(OffsetsBeyond const& x, Queue const& queue);

}  // namespace guild::cuda
