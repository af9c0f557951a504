#include "charonia/config.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <functional>

#include "base/bytes.h"
#include "base/text.h"
#include "charonia/error.h"

namespace charonia {
namespace {

using Store = std::function<bool(std::string_view, EngineConfig&, ModelConfig*)>;  // false: not in range

struct Entry {
  ConfigField field;
  Store store;
};

bool parse_bool(std::string_view text, bool& out) {
  std::string lower(text);
  std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) { return std::tolower(c); });
  if (lower == "true" || lower == "1" || lower == "yes" || lower == "on") return out = true, true;
  if (lower == "false" || lower == "0" || lower == "no" || lower == "off") return out = false, true;
  return false;
}

template <class Config>
Config* target(EngineConfig& engine, ModelConfig* model) {
  if constexpr (std::is_same_v<Config, EngineConfig>) {
    return &engine;
  } else {
    return model;
  }
}

// Storing into a member; a model attribute is checked even when there is no ModelConfig to take it.
template <class Config>
Store store_int(int Config::* member, std::function<bool(int)> valid) {
  return [=](std::string_view text, EngineConfig& engine, ModelConfig* model) {
    const auto value = parse_number<int>(text);
    if (!value || !valid(*value)) return false;
    if (auto* config = target<Config>(engine, model)) config->*member = *value;
    return true;
  };
}

template <class Config, class T>
Store store_float(T Config::* member, std::function<bool(double)> valid) {
  return [=](std::string_view text, EngineConfig& engine, ModelConfig* model) {
    const auto value = parse_number<double>(text);
    if (!value || !valid(*value)) return false;
    if (auto* config = target<Config>(engine, model)) config->*member = static_cast<T>(*value);
    return true;
  };
}

template <class Config>
Store store_bool(bool Config::* member) {
  return [=](std::string_view text, EngineConfig& engine, ModelConfig* model) {
    bool value = false;
    if (!parse_bool(text, value)) return false;
    if (auto* config = target<Config>(engine, model)) config->*member = value;
    return true;
  };
}

template <class Config>
Store store_string(std::string Config::* member, std::vector<std::string_view> choices = {}) {
  return [=](std::string_view text, EngineConfig& engine, ModelConfig* model) {
    if (!choices.empty() && std::find(choices.begin(), choices.end(), text) == choices.end()) return false;
    if (auto* config = target<Config>(engine, model)) config->*member = std::string(text);
    return true;
  };
}

bool store_end_ids(std::string_view text, EngineConfig&, ModelConfig* model) {
  std::vector<int> ids;
  while (!text.empty()) {
    const auto comma = text.find(',');
    const auto id = parse_number<int>(trim(text.substr(0, comma)));
    if (!id || *id < -1) return false;
    if (*id >= 0) ids.push_back(*id);
    if (comma == std::string_view::npos) break;
    text.remove_prefix(comma + 1);
  }
  if (model != nullptr) model->end_ids = std::move(ids);
  return true;
}

// Numbers separated by commas, all > 0.
Store store_floats(std::vector<float> ModelConfig::* member) {
  return [=](std::string_view text, EngineConfig&, ModelConfig* model) {
    std::vector<float> values;
    while (!text.empty()) {
      const auto comma = text.find(',');
      const auto value = parse_number<double>(trim(text.substr(0, comma)));
      if (!value || *value <= 0) return false;
      values.push_back(static_cast<float>(*value));
      if (comma == std::string_view::npos) break;
      text.remove_prefix(comma + 1);
    }
    if (model != nullptr) model->*member = std::move(values);
    return true;
  };
}

// One of `letters` for each layer, or nothing.
Store store_letters(std::string ModelConfig::* member, std::string_view letters) {
  return [=](std::string_view text, EngineConfig&, ModelConfig* model) {
    if (text.find_first_not_of(letters) != std::string_view::npos) return false;
    if (model != nullptr) model->*member = std::string(text);
    return true;
  };
}

