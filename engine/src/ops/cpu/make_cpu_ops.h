// The CPU, as the runtime sees it.
#pragma once

#include <memory>

#include "ops/ops.h"

namespace charonia::ops {

// Collectives between the ranks of one process, for devices whose memory is the host's. Calls block until all ranks
// came.
class ProcessGroup;
std::shared_ptr<ProcessGroup> make_process_group(int ranks);

// threads: 0 means as many as there are processors. Env CHARONIA_ISA=portable|avx2|avx512|avx512_bf16|amx forces an
// instruction set (one that the processor lacks is refused). group: of which this is rank `rank`; null: alone.
std::unique_ptr<Ops> make_cpu_ops(int threads, std::shared_ptr<ProcessGroup> group = nullptr, int rank = 0);

}  // namespace charonia::ops
