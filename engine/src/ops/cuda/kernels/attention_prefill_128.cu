#include "ops/cuda/kernels/attention_prefill_kernel.h"

namespace charonia::cuda {

template void start_prefill<bf16, 128>(Stream&, AttentionParams, std::int64_t);
template void start_prefill<f16, 128>(Stream&, AttentionParams, std::int64_t);

}  // namespace charonia::cuda
