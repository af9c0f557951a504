#include "model/adapter_files.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "base/json.h"
#include "base/sha256.h"
#include "base/text.h"
#include "charonia/error.h"
#include "ops/low_rank.h"

namespace charonia::model {
namespace {

using nlohmann::ordered_json;

constexpr const char* kConfig = "adapter_config.json";
constexpr const char* kWeights = "adapter_model.safetensors";
constexpr std::uintmax_t kLargestConfig = std::uintmax_t{1} << 20;  // bytes
constexpr std::size_t kLongestTensorName = 512;

// Keys that do not change the results of a trained adapter.
constexpr std::string_view kHarmless[] = {
    "auto_mapping",     "base_model_name_or_path", "ensure_weight_tying", "eva_config",        "exclude_modules",
    "fan_in_fan_out",   "inference_mode",          "layers_pattern",      "layers_to_transform", "lora_dropout",
    "megatron_core",    "peft_version",            "qalora_group_size",   "rank_pattern",      "revision",
    "runtime_config",   "target_modules",          "task_type",           "loftq_config",      "r"};
// Keys that are read here.
constexpr std::string_view kRead[] = {"alpha_pattern", "bias", "init_lora_weights", "lora_alpha", "peft_type",
                                      "use_rslora"};

// A feature, with the remedy.
struct Feature {
  std::string_view key, remedy;
};
constexpr Feature kFeatures[] = {
    {"use_dora", "DoRA changes the norms of weights: merge the adapter into the model (PEFT's merge_and_unload), or "
                 "train without use_dora"},
    {"modules_to_save", "it holds whole weights: merge the adapter into the model, or train without modules_to_save"},
    {"trainable_token_indices", "it holds new embeddings: merge the adapter into the model"},
    {"target_parameters", "it changes parameters without a module, such as experts: merge the adapter into the model"},
    {"layer_replication", "it changes the layers of the model: merge the adapter into the model"},
    {"lora_bias", "merge the adapter into the model, or train without lora_bias"},
};

bool is_unset(const ordered_json& value) {
  return value.is_null() || value == false || (value.is_structured() && value.empty());
}

// Initialisations that do not change the weights of the base model.
bool keeps_base(const ordered_json& init) {
  if (init.is_null() || init.is_boolean()) return true;
  return init == "gaussian" || init == "eva" || init == "orthogonal";
}

std::string text_of(const ordered_json& value) {
  constexpr std::size_t kMost = 10;  // elements
  const bool flat = !value.is_structured() || std::ranges::none_of(value, &ordered_json::is_structured);
  return flat && value.size() <= kMost ? value.dump() : value.type_name();
}

}  // namespace

struct AdapterFiles::Scales {
  // A key of alpha_pattern. PEFT has regular expressions there, but their cost has no bound. So a key is a name, or the
  // end of a name after a dot. `^` at its beginning: only the whole name.
  struct NamePattern {
    std::string name;  // without backslashes
    bool whole = false;

    // Empty if the key is another regular expression.
    static std::optional<NamePattern> parse(std::string_view key) {
      NamePattern out;
      out.whole = key.starts_with('^');
      if (out.whole) key.remove_prefix(1);
      for (std::size_t i = 0; i < key.size(); ++i) {
        if (key.substr(i).starts_with("\\.")) ++i;
        const auto c = static_cast<unsigned char>(key[i]);
        if (std::isalnum(c) == 0 && c != '_' && c != '-' && c != '.') return std::nullopt;
        out.name += key[i];
      }
      return out;
    }
    bool matches(std::string_view module) const {
      if (module == name) return true;
      return !whole && module.size() > name.size() && module.ends_with(name) &&
             module[module.size() - name.size() - 1] == '.';
    }
  };

  double alpha = 0;
  bool root = false;  // use_rslora: alpha / sqrt(rank) instead of alpha / rank
  std::set<std::int64_t> ranks;  // r and those of rank_pattern
  std::vector<std::pair<NamePattern, double>> patterns;

