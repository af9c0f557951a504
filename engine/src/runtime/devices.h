// Which devices a configuration means, and the operations on them.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "charonia/config.h"
#include "ops/ops.h"

namespace charonia::runtime {

// Where the ranks of a configuration run.
struct DeviceChoice {
  std::string device;     // "cpu" | "cuda" | "null"
  std::vector<int> gpus;  // of the ranks; none: no GPU
  std::string note;       // why device = auto is the CPU; empty otherwise
};

// Auto means the GPUs where there is one that can be used, else the CPU. Throws as make_devices().
DeviceChoice choose_devices(const EngineConfig& config);

// The smallest number of SMs of these GPUs; 0 for none.
int sms_of(const std::vector<int>& gpus);

// Operations of the tensor_para_size ranks, in their order. `device`, `device_ids`, `threads` and the sizes of steps
// (memory_plan.h) of the configuration are resolved: auto means the GPUs where there is one that can be used, else the
// CPU. Throws Error(unsupported or unavailable) with the reason and what to set when the device that is asked for is
// not there, or there are too few, and Error(invalid_argument) for settings of another device. weights_dir, model: of what will run there.
std::vector<std::unique_ptr<ops::Ops>> make_devices(const std::filesystem::path& weights_dir, const ModelConfig& model,
                                                    EngineConfig& config);

// Tests put something between the engine and its devices: what `wrap` makes of each is used in its place. None: as it
// is.
using DeviceWrapper = std::function<std::unique_ptr<ops::Ops>(std::unique_ptr<ops::Ops>)>;
void wrap_devices_for_tests(DeviceWrapper wrap);

}  // namespace charonia::runtime
