// Chooses the devices of a configuration, and creates their operations.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "charonia/config.h"
#include "ops/ops.h"

namespace charonia::runtime {

// Where the ranks of a configuration run.
struct DeviceChoice {
  std::string device;     // "cpu" | "cuda" | "null"
  std::vector<int> gpus;  // the GPU of each rank; empty without GPUs
  std::string note;       // why device = auto chose the CPU; otherwise empty
};

// device = auto chooses GPUs if there is a usable one, else the CPU. Throws the same errors as make_devices().
DeviceChoice choose_devices(const EngineConfig& config);

// Returns the smallest number of SMs of these GPUs; 0 without GPUs.
int sms_of(const std::vector<int>& gpus);

// EngineInfo::arithmetic. The configuration is resolved; instruction_set: Device::instruction_set() of its devices.
std::string arithmetic_of(const EngineConfig& config, std::string_view instruction_set);
// The part of it without session_len.
std::string kernels_of(const EngineConfig& config, std::string_view instruction_set);

// Returns the operations of the tensor_para_size ranks, in the order of the ranks. Resolves `device`, `device_ids`,
// `threads` and the sizes of steps (memory_plan.h) in the configuration; see choose_devices() for auto. Throws
// Error(unsupported or unavailable), with the reason and the remedy, if the device is missing or there are too few.
// Throws Error(invalid_argument) for settings of another device. weights_dir, model: the model that will run on the
// devices.
std::vector<std::unique_ptr<ops::Ops>> make_devices(const std::filesystem::path& weights_dir, const ModelConfig& model,
                                                    EngineConfig& config);

// Lets tests intercept the calls of the engine to its devices: the engine uses the result of `wrap` instead of each
// device. Without a function, the engine uses the devices directly.
using DeviceWrapper = std::function<std::unique_ptr<ops::Ops>(std::unique_ptr<ops::Ops>)>;
void wrap_devices_for_tests(DeviceWrapper wrap);

}  // namespace charonia::runtime
