#include "runtime/devices.h"

#include <gnu/libc-version.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <set>
#include <thread>
#include <utility>

#include "base/text.h"
#include "charonia/error.h"
#include "ops/cpu/dispatch.h"
#include "ops/cpu/make_cpu_ops.h"
#include "ops/cuda/device/cuda_settings.h"
#include "ops/cuda/make_cuda_ops.h"
#include "ops/null/make_null_ops.h"
#include "runtime/memory_plan.h"
#include "text/token_table.h"

namespace charonia::runtime {
namespace {

using Devices = std::vector<std::unique_ptr<ops::Ops>>;

DeviceWrapper& wrapper() {
  static DeviceWrapper wrap;
  return wrap;
}

std::vector<int> parse_device_ids(std::string_view text) {
  std::vector<int> ids;
  for (text = trim(text); !text.empty();) {
    const auto comma = text.find(',');
    const auto id = parse_number<int>(trim(text.substr(0, comma)));
    if (!id || *id < 0) {
      throw Error(ErrorCode::invalid_argument, cat("device_ids = '", text,
                                                   "': numbers of GPUs are expected, separated "
                                                   "by commas"));
    }
    ids.push_back(*id);
    text = comma == std::string_view::npos ? "" : text.substr(comma + 1);
  }
  return ids;
}

// Returns the GPU of each rank. Without a usable GPU, returns an empty list and sets `why`. Throws Error(unsupported)
// if the configuration does not match the usable GPUs.
std::vector<int> choose_gpus(const EngineConfig& config, std::string& why) {
  const auto usable = ops::cuda_devices(why);
  if (usable.empty()) return {};
  const auto ranks = static_cast<std::size_t>(config.tensor_para_size);
  auto ids = parse_device_ids(config.device_ids);
  if (ids.empty()) {
    if (usable.size() < ranks) {
      throw Error(ErrorCode::unsupported, cat("tensor_para_size = ", ranks, " needs as many GPUs, and ", usable.size(),
                                              " can be used; convert for fewer with --tp, or set device = cpu"));
    }
    for (std::size_t rank = 0; rank < ranks; ++rank) ids.push_back(usable[rank].index);
  }
  if (ids.size() != ranks) {
    throw Error(ErrorCode::unsupported, cat("device_ids = ", config.device_ids, " names ", ids.size(),
                                            " GPUs, and tensor_para_size is ", ranks));
  }
  for (const int id : ids) {
    const auto found = std::ranges::find(usable, id, &ops::CudaDevice::index);
    if (found == usable.end()) {
      throw Error(ErrorCode::unsupported, cat("device_ids = ", config.device_ids, ": GPU ", id, " is not among the ",
                                              usable.size(), " that can be used"));
    }
    if (config.quant_policy == ops::kKvFp8 && !found->fp8) {
      throw Error(ErrorCode::unsupported, cat("GPU ", id, " (", found->name, "): ", ops::kNoFp8Cache));
    }
  }
  return ids;
}

Devices make_gpus(EngineConfig& config, const std::vector<int>& ids) {
  Devices out;
  const auto group = ids.size() > 1 ? ops::make_nccl_group(ids) : nullptr;
  config.device_ids.clear();
  for (std::size_t rank = 0; rank < ids.size(); ++rank) {
    out.push_back(
        ops::make_cuda_ops({.device = ids[rank], .reproducible = config.reproducible, .graphs = config.cuda_graphs},
                           group, static_cast<int>(rank)));
    config.device_ids += cat(rank == 0 ? "" : ",", ids[rank]);
  }
  return out;
}

Devices make_cpus(const EngineConfig& config) {
  const int ranks = config.tensor_para_size;
  Devices out;
  const auto group = ranks > 1 ? ops::make_process_group(ranks) : nullptr;
  for (int rank = 0; rank < ranks; ++rank) {
    out.push_back(ops::make_cpu_ops(std::max(1, config.threads / ranks), group, rank));
  }
  return out;
}

// Returns the tokens that device = null samples. These are tokens of a space and a lower-case word, if the vocabulary
// has enough of them; else tokens of printable text; else any tokens. End tokens are excluded.
std::vector<std::int32_t> null_words(const std::filesystem::path& weights_dir, const ModelConfig& model) {
  const auto table = text::TokenTable::load(weights_dir / "token_table.safetensors");
  const auto all = [](std::string_view text, auto of) { return !text.empty() && std::ranges::all_of(text, of); };
  const auto is_letter = [](char c) { return c >= 'a' && c <= 'z'; };
  const auto is_printed = [](char c) { return c >= ' ' && c <= '~'; };
  std::vector<std::int32_t> words, printed, others;
  for (std::int32_t id = 0; id < std::min(model.vocab_size, table.size()); ++id) {
    if (std::ranges::find(model.end_ids, id) != model.end_ids.end()) continue;
    const auto text = table.text_bytes(id);
    if (text.size() > 2 && text.front() == ' ' && all(text.substr(1), is_letter)) words.push_back(id);
    if (all(text, is_printed)) printed.push_back(id);
    others.push_back(id);
  }
  constexpr std::size_t kEnough = 100;
  auto& out = words.size() >= kEnough ? words : !printed.empty() ? printed : others;
  if (out.empty()) throw Error(ErrorCode::unsupported, "device = null needs a token that does not end a completion");
  return std::move(out);
}

Devices make_nulls(const std::filesystem::path& weights_dir, const ModelConfig& model, const EngineConfig& config) {
  const auto words = null_words(weights_dir, model);
  const std::chrono::duration<double, std::milli> step(config.null_step_ms);
  Devices out;
  for (int rank = 0; rank < config.tensor_para_size; ++rank) {
    out.push_back(
        ops::make_null_ops({model.vocab_size, words, std::chrono::duration_cast<std::chrono::nanoseconds>(step)},
                           config.tensor_para_size, rank));
  }
  return out;
}

}  // namespace

DeviceChoice choose_devices(const EngineConfig& config) {
  DeviceChoice out{.device = "cpu", .gpus = {}, .note = {}};
  if (config.device != "null" && config.null_step_ms > 0) {
    throw Error(ErrorCode::invalid_argument,
                cat("null_step_ms = ", config.null_step_ms, " is for device = null, and device = ", config.device,
                    ": leave it out, or set device = null"));
  }
  if (config.device == "cpu") return out;
  if (config.device == "null") {
    if (!config.device_ids.empty()) {
      throw Error(ErrorCode::invalid_argument,
                  cat("device_ids = ", config.device_ids,
                      " names GPUs, and device = null uses none: leave one of them out"));
    }
    out.device = "null";
    return out;
  }
  out.gpus = choose_gpus(config, out.note);
  // A user who asks for GPUs does not expect the CPU.
  const bool asked = config.device == "cuda" || !config.device_ids.empty();
  if (out.gpus.empty() && asked) {
    throw Error(ErrorCode::unsupported, cat("device = ", config.device, ": ", out.note));
  }
  if (!out.gpus.empty()) out.device = "cuda";
  return out;
}

int sms_of(const std::vector<int>& gpus) {
  std::string why;
  int minimum = 0;
  for (const auto& device : ops::cuda_devices(why)) {
    if (std::ranges::find(gpus, device.index) == gpus.end()) continue;
    minimum = minimum == 0 ? device.sms : std::min(minimum, device.sms);
  }
  return minimum;
}

std::string kernels_of(const EngineConfig& config, std::string_view instruction_set) {
  auto out = cat(config.device, " ", instruction_set);
  if (config.device == "cpu") {
    if (ops::cpu::has_fixed_kernel(*ops::cpu::instruction_set(instruction_set).kernels)) out += " fixed-point";
  } else if (config.device == "cuda") {
    const auto ids = parse_device_ids(config.device_ids);
    std::set<std::string> names;
    std::string why;
    for (const auto& device : ops::cuda_devices(why)) {
      if (std::ranges::find(ids, device.index) != ids.end()) names.insert(device.name);
    }
    for (const auto& name : names) out += cat(", ", name);
    out += config.reproducible ? ", reproducible" : cuda::unproven_setting() ? ", unproven kernels" : "";
  }
  // libm chooses its functions by the processor, and its last bits change between versions.
  return cat(out, ", glibc ", gnu_get_libc_version());
}

std::string arithmetic_of(const EngineConfig& config, std::string_view instruction_set) {
  return cat(kernels_of(config, instruction_set), ", session_len ", config.session_len);
}

Devices make_devices(const std::filesystem::path& weights_dir, const ModelConfig& model, EngineConfig& config) {
  if (config.threads == 0) config.threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  const auto choice = choose_devices(config);
  const auto& gpus = choice.gpus;
  config.device = choice.device;
  auto devices = choice.device == "null" ? make_nulls(weights_dir, model, config)
                 : gpus.empty()          ? make_cpus(config)
                                         : make_gpus(config, gpus);
  auto free = std::numeric_limits<std::size_t>::max();
  for (const auto& device : devices) free = std::min(free, device->free_memory());
  resolve_step_sizes(config, {config.device, sms_of(gpus), free});
  if (const auto& wrap = wrapper()) {
    for (auto& device : devices) device = wrap(std::move(device));
  }
  return devices;
}

void wrap_devices_for_tests(DeviceWrapper wrap) { wrapper() = std::move(wrap); }

}  // namespace charonia::runtime
