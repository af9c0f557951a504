// Mixture of experts on a CUDA device: the weights.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "ops/cuda/cuda_quant_weights.h"
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
  // Quantised, in the same order of rows; data: the type of inputs and outputs. Where down's columns have an order, the
  // rows of gate and up have it too. Throws the same, naming the weight. Input scales: the largest of all experts'
  // holds.
  CudaExperts(std::span<const ops::QuantExpertSource> experts, DType data, MatrixUpload& upload);
  DType type() const { return type_; }
  const void* gate_up() const { return quantised_ ? quant_gate_up_.codes() : gate_up_.data(); }
  const void* down() const { return quantised_ ? quant_down_.codes() : down_.data(); }
  // Null where they are not quantised.
  std::optional<QuantWeight> gate_up_quant() const;
  std::optional<QuantWeight> down_quant() const;

 private:
  void check_count(std::size_t count);

  DType type_;
  bool quantised_ = false;
  DeviceMemory gate_up_, down_;
  QuantMatrices quant_gate_up_, quant_down_;
  DeviceMemory order_;  // [experts][hidden] of gate's and up's columns; none: in order
  float gate_up_input_scale_ = 0, down_input_scale_ = 0;
};

}  // namespace charonia::cuda
