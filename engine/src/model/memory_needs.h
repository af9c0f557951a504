// Computes the device memory of a decoder before it is created.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "charonia/config.h"
#include "model/shard.h"
#include "ops/device.h"
#include "ops/step.h"

namespace charonia::model {

// The sizes of a device's data structures.
struct DeviceSizes {
  std::function<ops::Precision(DType)> precision;
  std::function<std::size_t(const ops::KvLayout&)> kv_block_bytes;
  std::function<std::size_t(const ops::ExpertsShape&, std::int64_t rows)> experts_scratch_bytes;
};
DeviceSizes sizes_of(const ops::Device& device);

struct MemoryNeeds {
  std::size_t weights = 0;      // bytes, without the padding of the device's layout
  std::size_t activations = 0;  // bytes
  std::size_t kv_block = 0;     // bytes of one block in all layers
};
// For one rank of the model that the manifest describes.
MemoryNeeds memory_needs(const ModelConfig& config, const Manifest& manifest, const Shard& shard,
                         const DeviceSizes& sizes, const ops::StepLimits& limits);

// One rank's experts of a layer.
ops::ExpertsShape experts_shape(const ModelConfig& config, const Shard& shard, DType weight);

}  // namespace charonia::model
