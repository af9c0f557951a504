// Loads weights from the files onto the device.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "charonia/config.h"
#include "model/adapter.h"
#include "model/rope.h"
#include "model/weights.h"
#include "ops/ops.h"

namespace charonia::model {

using Vector = std::unique_ptr<ops::Buffer>;  // f32
inline const float* data(const Vector& vector) { return vector ? vector->as<float>() : nullptr; }

// Tables of positions that all layers use, on the device. Null if absent.
struct PositionTables {
  Vector rotary, local_rotary;  // of RotaryTables
  Vector q_scales;              // [max_positions]
  Vector slopes;                // of ALiBi, [heads of this rank]
};

// A matrix that is made on the host.
struct MadeMatrix {
  DType type = DType::f32;
  std::int64_t rows = 0, cols = 0;
  std::vector<std::byte> data;

  void append(float value);
  ops::HostMatrix matrix() const { return {data.data(), type, rows, cols, 0}; }
};
// Splits a matrix into the sum of two matrices of a 16-bit type: the rounded values, and the rounded rounding errors.
// Together they keep 16 bits of a value with bf16 and 22 with fp16.
std::array<MadeMatrix, 2> halves(const std::vector<ops::HostMatrix>& parts, DType type);

float rounded(float value, DType type);
std::vector<ops::HostMatrix> stacked(std::vector<ops::HostMatrix> first, const std::vector<ops::HostMatrix>& second);

class WeightLoader {
 public:
  // unit_offset: norms multiply by 1 + weight.
  WeightLoader(const WeightFiles& files, ops::Ops& ops, DType weight, bool unit_offset, const PositionTables& tables);

  // A weight: its canonical name and its required shape.
  struct Wanted {
    std::string name;
    std::int64_t rows = 0, cols = 0;
  };
  // Stacks the weights along the rows. Either all are quantised in one format, or none is quantised.
  std::unique_ptr<ops::Linear> linear(std::span<const Wanted> weights, const std::vector<ops::HostMatrix>& bias);
  std::unique_ptr<ops::Linear> dense_linear(std::span<const ops::HostMatrix> parts,
                                            std::span<const ops::HostMatrix> bias = {});
  // Gate, up and down of each expert, and its biases. top_k: the number of experts that a token reads.
  std::unique_ptr<ops::Experts> experts(std::span<const std::array<Wanted, 3>> experts,
                                        std::span<const ops::ExpertBiases> biases, int top_k);
  ops::HostMatrix bias(const std::string& name, std::int64_t rows) const;
  // in_host_memory: see Device::make_embedding().
  std::unique_ptr<ops::Embedding> embedding(const Wanted& table, bool in_host_memory = false);
  // A depthwise convolution's weight [channels, kernel], as ShortConvParams::weight [kernel, channels].
  Vector conv(const std::string& name, std::int64_t channels, int kernel) const;
  std::vector<float> norm_values(const std::string& name, std::int64_t n) const;
  // The values [rows, cols] of a weight; a quantised weight is dequantised.
  std::vector<float> values(const std::string& name, std::int64_t rows, std::int64_t cols) const;
  // The values with each row divided by its length, in the weight type.
  MadeMatrix unit_rows(const Wanted& wanted) const;
  Vector norm(const std::string& name, std::int64_t n) const { return vector(norm_values(name, n)); }
  Vector vector(std::span<const float> values) const;

  const WeightFiles& files;
  const PositionTables& tables;
  const DType weight;  // the type of weights that are not quantised
  int cache_layer = 0;  // the layer of the next block's KV cache
  bool fp8_cache = false;  // the KV cache stores FP8, with the model's scales
  LinearPlaces places;  // of the weights that linear() has made
  std::int64_t bytes = 0, bytes_per_step = 0;  // of the loaded matrices, and what a step of one token reads

 private:
  std::unique_ptr<ops::Linear> count(std::unique_ptr<ops::Linear> made);
  std::unique_ptr<ops::Linear> placed(std::unique_ptr<ops::Linear> made, std::span<const Wanted> weights);
  std::unique_ptr<ops::Experts> dense_experts(std::span<const std::array<Wanted, 3>> experts,
                                              std::span<const ops::ExpertBiases> biases);
  std::unique_ptr<ops::Experts> quantised_experts(std::span<const std::array<Wanted, 3>> experts,
                                                  std::span<const ops::ExpertBiases> biases);

  ops::Ops& ops_;
  bool unit_offset_;
};

}  // namespace charonia::model
