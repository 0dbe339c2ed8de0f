// Steps of a multi-rank layer that overlap with others, and the offsets of a product that may have
// nothing to do.
#pragma once
#include <cuda_runtime_api.h>

#include "guild/exchange.h"

namespace guild {
struct OffsetsBeyond;
}

namespace guild::cuda {

// begun: an event to record once all blocks of the kernel are resident, or null. A product that
// waits for it can take the remaining SMs, and the others when the copy has finished. push() by
// slot does not record it.
void pull(Pull const& x, Queue const& queue, cudaEvent_t begun);
void push(Push const& x, Queue const& queue, cudaEvent_t begun);

// push() by token, with arguments that have been checked.
void push_sums(Push const& x, Queue const& queue, cudaEvent_t begun);

// tables() and the sort of the slots that it writes, in one launch where there are few.
void tables_and_sort(Tables const& x, Sort const& sort, Queue const& queue);

// sort_by_expert() for slots that were complete before the preceding kernel on the queue started.
// That kernel may therefore still run meanwhile.
void sort_beside(Sort const& x, Queue const& queue);

void only_beyond(OffsetsBeyond const& x, Queue const& queue);

}  // namespace guild::cuda