// An amount of memory, kept as it is written; or nothing.
Store store_size(std::string EngineConfig::* member) {
  return [=](std::string_view text, EngineConfig& engine, ModelConfig*) {
    if (!text.empty() && !parse_bytes(text)) return false;
    engine.*member = std::string(text);
    return true;
  };
}

bool store_nothing(std::string_view, EngineConfig&, ModelConfig*) { return true; }

auto at_least(int minimum) {
  return [minimum](int value) { return value >= minimum; };
}
bool positive(double value) { return value > 0; }
bool not_negative(double value) { return value >= 0; }
bool share(double value) { return value >= 0 && value <= 1; }
bool cache_share_or_count(double value) { return value > 0 && (value < 1 || value == std::floor(value)); }

const std::vector<Entry>& entries() {
  using E = EngineConfig;
  using M = ModelConfig;
  constexpr bool kModel = true, kUser = false;
  static const std::vector<Entry> table = {
      {{"model_name", "string", "", "any text", "name of the model as clients see it", kModel, false},
       store_string(&M::model_name)},
      {{"model_family", "string", "", "a supported family", "llama, mistral, qwen2, gemma2, mixtral, ...", kModel,
        false},
       store_string(&M::model_family)},
      {{"head_num", "int", "0", ">= 1", "attention heads", kModel, false}, store_int(&M::head_num, at_least(1))},
      {{"kv_head_num", "int", "0", ">= 1", "heads of keys and values", kModel, false},
       store_int(&M::kv_head_num, at_least(1))},
      {{"size_per_head", "int", "0", ">= 2", "elements per head", kModel, false},
       store_int(&M::size_per_head, at_least(2))},
      {{"hidden_units", "int", "0", ">= 1", "width of the residual stream", kModel, false},
       store_int(&M::hidden_units, at_least(1))},
      {{"inter_size", "int", "0", ">= 1", "width of the feed-forward layer", kModel, false},
       store_int(&M::inter_size, at_least(1))},
      {{"num_layer", "int", "0", ">= 1", "decoder layers", kModel, false}, store_int(&M::num_layer, at_least(1))},
      {{"vocab_size", "int", "0", ">= 1", "rows of the embedding", kModel, false},
       store_int(&M::vocab_size, at_least(1))},
      {{"max_position_embeddings", "int", "0", ">= 1", "positions the model was trained for", kModel, false},
       store_int(&M::max_position_embeddings, at_least(1))},
      {{"norm_eps", "float", "1e-06", "> 0", "epsilon of the RMS norms", kModel, false},
       store_float(&M::norm_eps, positive)},
      {{"attn_bias", "bool", "0", "0 | 1", "q, k and v have biases", kModel, false}, store_bool(&M::attn_bias)},
      {{"attn_output_bias", "bool", "0", "0 | 1", "the attention's output has a bias", kModel, false},
       store_bool(&M::attn_output_bias)},
      {{"mlp_bias", "bool", "0", "0 | 1", "the feed-forward layer has biases", kModel, false},
       store_bool(&M::mlp_bias)},
      {{"tie_word_embeddings", "bool", "0", "0 | 1", "the output layer is the embedding", kModel, false},
       store_bool(&M::tie_word_embeddings)},
      {{"start_id", "int", "-1", ">= -1", "token that begins a text; -1: none", kModel, false},
       store_int(&M::start_id, at_least(-1))},
      {{"end_id", "string", "-1", "token ids separated by commas", "tokens that end a sequence", kModel, false},
       store_end_ids},
      {{"rotary_embedding", "int", "0", ">= 0", "rotated elements per head; 0: none", kModel, false},
       store_int(&M::rotary_embedding, at_least(0))},
      {{"rope_theta", "float", "10000", "> 0", "base of the rotary embedding", kModel, false},
       store_float(&M::rope_theta, positive)},
      {{"rope_scaling_type", "string", "default", "default | linear | dynamic | llama3 | yarn | longrope | qwen",
        "kind of rotary scaling", kModel, false},
       store_string(&M::rope_scaling_type, {"default", "linear", "dynamic", "llama3", "yarn", "longrope", "qwen"})},
      {{"rope_factor", "float", "1", "> 0", "rotary scaling: factor", kModel, false},
       store_float(&M::rope_factor, positive)},
      {{"rope_low_freq_factor", "float", "1", "> 0", "llama3 scaling: low_freq_factor", kModel, false},
       store_float(&M::rope_low_freq_factor, positive)},
      {{"rope_high_freq_factor", "float", "4", "> 0", "llama3 scaling: high_freq_factor", kModel, false},
       store_float(&M::rope_high_freq_factor, positive)},
      {{"rope_original_max_position_embeddings", "int", "0", ">= 0",
        "rotary scaling: positions of the model before scaling", kModel, false},
       store_int(&M::rope_original_max_position_embeddings, at_least(0))},
      {{"rope_beta_fast", "float", "32", "> 0", "yarn: beta_fast", kModel, false},
       store_float(&M::rope_beta_fast, positive)},
      {{"rope_beta_slow", "float", "1", "> 0", "yarn: beta_slow", kModel, false},
       store_float(&M::rope_beta_slow, positive)},
      {{"rope_truncate", "bool", "1", "0 | 1", "yarn: the ramp's bounds are whole numbers", kModel, false},
       store_bool(&M::rope_truncate)},
      {{"rope_attention_factor", "float", "0", ">= 0", "yarn and longrope: factor of cosines and sines; 0: by formula",
        kModel, false},
       store_float(&M::rope_attention_factor, not_negative)},
      {{"rope_mscale", "float", "0", ">= 0", "yarn: mscale", kModel, false},
       store_float(&M::rope_mscale, not_negative)},
      {{"rope_mscale_all_dim", "float", "0", ">= 0", "yarn: mscale_all_dim", kModel, false},
       store_float(&M::rope_mscale_all_dim, not_negative)},
      {{"rope_short_factors", "string", "", "numbers separated by commas", "longrope: short_factor", kModel, false},
       store_floats(&M::rope_short_factors)},
      {{"rope_long_factors", "string", "", "numbers separated by commas", "longrope: long_factor", kModel, false},
       store_floats(&M::rope_long_factors)},
      {{"rope_local_theta", "float", "0", ">= 0",
        "base of the layers with a window; 0: the same as of all layers", kModel, false},
       store_float(&M::rope_local_theta, not_negative)},
      {{"logn_length", "int", "0", ">= 0", "log-n attention scaling begins at this position; 0: none", kModel, false},
       store_int(&M::logn_length, at_least(0))},
      {{"alibi", "bool", "0", "0 | 1", "attention has slopes (ALiBi) instead of a rotation", kModel, false},
       store_bool(&M::alibi)},
      {{"sliding_window", "int", "0", ">= 0", "how many tokens attention looks back; 0: all", kModel, false},
       store_int(&M::sliding_window, at_least(0))},
      {{"layer_windows", "string", "", "letters s and f", "layers with the window (s) and without (f); empty: all s",
        kModel, false},
       store_letters(&M::layer_windows, "sf")},
      {{"attention_scale", "float", "0", ">= 0", "factor of q k; 0: 1 / sqrt(size_per_head)", kModel, false},
       store_float(&M::attention_scale, not_negative)},
      {{"attention_soft_cap", "float", "0", ">= 0", "soft cap of attention scores; 0: none", kModel, false},
       store_float(&M::attention_soft_cap, not_negative)},
      {{"logit_soft_cap", "float", "0", ">= 0", "soft cap of logits; 0: none", kModel, false},
       store_float(&M::logit_soft_cap, not_negative)},
      {{"qk_norm", "bool", "0", "0 | 1", "heads of q and k are normalised", kModel, false}, store_bool(&M::qk_norm)},
      {{"norm_unit_offset", "bool", "0", "0 | 1", "norms multiply by 1 + weight", kModel, false},
       store_bool(&M::norm_unit_offset)},
      {{"post_norms", "bool", "0", "0 | 1", "outputs of attention and feed-forward are normalised too", kModel, false},
       store_bool(&M::post_norms)},
      {{"activation", "string", "silu", "silu | gelu_tanh", "activation of the feed-forward layer", kModel, false},
       store_string(&M::activation, {"silu", "gelu_tanh"})},
      {{"embedding_scale", "float", "1", "> 0", "factor of the embedding", kModel, false},
       store_float(&M::embedding_scale, positive)},
      {{"normalize_output", "bool", "0", "0 | 1", "rows of the output layer are scaled to length 1", kModel, false},
       store_bool(&M::normalize_output)},
      {{"num_experts", "int", "0", ">= 0", "experts of a feed-forward layer; 0: dense", kModel, false},
       store_int(&M::num_experts, at_least(0))},
      {{"experts_per_token", "int", "0", ">= 0", "experts that a token goes to", kModel, false},
       store_int(&M::experts_per_token, at_least(0))},
      {{"expert_inter_size", "int", "0", ">= 0", "width of an expert", kModel, false},
       store_int(&M::expert_inter_size, at_least(0))},
      {{"renormalize_experts", "bool", "1", "0 | 1", "weights of the chosen experts add up to 1", kModel, false},
       store_bool(&M::renormalize_experts)},
      {{"layer_experts", "string", "", "letters m and d", "layers with experts (m) and dense ones (d); empty: all m",
        kModel, false},
       store_letters(&M::layer_experts, "md")},
      {{"weight_type", "string", "bf16", "bf16 | fp16 | fp32", "type of the weights", kModel, false},
       store_string(&M::weight_type, {"bf16", "fp16", "fp32"})},
      {{"group_size", "int", "0", ">= 0", "quantisation group; 0: not quantised", kModel, false},
       store_int(&M::group_size, at_least(0))},

      {{"tensor_para_size", "int", "1", ">= 1",
        "tensor-parallel ranks that share the model: GPUs, or groups of the CPU device's threads; a workspace is "
        "converted for its number (--tp)",
        kUser, false},
       store_int(&E::tensor_para_size, at_least(1))},
      {{"session_len", "int", "0", ">= 0", "longest sequence in tokens; 0: what the model was trained for", kUser,
        false},
       store_int(&E::session_len, at_least(0))},
      {{"max_batch_size", "int", "0", ">= 0",
        "maximum number of sequences decoded together; 0: by the device: 64 on a CPU, 64 to 512 on a GPU by its SMs "
        "and memory",
        kUser, false},
       store_int(&E::max_batch_size, at_least(0))},
      {{"cache_max_entry_count", "float", "0.8", "a share in (0, 1) or a whole number >= 1",
        "KV block memory: share of the memory that is free once the weights are loaded, or a number of blocks", kUser,
        false},
       store_float(&E::cache_max_entry_count, cache_share_or_count)},
      {{"cache_block_seq_len", "int", "64", ">= 1", "tokens that one KV block holds", kUser, false},
       store_int(&E::cache_block_seq_len, at_least(1))},
      {{"cache_chunk_size", "int", "-1", ">= -1",
        "KV blocks allocated at a time, when they are needed; -1: all at once; 0: the square root of their number",
        kUser, false},
       store_int(&E::cache_chunk_size, at_least(-1))},
      {{"cache_size", "string", "", "bytes, with or without a unit: 8GiB, 500MB; or empty",
        "KV block memory in bytes, of all ranks together; wins over cache_max_entry_count", kUser, false},
       store_size(&E::cache_size)},
      {{"cache_users", "int", "0", ">= 0",
        "KV block memory for this many sequences of cache_user_tokens at once; wins over cache_size; 0: not set",
        kUser, false},
       store_int(&E::cache_users, at_least(0))},
      {{"cache_user_tokens", "int", "0", ">= 0", "tokens of each of cache_users; 0: session_len", kUser, false},
       store_int(&E::cache_user_tokens, at_least(0))},
      {{"enable_prefix_caching", "bool", "True", "True | False",
        "reuse the KV blocks of equal prompt prefixes (results do not change)", kUser, false},
       store_bool(&E::enable_prefix_caching)},
      {{"quant_policy", "int", "0", "0 | 4 | 8",
        "the KV cache; 0: in the model's type; 8 or 4: in integers of 8 or 4 bits, with a scale and a minimum for "
        "each token and head (in the oldest workspaces 4 meant 8 bits; here it means 4)",
        kUser, false},
       store_int(&E::quant_policy, [](int value) { return value == 0 || value == 4 || value == 8; })},
      {{"rope_scaling_factor", "float", "0", ">= 0",
        "1 or more turns on dynamic NTK for contexts beyond max_position_embeddings, with that factor; for models "
        "without rotary scaling of their own; 0: off",
        kUser, false},
       store_float(&E::rope_scaling_factor, not_negative)},
      {{"use_logn_attn", "int", "0", "0 | 1",
        "1 scales attention by the logarithm of the position beyond max_position_embeddings (log-n)", kUser, false},
       store_int(&E::use_logn_attn, [](int value) { return value == 0 || value == 1; })},
      {{"device", "string", "auto", "auto | cpu | cuda", "where the model runs", kUser, false},
       store_string(&E::device, {"auto", "cpu", "cuda"})},
      {{"device_ids", "string", "", "numbers separated by commas",
        "GPUs to run on, one for each tensor-parallel rank; empty: the first ones", kUser, false},
       store_string(&E::device_ids)},
      {{"reproducible", "bool", "False", "True | False",
        "CUDA: a request's tokens are the same whatever else is in the batch, at some cost in speed (on the CPU they "
        "always are)",
        kUser, false},
       store_bool(&E::reproducible)},
      {{"cuda_graphs", "bool", "True", "True | False",
        "CUDA: capture decode steps as CUDA graphs at start and replay them; False to debug", kUser, false},
       store_bool(&E::cuda_graphs)},
      {{"threads", "int", "0", ">= 0", "threads of the CPU device; 0: the number of CPUs", kUser, false},
       store_int(&E::threads, at_least(0))},
      {{"token_budget", "int", "0", ">= 0",
        "maximum number of tokens computed in one step; 0: by the device: 512 on a CPU, 512 to 8192 on a GPU by its "
        "SMs and memory",
        kUser, false},
       store_int(&E::token_budget, at_least(0))},
      {{"max_queue_size", "int", "512", ">= 1",
        "maximum number of waiting requests; one more is rejected as overload", kUser, false},
       store_int(&E::max_queue_size, at_least(1))},
      {{"max_queue_tokens", "int", "1048576", ">= 0",
        "maximum number of prompt tokens of waiting requests; a request beyond it is rejected as overload; 0: no "
        "limit",
        kUser, false},
       store_int(&E::max_queue_tokens, at_least(0))},
      {{"max_queue_time_s", "float", "120", ">= 0",
        "maximum time that a request waits to begin, in seconds; then it is rejected as overload; 0: no limit",
        kUser, false},
       store_float(&E::max_queue_time_s, not_negative)},
      {{"request_timeout_s", "float", "0", ">= 0",
        "deadline of requests that set none, in seconds; 0: none", kUser, false},
       store_float(&E::request_timeout_s, not_negative)},
      {{"drain_timeout_s", "float", "30", ">= 0",
        "seconds that running requests have to end when the service is asked to shut down", kUser, false},
       store_float(&E::drain_timeout_s, not_negative)},
      {{"exit_on_device_failure", "bool", "True", "True | False",
        "Triton: the server's process ends with exit code 75 once the device has failed, so that its supervisor "
        "starts a new one; False: it stays, with a model that is not ready",
        kUser, false},
       store_bool(&E::exit_on_device_failure)},
      {{"session_ttl_s", "float", "3600", ">= 0",
        "how long an idle session is kept, in seconds; 0: there are no sessions", kUser, false},
       store_float(&E::session_ttl_s, not_negative)},
      {{"session_quota", "float", "0.5", "0 to 1",
        "maximum share of the KV blocks that sessions may pin", kUser, false},
       store_float(&E::session_quota, share)},
      {{"max_sessions", "int", "1000", ">= 1",
        "maximum number of sessions; the one that is idle longest is forgotten first", kUser, false},
       store_int(&E::max_sessions, at_least(1))},
      {{"session_dir", "string", "", "a folder or empty",
        "where histories of sessions are saved over restarts; empty: in memory only", kUser, false},
       store_string(&E::session_dir)},
      {{"stream_interval_ms", "int", "20", ">= 0",
        "minimum time between two responses of a request, in milliseconds; 0: one response per token", kUser, false},
       store_int(&E::stream_interval_ms, at_least(0))},
      {{"max_context_token_num", "int", "1", "any", "an old setting without meaning here", kUser, true}, store_nothing},
      {{"step_length", "int", "1", "any", "an old setting without meaning here", kUser, true}, store_nothing},
      {{"use_context_fmha", "int", "1", "any", "an old setting without meaning here", kUser, true}, store_nothing},
  };
  return table;
}

}  // namespace

