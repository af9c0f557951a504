// The engine's configuration: one table defines every key (name, type, default, range, help). config.ini, the
// environment (CHARONIA_<KEY>), Triton's model parameters, the command line and the documentation all follow from it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace charonia {

using Settings = std::map<std::string, std::string, std::less<>>;

// What a user may set.
struct EngineConfig {
  int tensor_para_size = 1;
  int session_len = 0;                   // tokens; 0: the model's max_position_embeddings
  int max_batch_size = 64;
  double cache_max_entry_count = 0.8;    // (0,1): share of the free memory; integer >= 1: number of blocks
  int cache_block_seq_len = 64;
  int cache_chunk_size = -1;
  bool enable_prefix_caching = true;
  int quant_policy = 0;
  double rope_scaling_factor = 0.0;
  int use_logn_attn = 0;
  std::string device = "auto";           // auto | cpu | cuda
  std::string device_ids;                // GPUs of the ranks by number, separated by commas; empty: the first ones
  bool reproducible = false;             // on CUDA: the same tokens, bit by bit, whatever else is in the batch
  bool cuda_graphs = true;               // record decode steps and replay them
  int threads = 0;                       // 0: as many as there are processors
  int token_budget = 512;                // most tokens in one step
  int max_queue_size = 512;              // most waiting requests
  int stream_interval_ms = 20;           // least time between two responses of a request; 0: every token
};

// What is a model's own (config.ini writes them, a user does not edit them).
struct ModelConfig {
  std::string model_name;
  std::string model_family;          // llama, mistral, qwen2, internlm, ...
  int head_num = 0, kv_head_num = 0, size_per_head = 0;
  int hidden_units = 0, inter_size = 0, num_layer = 0, vocab_size = 0;
  int max_position_embeddings = 0;
  float norm_eps = 1e-6F;
  bool attn_bias = false;            // q, k, v
  bool attn_output_bias = false;
  bool mlp_bias = false;
  bool tie_word_embeddings = false;
  int start_id = -1;                 // -1: none
  std::vector<int> end_ids;          // key end_id, several separated by commas
  int rotary_embedding = 0;          // rotated dimensions, = size_per_head
  float rope_theta = 10000.0F;
  std::string rope_scaling_type = "default";  // default | llama3
  float rope_factor = 1.0F, rope_low_freq_factor = 1.0F, rope_high_freq_factor = 4.0F;
  int rope_original_max_position_embeddings = 0;
  std::string weight_type = "bf16";  // bf16 | fp16 | fp32
  int group_size = 0;
};

// One key as users see it.
struct ConfigField {
  std::string_view key;
  std::string_view kind;      // int | float | bool | string
  std::string_view default_value;
  std::string_view range;     // for humans and messages: ">= 1", "auto | cpu | cuda"
  std::string_view help;
  bool model_attribute;       // true: read-only, written by convert
  bool ignored;               // accepted for old files, without effect; a warning says so
};

// Every key, in the order in which config.ini lists them.
std::span<const ConfigField> config_fields();

// Sets keys from text. Throws Error(invalid_argument) naming key, value and range; an unknown key names the nearest
// known one. Returns warnings (ignored keys).
std::vector<std::string> apply_settings(const Settings& settings, EngineConfig& engine, ModelConfig* model = nullptr);

// Section [llama] of a config.ini.
Settings read_config_ini(const std::filesystem::path& file);

// CHARONIA_<KEY> for every inference parameter that is set and not empty.
Settings settings_from_environment();

}  // namespace charonia
