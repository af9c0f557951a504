// How much of a device's memory things take, without the device.
#pragma once

#include <cstddef>
#include <string_view>

#include "charonia/config.h"
#include "model/manifest.h"
#include "model/memory_needs.h"
#include "model/shard.h"
#include "ops/step.h"

namespace charonia::runtime {

// device: "cpu" | "cuda" | "null". Those of the CPU are its own, and null has the same; those of CUDA are the same
// numbers as on a machine that has a GPU.
model::DeviceSizes device_sizes(std::string_view device);

// Memory of one rank that a device takes for steps beside the model's activations, at most: arrays of a step,
// work space of GEMMs and of sampling, partial results of attention, captured steps.
std::size_t step_bytes(std::string_view device, const ModelConfig& model, const model::Manifest& manifest,
                       const model::Shard& shard, const ops::StepLimits& limits);
// What of step_bytes() is there once the weights are, at most: the part of a weight that a GEMM dequantises.
std::size_t loaded_step_bytes(std::string_view device, const model::Manifest& manifest, const model::Shard& shard);

}  // namespace charonia::runtime