std::span<const ConfigField> config_fields() {
  static const std::vector<ConfigField> fields = [] {
    std::vector<ConfigField> out;
    for (const auto& entry : entries()) out.push_back(entry.field);
    return out;
  }();
  return fields;
}

std::vector<std::string> apply_settings(const Settings& settings, EngineConfig& engine, ModelConfig* model) {
  std::vector<std::string> warnings;
  for (const auto& [key, value] : settings) {
    const auto& table = entries();
    const auto entry = std::find_if(table.begin(), table.end(), [&](const Entry& e) { return e.field.key == key; });
    if (entry == table.end()) {
      std::vector<std::string_view> keys;
      for (const auto& field : config_fields()) keys.push_back(field.key);
      const auto near = nearest(key, keys);
      throw Error(ErrorCode::invalid_argument,
                  cat("unknown setting '", key, "'", near.empty() ? "" : cat(" (did you mean '", near, "'?)")));
    }
    if (!entry->store(trim(value), engine, model)) {
      throw Error(ErrorCode::invalid_argument, cat("setting ", key, " = '", value, "' is not valid: it takes ",
                                                   entry->field.range, " (", entry->field.help, ")"));
    }
    if (entry->field.ignored) {
      warnings.push_back(cat("setting ", key, " has no effect: ", entry->field.help));
    }
  }
  return warnings;
}

