#include "runtime/adapter.h"

#include <algorithm>
#include <map>
#include <set>

#include "base/bytes.h"
#include "base/text.h"
#include "charonia/error.h"
#include "model/adapter_files.h"
#include "ops/low_rank.h"
#include "text/utf8.h"

namespace charonia::runtime {

namespace {

void check_spelling(const std::string& name) {
  constexpr std::size_t kLongest = 256;  // bytes
  const auto forbidden = [](char c) {
    return static_cast<unsigned char>(c) < 0x20 || c == 0x7f || c == '=' || c == ',';
  };
  if (!name.empty() && name.size() <= kLongest && name.front() != ' ' && name.back() != ' ' &&
      text::to_valid_utf8(name) == name && std::ranges::none_of(name, forbidden)) {
    return;
  }
  throw Error(ErrorCode::invalid_argument,
              cat("lora_name = '", text::to_valid_utf8(name), "' is not a name: it must have 1 to ", kLongest,
                  " bytes of UTF-8, without '=', ',' and control characters, and without a space at its ends"));
}

}  // namespace

void check_adapter_name(const std::string& name, const std::filesystem::path& folder, std::string_view model_name) {
  check_spelling(name);
  if (const auto path = folder.string(); text::to_valid_utf8(path) != path) {
    throw Error(ErrorCode::invalid_argument,
                cat("adapter ", name, ": the folder ", text::to_valid_utf8(path),
                    " has a name that is not UTF-8: rename it"));
  }
  if (name == model_name) {
    throw Error(ErrorCode::invalid_argument, cat("adapter ", name, " has the name of the model: choose another name"));
  }
}

void check_same_adapter(const model::AdapterFiles& files, std::string_view loaded_digest) {
  if (files.digest() == loaded_digest) return;
  throw Error(ErrorCode::invalid_argument,
              cat("adapter ", files.name(), " has the name of a loaded adapter with other files: choose another name, ",
                  "or unload that adapter first"));
}

std::vector<AdapterFolder> adapter_folders(std::string_view list) {
  std::vector<AdapterFolder> out;
  while (!list.empty()) {
    const auto entry = list.substr(0, list.find(','));
    list.remove_prefix(std::min(list.size(), entry.size() + 1));
    const auto equals = entry.find('=');
    if (equals == std::string_view::npos || equals + 1 == entry.size()) {
      throw Error(ErrorCode::invalid_argument,
                  cat("lora_adapters has the entry '", entry,
                      "': it must be NAME=FOLDER, and entries are separated by commas"));
    }
    out.push_back({std::string(entry.substr(0, equals)), std::string(entry.substr(equals + 1))});
  }
  return out;
}

void refuse_adapter_on(std::string_view device, std::string_view name) {
  if (device == "cuda") {
    throw Error(ErrorCode::unsupported,
                cat("adapter ", name, ": the engine has no memory for adapters on the GPU. Start it with ",
                    "lora_device_adapters (such as 4), or with the adapter in lora_adapters"));
  }
  throw Error(ErrorCode::unsupported,
              cat("adapter ", name, ": device = ", device, " has no LoRA adapters. Use device = cpu, or merge ",
                  "the adapter into the model (PEFT's merge_and_unload)"));
}

void check_rank(const model::AdapterFiles& files, int lora_max_rank) {
  if (files.max_rank() <= lora_max_rank) return;
  throw Error(ErrorCode::invalid_argument,
              cat("adapter ", files.name(), " has rank ", files.max_rank(), ", and lora_max_rank = ", lora_max_rank,
                  ": start the engine with lora_max_rank = ", files.max_rank(), " or more"));
}

void check_host_memory(const EngineConfig& config, std::int64_t adapter_bytes, std::int64_t free_bytes) {
  if (adapter_bytes <= free_bytes) return;
  const bool offload = !config.kv_offload_memory.empty();
  throw Error(ErrorCode::resource_exhausted,
              cat("the LoRA adapters do not fit: they take ", bytes_text(adapter_bytes), " of host memory, and ",
                  bytes_text(std::max<std::int64_t>(0, free_bytes)), " are free there",
                  offload ? " beside kv_offload_memory" : "", ". Leave an adapter out, ",
                  offload ? "lower kv_offload_memory, " : "", "or free memory"));
}

std::string resolve_adapter_slots(EngineConfig& config, const model::Modules& modules) {
  if (config.device != "cuda") {
    std::string given;
    for (const auto& [key, value] : {std::pair{"lora_device_adapters", config.lora_device_adapters},
                                     std::pair{"lora_max_rank", config.lora_max_rank}}) {
      if (value != 0) given += cat(given.empty() ? "" : " and ", key, " = ", value);
    }
    if (given.empty()) return {};
    return cat("no effect with device = ", config.device, ": ", given, ". Only a GPU has slots for adapters");
  }
  if (config.lora_max_rank > ops::LowRank::kMaxRanks) {
    throw Error(ErrorCode::invalid_argument,
                cat("lora_max_rank = ", config.lora_max_rank, ": it must be at most ", ops::LowRank::kMaxRanks,
                    ", the largest rank of an adapter"));
  }
  constexpr int kMost = 8, kUsualRank = 16;
  const int asked = config.lora_device_adapters;
  const auto folders = adapter_folders(config.lora_adapters);
  if (config.lora_device_adapters == 0) {
    std::set<std::string> names;
    for (const auto& one : folders) names.insert(one.name);
    config.lora_device_adapters = std::min(kMost, static_cast<int>(names.size()));
  }
  if (config.lora_max_rank == 0) {
    config.lora_max_rank = folders.empty() ? kUsualRank : 1;
    for (const auto& [name, folder] : folders) {
      config.lora_max_rank = std::max(config.lora_max_rank, model::AdapterFiles(name, folder).max_rank());
    }
  }
  if (!modules.places.empty()) return {};
  config.lora_device_adapters = 0;
  return asked == 0 ? "" : cat("lora_device_adapters = ", asked, " has no effect: ", model::kNoModules);
}

std::vector<std::size_t> adapter_bytes(const EngineConfig& config, std::string_view model_name,
                                       const model::Modules& modules, DType type) {
  std::vector<std::size_t> out(static_cast<std::size_t>(config.tensor_para_size));
  std::map<std::string, std::filesystem::path> folders;  // by name
  for (const auto& [name, folder] : adapter_folders(config.lora_adapters)) {
    check_adapter_name(name, folder, model_name);
    const model::AdapterFiles files(name, folder);
    const bool with_slots = config.device == "cuda";
    if (with_slots) check_rank(files, config.lora_max_rank);
    if (const auto [found, added] = folders.try_emplace(name, folder); !added) {
      if (files.digest() == model::AdapterFiles(name, found->second).digest()) continue;
      throw Error(ErrorCode::invalid_argument, cat("lora_adapters has the name ", name, " twice, with other files: ",
                                                   "choose another name for one of them"));
    }
    for (std::size_t rank = 0; rank < out.size(); ++rank) {
      out[rank] += model::Adapter::bytes_of(files, modules, static_cast<int>(rank), type, with_slots);
    }
  }
  return out;
}

}  // namespace charonia::runtime
