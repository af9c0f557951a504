// Mixture of experts on a CUDA device: the weights.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "ops/cuda/cuda_quant_weights.h"
#include "ops/cuda/cuda_weights.h"
#include "ops/cuda/device/runtime.h"
#include "ops/cuda/kernels/experts.h"
#include "ops/device.h"

namespace charonia::cuda {

// All experts of a layer, contiguous; hidden and inter are padded with zeros to multiples of kExpertVector:
//   gate_up  [experts][2 * inter, hidden]  rows 16 i + j: row 8 i + j of gate for j < 8, then 8 rows of up
//   down     [experts][hidden, inter]
// Biases are float, in the order of the rows.
class CudaExperts : public ops::Experts {
 public:
  // Throws Error(invalid_argument) if the shapes do not match, and Error(unsupported) if there are too many experts.
  CudaExperts(std::span<const ops::ExpertSource> experts, DType weight, MatrixUpload& upload);
  // Quantised weights, with the same order of rows; data: the type of inputs and outputs. If down's columns have an
  // order, the rows of gate and up get the same order. The largest input scale of all experts is used. If one
  // weight has to be dequantised (cuda_dequantises()), all are. Throws the same errors, with the weight's name.
  CudaExperts(std::span<const ops::QuantExpertSource> experts, DType data, MatrixUpload& upload);
  DType type() const { return type_; }
  const void* gate_up() const { return quantised_ ? quant_gate_up_.codes() : gate_up_.data(); }
  const void* down() const { return quantised_ ? quant_down_.codes() : down_.data(); }
  // Null if there are no biases.
  const float* gate_up_bias() const { return gate_up_bias_.as<float>(); }
  const float* down_bias() const { return down_bias_.as<float>(); }
  // Empty if they are not quantised.
  std::optional<QuantWeight> gate_up_quant() const;
  std::optional<QuantWeight> down_quant() const;
  // The GEMMs without inputs, outputs and tiles. Rows of inputs have k elements.
  ExpertGemm gate_up_gemm() const;
  ExpertGemm down_gemm() const;

 private:
  void check_count(std::size_t count);
  // Source: as below. Loads the matrices as weights that are not quantised.
  template <class Source>
  void load_dense(std::span<const Source> experts, MatrixUpload& upload);
  // Source: ExpertSource or QuantExpertSource. Throws Error(invalid_argument) if sizes do not match.
  template <class Source>
  void make_biases(std::span<const Source> experts, MatrixUpload& upload);

  DType type_;
  bool quantised_ = false;
  DeviceMemory gate_up_, down_, gate_up_bias_, down_bias_;
  QuantMatrices quant_gate_up_, quant_down_;
  DeviceMemory order_;  // [experts][hidden]: order of gate's and up's columns; empty: ascending
  float gate_up_input_scale_ = 0, down_input_scale_ = 0;
};

// The assignment of rows to experts, with its parts of the memory of `space`. The logits are still missing.
RouteParams route_params(const ExpertsWorkspace& space, void* memory, int experts, const ops::RouterParams& how,
                         int tile_rows);

}  // namespace charonia::cuda