Settings read_config_ini(const std::filesystem::path& file) {
  std::ifstream in(file);
  if (!in) {
    throw Error(ErrorCode::invalid_argument,
                cat("cannot read ", file.string(), ": is its folder the weights folder of a workspace?"));
  }
  Settings settings;
  bool in_section = false, found = false;
  int number = 0;
  for (std::string line; std::getline(in, line);) {
    ++number;
    const auto text = trim(line);
    if (text.empty() || text[0] == '#' || text[0] == ';') continue;
    if (text.front() == '[') {
      in_section = text == "[llama]";
      found |= in_section;
      continue;
    }
    if (!in_section) continue;
    const auto equals = text.find('=');
    if (equals == std::string_view::npos) {
      throw Error(ErrorCode::invalid_argument,
                  cat(file.string(), " line ", number, ": '", text, "' is no 'key = value'"));
    }
    settings.insert_or_assign(std::string(trim(text.substr(0, equals))), std::string(trim(text.substr(equals + 1))));
  }
  if (!found) throw Error(ErrorCode::invalid_argument, cat(file.string(), " has no section [llama]"));
  return settings;
}

Settings settings_from_environment() {
  Settings settings;
  for (const auto& field : config_fields()) {
    if (field.model_attribute) continue;
    std::string name = "CHARONIA_";
    for (const char c : field.key) name += static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
    const char* value = std::getenv(name.c_str());
    if (value != nullptr && *value != '\0') settings.emplace(field.key, value);
  }
  return settings;
}

}  // namespace charonia
