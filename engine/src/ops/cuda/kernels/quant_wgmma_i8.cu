#include "ops/cuda/kernels/quant_wgmma_kernel.h"

namespace charonia::cuda {
template bool launch_quant_wgmma<ops::Code::i8>(Stream&, const QuantParams&, const GemmTactic&, DType, int);
}  // namespace charonia::cuda
