#include "ops/cuda/kernels/quant_wgmma_kernel.h"

namespace charonia::cuda {
template bool launch_quant_wgmma<ops::Code::f8_e4m3>(Stream&, const QuantParams&, const GemmTactic&, DType, int);
}  // namespace charonia::cuda
