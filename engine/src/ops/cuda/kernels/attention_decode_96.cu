#include "ops/cuda/kernels/attention_decode_kernel.h"

namespace charonia::cuda {

template void start_decode<bf16, 96>(Stream&, const DeviceInfo&, AttentionParams, std::int64_t);
template void start_decode<f16, 96>(Stream&, const DeviceInfo&, AttentionParams, std::int64_t);

}  // namespace charonia::cuda
