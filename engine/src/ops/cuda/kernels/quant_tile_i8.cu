#include "ops/cuda/kernels/quant_tile_kernel.h"

namespace charonia::cuda {
template bool launch_quant_tile<ops::Code::i8>(Stream&, const QuantParams&, const GemmTactic&, DType, int);
}  // namespace charonia::cuda
