// Mixture of experts on a CUDA device: the weights.
#pragma once

#include <cstdint>
#include <span>

#include "ops/cuda/cuda_weights.h"
#include "ops/cuda/device/runtime.h"
#include "ops/device.h"

namespace charonia::cuda {

// All experts of a layer one behind the other, hidden and inter padded to kExpertVector with zeros:
//   gate_up  [experts][2 * inter, hidden]  rows 16 i + j: row 8 i + j of gate for j < 8, of up behind
//   down     [experts][hidden, inter]
class CudaExperts : public ops::Experts {
 public:
  // Throws Error(invalid_argument) when shapes do not fit together, Error(unsupported) for more experts than there may
  // be.
  CudaExperts(std::span<const ops::ExpertSource> experts, DType weight, MatrixUpload& upload);
  DType type() const { return type_; }
  const void* gate_up() const { return gate_up_.data(); }
  const void* down() const { return down_.data(); }

 private:
  DType type_;
  DeviceMemory gate_up_, down_;
};

}  // namespace charonia::cuda
