// Reads a model's config.pbtxt. Does not use Triton's API.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "charonia/config.h"

namespace charonia::triton {

struct ModelOptions {
  // The `parameters` that have a value. `device` is set by the kind of the instance group: cpu with KIND_CPU, cuda with
  // KIND_GPU. KIND_MODEL leaves the choice to the setting `device`.
  Settings settings;
  std::vector<int> gpus;  // with KIND_GPU: the GPUs of the group; all GPUs of the server if the group names none
  bool warmup = false;    // the server sends requests before the model is ready
};

// Reads a model configuration in Triton's JSON, in which KIND_AUTO is already KIND_GPU or KIND_CPU. Throws
// Error(invalid_argument) if the backend does not support it (a model that is not decoupled, max_batch_size other than
// 0, more than one instance, a sequence batcher), or if the instance group and a parameter `device` or `device_ids`
// contradict each other.
ModelOptions read_model_options(std::string_view json);

// Returns the setting device_ids for an instance group of these GPUs: one GPU per rank. The group may have more GPUs.
std::string device_ids_of(const std::vector<int>& gpus, int ranks);

}  // namespace charonia::triton
