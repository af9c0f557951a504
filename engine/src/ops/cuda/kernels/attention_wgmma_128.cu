#include "ops/cuda/kernels/attention_wgmma_kernel.h"

namespace charonia::cuda {

template void start_wgmma_prefill<bf16, 128>(Stream&, const AttentionParams&, std::int64_t, std::int64_t, std::int64_t);
template void start_wgmma_prefill<f16, 128>(Stream&, const AttentionParams&, std::int64_t, std::int64_t, std::int64_t);

}  // namespace charonia::cuda
