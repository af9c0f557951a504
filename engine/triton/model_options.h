// What a model's config.pbtxt asks of the backend. Knows nothing of the server.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "charonia/config.h"

namespace charonia::triton {

struct ModelOptions {
  // `parameters` whose keys are the engine's, those without a value left out; and `device` by the kind of the instance
  // group: KIND_CPU is cpu, KIND_GPU is cuda, KIND_MODEL leaves it to the settings.
  Settings settings;
  std::vector<int> gpus;  // of KIND_GPU: those that the group names, or all that the server has where it names none
  bool warmup = false;    // the server sends requests before the model is ready
};

// Reads a model configuration as Triton writes it in JSON, where KIND_AUTO has become KIND_GPU or KIND_CPU. Throws
// Error(invalid_argument) where it asks for what this backend does not do (a model that is not decoupled,
// max_batch_size other than 0, more than one instance, a sequence batcher) or contradicts itself (an instance group of
// one device and a parameter `device` or `device_ids` of another).
ModelOptions read_model_options(std::string_view json);

// The setting device_ids for an instance group of these GPUs: one for each rank. A group may name more, as one does
// that the server has completed.
std::string device_ids_of(const std::vector<int>& gpus, int ranks);

}  // namespace charonia::triton