  float of(const std::string& module, std::int64_t rank) const {
    const auto found =
        std::ranges::find_if(patterns, [&](const auto& pattern) { return pattern.first.matches(module); });
    const double numerator = found == patterns.end() ? alpha : found->second;
    return static_cast<float>(numerator / (root ? std::sqrt(static_cast<double>(rank)) : static_cast<double>(rank)));
  }
};

AdapterFiles::AdapterFiles(std::string name, std::filesystem::path folder)
    : name_(std::move(name)), folder_(std::move(folder)), file_([&] {
        std::error_code ignored;
        if (!std::filesystem::is_directory(folder_, ignored)) {
          refuse("it is not a folder. Name a folder of PEFT");
        }
        if (!std::filesystem::is_regular_file(folder_ / kWeights, ignored)) {
          refuse(cat("it has no ", kWeights, std::filesystem::exists(folder_ / "adapter_model.bin", ignored)
                                                 ? ": save the adapter again with safe_serialization=True"
                                                 : ": was it saved with PEFT's save_pretrained?"));
        }
        return SafetensorsFile::open(folder_ / kWeights);
      }()) {
  config_ = config_text();
  read_modules(read_config(config_));
}

void AdapterFiles::refuse(const std::string& what) const {
  throw Error(ErrorCode::invalid_argument, cat("adapter ", name_, " (", folder_.string(), "): ", what));
}

void AdapterFiles::refuse_feature(const std::string& what) const {
  throw Error(ErrorCode::unsupported, cat("adapter ", name_, " (", folder_.string(), "): ", what));
}

std::string AdapterFiles::config_text() const {
  std::error_code ignored;
  std::ifstream in;
  if (std::filesystem::is_regular_file(folder_ / kConfig, ignored)) in.open(folder_ / kConfig);
  if (!in.is_open()) refuse(cat("it has no ", kConfig, ": was it saved with PEFT's save_pretrained?"));
  std::string text(kLargestConfig + 1, '\0');
  in.read(text.data(), std::ssize(text));
  text.resize(static_cast<std::size_t>(in.gcount()));
  if (text.size() > kLargestConfig) {
    refuse(cat(kConfig, " is larger than ", kLargestConfig, " bytes: was it saved with PEFT's save_pretrained?"));
  }
  return text;
}

std::string AdapterFiles::digest() const {
  auto text = sha256_hex(config_);
  for (const auto tensor : file_.names()) {
    const auto view = file_.tensor(tensor);
    text += cat(tensor.size(), " ", tensor, to_string(view.dtype), shape_text(view.shape),
                sha256_hex({reinterpret_cast<const char*>(view.data.data()), view.data.size()}));
  }
  return sha256_hex(text);
}

AdapterFiles::Scales AdapterFiles::read_config(std::string_view text) const {
  Scales out;
  try {
    const auto config = ordered_json::parse(text);
    if (!config.is_object()) refuse(cat(kConfig, " is not a JSON object"));
    if (const auto type = config.find("peft_type"); type == config.end() || *type != "LORA") {
      refuse_feature(cat("peft_type = ", type == config.end() ? "none" : text_of(*type),
                         ": only LORA is supported. Merge the adapter into the model"));
    }
    for (const auto& [key, value] : config.items()) {
      if (std::ranges::find(kHarmless, key) != std::end(kHarmless)) continue;
      if (std::ranges::find(kRead, key) != std::end(kRead) || is_unset(value)) continue;
      const auto* const known = std::ranges::find(kFeatures, key, &Feature::key);
      refuse_feature(cat(key, " = ", text_of(value), " is not supported: ",
                         known == std::end(kFeatures) ? "this key is not known here. Merge the adapter into the model"
                                                      : known->remedy));
    }
    if (const auto bias = config.value("bias", "none"); bias != "none") {
      refuse_feature(cat("bias = ", bias, " is not supported: merge the adapter into the model, or train with none"));
    }
    if (const auto init = config.find("init_lora_weights"); init != config.end() && !keeps_base(*init)) {
      refuse_feature(cat("init_lora_weights = ", text_of(*init),
                         " changes the weights of the base model: save the adapter again with "
                         "path_initial_model_for_weight_conversion, which converts it"));
    }
    out.alpha = config.at("lora_alpha").get<double>();
    out.root = config.value("use_rslora", false);
    out.ranks.insert(config.at("r").get<std::int64_t>());
    if (const auto ranks = config.find("rank_pattern"); ranks != config.end() && ranks->is_object()) {
      for (const auto& [key, value] : ranks->items()) out.ranks.insert(value.get<std::int64_t>());
    }
    const auto patterns = config.find("alpha_pattern");
    if (patterns == config.end() || patterns->is_null()) return out;
    for (const auto& [key, value] : patterns->items()) {
      const auto pattern = Scales::NamePattern::parse(key);
      if (!pattern) {
        refuse_feature(cat("alpha_pattern has an expression",
                           key.size() > kLongestTensorName ? "" : cat(", '", key, "'"),
                           ", that is not a name of a module or the end of one: write a key for each module"));
      }
      out.patterns.emplace_back(*pattern, value.get<double>());
    }
  } catch (const nlohmann::json::exception& error) {
    refuse(cat(kConfig, " is not valid (", error.what(), ")"));
  }
  return out;
}

void AdapterFiles::read_modules(const Scales& scales) {
  const auto matrix = [this](std::string_view tensor) {
    const auto view = file_.tensor(tensor);
    if (view.shape.size() != 2 || view.shape[0] < 1 || view.shape[1] < 1) {
      refuse(cat("tensor ", tensor, " has shape ", shape_text(view.shape), ", expected two dimensions"));
    }
    if (view.dtype != DType::f32 && view.dtype != DType::f16 && view.dtype != DType::bf16) {
      refuse(cat("tensor ", tensor, " must have the type F32, F16 or BF16"));
    }
    return ops::HostMatrix{view.data.data(), view.dtype, view.shape[0], view.shape[1]};
  };
  std::map<std::string, Module, std::less<>> modules;
  for (const auto tensor : file_.names()) {
    std::string_view name = tensor;
    if (name.size() > kLongestTensorName) {
      refuse(cat("a tensor has a name of ", name.size(), " bytes: was it saved with PEFT's save_pretrained?"));
    }
    constexpr std::string_view kPrefix = "base_model.model.";
    if (name.starts_with(kPrefix)) name.remove_prefix(kPrefix.size());
    const auto mark = name.rfind(".lora_");
    const auto kind = mark == std::string_view::npos ? std::string_view() : name.substr(mark + 6);
    // Older versions of PEFT have the adapter's name in a tensor's name.
    const bool is_a = kind == "A.weight" || kind == "A.default.weight";
    if (!is_a && kind != "B.weight" && kind != "B.default.weight") {
      const bool dora = kind.starts_with("magnitude_vector"), embedding = kind.starts_with("embedding_");
      refuse_feature(cat("tensor ", tensor, " is not supported (",
                         dora        ? "DoRA"
                         : embedding ? "an adapter of the embedding"
                                     : "not a lora_A or lora_B of a linear layer",
                         "): merge the adapter into the model, or train without it"));
    }
    auto& module = modules[std::string(name.substr(0, mark))];
    auto& place = is_a ? module.a : module.b;
    if (place.data != nullptr) refuse(cat("tensor ", tensor, " is there twice, by two names: remove one"));
    place = matrix(tensor);
  }
  for (auto& [name, module] : modules) {
    const auto rank = module.a.rows;
    if (module.a.data == nullptr || module.b.data == nullptr) {
      refuse(cat("module ", name, " has no lora_", module.a.data == nullptr ? "A" : "B"));
    }
    if (module.b.cols != rank) {
      refuse(cat("module ", name, " has lora_A [", rank, ", ", module.a.cols, "] and lora_B [", module.b.rows, ", ",
                 module.b.cols, "], whose ranks differ"));
    }
    if (rank > ops::LowRank::kMaxRanks) {
      refuse_feature(cat("module ", name, " has rank ", rank, ", and the largest is ", ops::LowRank::kMaxRanks,
                         ": merge the adapter into the model"));
    }
    if (!scales.ranks.contains(rank)) {
      refuse(cat("module ", name, " has rank ", rank, ", and ", kConfig, " has another r and rank_pattern: the two files "
                 "do not belong together"));
    }
    module.name = name;
    module.scale = scales.of(name, rank);
    if (!std::isfinite(module.scale)) refuse(cat("module ", name, " has the factor ", module.scale));
    modules_.push_back(std::move(module));
  }
  if (modules_.empty()) refuse(cat(kWeights, " has no tensors"));
}

int AdapterFiles::max_rank() const {
  std::int64_t out = 0;
  for (const auto& module : modules_) out = std::max(out, module.a.rows);
  return static_cast<int>(out);
}

}  // namespace charonia::model
