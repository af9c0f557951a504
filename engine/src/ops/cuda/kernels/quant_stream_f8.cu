#include "ops/cuda/kernels/quant_stream_kernel.h"

namespace charonia::cuda {
template bool launch_quant_stream<ops::Code::f8_e4m3>(Stream&, const QuantParams&, const GemmTactic&, DType, int);
}  // namespace charonia::cuda
