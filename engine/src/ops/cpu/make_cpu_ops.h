// Creates the CPU device.
#pragma once

#include <memory>

#include "ops/ops.h"

namespace charonia::ops {

// Collectives between the ranks of one process, for devices that use host memory. Calls block until all ranks have
// arrived.
class ProcessGroup;
std::shared_ptr<ProcessGroup> make_process_group(int ranks);

// threads: 0 means one per processor. The environment variable CHARONIA_ISA=portable|avx2|avx512|avx512_bf16|amx forces
// an instruction set (rejected if the processor does not have it). group: the group in which this is rank `rank`; null:
// a single rank.
std::unique_ptr<Ops> make_cpu_ops(int threads, std::shared_ptr<ProcessGroup> group = nullptr, int rank = 0);

}  // namespace charonia::ops
