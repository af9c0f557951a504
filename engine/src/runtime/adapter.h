// A LoRA adapter that requests may use.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "charonia/config.h"
#include "model/adapter.h"
#include "model/manifest.h"

namespace charonia::runtime {

// Requests share its ownership. So a request ends with the adapter that it began with, also if the adapter is unloaded
// meanwhile.
struct Adapter {
  std::string name;
  std::filesystem::path folder;
  std::string digest;  // AdapterFiles::digest()
  std::uint64_t id = 0;  // never 0, never used for another adapter
  int max_rank = 0;
  std::vector<std::unique_ptr<model::Adapter>> ranks;  // by tensor-parallel rank

  std::string fingerprint() const { return digest.substr(0, 16); }
  std::int64_t bytes() const {
    std::int64_t out = 0;
    for (const auto& rank : ranks) out += rank->bytes();
    return out;
  }
};

// Throws Error(invalid_argument) if the name is not valid or is the model's, or if the folder's is not UTF-8.
void check_adapter_name(const std::string& name, const std::filesystem::path& folder, std::string_view model_name);

// Throws Error(invalid_argument) if the loaded adapter with the same name has other files.
void check_same_adapter(const model::AdapterFiles& files, std::string_view loaded_digest);

// An entry of the setting lora_adapters.
struct AdapterFolder {
  std::string name;
  std::filesystem::path folder;
};
// Reads "NAME=FOLDER,NAME=FOLDER". Throws Error(invalid_argument).
std::vector<AdapterFolder> adapter_folders(std::string_view list);

// Throws Error(unsupported) for a device without adapters; on CUDA because it has no slots for them.
[[noreturn]] void refuse_adapter_on(std::string_view device, std::string_view name);
// Throws Error(invalid_argument) if the rank of an adapter is larger than lora_max_rank of a device with slots.
void check_rank(const model::AdapterFiles& files, int lora_max_rank);

// Throws Error(resource_exhausted) if the adapters of a GPU, of this size, do not fit into host memory. free_bytes:
// beside everything else.
void check_host_memory(const EngineConfig& config, std::int64_t adapter_bytes, std::int64_t free_bytes);

// Resolves lora_device_adapters and lora_max_rank if config.device is cuda. modules: of the model. Without modules no
// adapter can be loaded, so there are no slots. Returns a warning if settings for slots have no effect, because of that
// or on another device; otherwise empty.
// Reads the files of config.lora_adapters, and throws the errors of reading them. Throws Error(invalid_argument) if
// lora_max_rank is too large.
std::string resolve_adapter_slots(EngineConfig& config, const model::Modules& modules);

// Returns the memory that config.lora_adapters need on each rank, at most: the engine may store a matrix once that
// counts for two tensors here. On CUDA this is memory of the host. type: of activations. lora_max_rank must be
// resolved. Reads the files, and throws the errors of loading them, except for values.
std::vector<std::size_t> adapter_bytes(const EngineConfig& config, std::string_view model_name,
                                       const model::Modules& modules, DType type);

}  // namespace charonia::runtime
