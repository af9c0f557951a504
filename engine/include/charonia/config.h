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
  int session_len = 0;                 // tokens; 0: the model's max_position_embeddings
  int max_batch_size = 0;              // most sequences in one step; 0: by the device (runtime/step_sizes.h)
  double cache_max_entry_count = 0.8;  // (0,1): share of the free memory; integer >= 1: number of blocks
  int cache_block_seq_len = 64;
  int cache_chunk_size = -1;
  std::string cache_size;     // KV memory in bytes: "8GiB", "500MB", "1000000"; wins over cache_max_entry_count
  int cache_users = 0;        // > 0: room for so many sequences of cache_user_tokens; wins over both
  int cache_user_tokens = 0;  // 0: session_len
  bool enable_prefix_caching = true;
  int quant_policy = 0;  // bits of the KV cache's integers: 8, 4; 0: the model's type
  double rope_scaling_factor = 0.0;
  int use_logn_attn = 0;
  std::string device = "auto";         // auto | cpu | cuda
  std::string device_ids;              // GPUs of the ranks by number, separated by commas; empty: the first ones
  bool reproducible = false;           // on CUDA: the same tokens, bit by bit, whatever else is in the batch
  bool cuda_graphs = true;             // capture decode steps and replay them
  int threads = 0;                     // 0: as many as there are processors
  int token_budget = 0;                // most tokens in one step; 0: by the device (runtime/step_sizes.h)
  int max_queue_size = 512;            // most waiting requests
  int max_queue_tokens = 1048576;      // most tokens of waiting requests' prompts; 0: no bound
  double max_queue_time_s = 120;       // longest that a request waits to begin; 0: no bound
  double request_timeout_s = 0;        // deadline of requests that name none; 0: none
  double drain_timeout_s = 30;         // how long running requests may go on when the service ends
  bool exit_on_device_failure = true;  // Triton: the server's process ends once the device has failed
  double session_ttl_s = 3600;         // how long an idle session is kept; 0: sessions are off
  double session_quota = 0.5;          // share of the KV blocks that sessions may keep for themselves
  int max_sessions = 1000;             // most sessions; the one that is idle longest is forgotten first
  std::string session_dir;             // folder that keeps histories over restarts; empty: memory alone
  int stream_interval_ms = 20;         // least time between two responses of a request; 0: every token
};

// What is a model's own (config.ini writes them, a user does not edit them).
struct ModelConfig {
  std::string model_name;
  std::string model_family;  // llama, mistral, qwen2, internlm, ...
  int head_num = 0, kv_head_num = 0, size_per_head = 0;
  int hidden_units = 0, inter_size = 0, num_layer = 0, vocab_size = 0;
  int max_position_embeddings = 0;
  float norm_eps = 1e-6F;
  bool attn_bias = false;  // q, k, v
  bool attn_output_bias = false;
  bool mlp_bias = false;
  bool tie_word_embeddings = false;
  int start_id = -1;         // -1: none
  std::vector<int> end_ids;  // key end_id, several separated by commas
  int rotary_embedding = 0;  // rotated dimensions, = size_per_head
  float rope_theta = 10000.0F;
  // default | linear | dynamic | llama3 | yarn | longrope | qwen (dynamic NTK as Qwen 1's code has it)
  std::string rope_scaling_type = "default";
  float rope_factor = 1.0F, rope_low_freq_factor = 1.0F, rope_high_freq_factor = 4.0F;
  int rope_original_max_position_embeddings = 0;
  float rope_beta_fast = 32.0F, rope_beta_slow = 1.0F;  // yarn
  bool rope_truncate = true;                            // yarn: bounds of the ramp are whole numbers
  float rope_attention_factor = 0.0F;  // yarn, longrope: what cos and sin are multiplied by; 0: by formula
  float rope_mscale = 0.0F, rope_mscale_all_dim = 0.0F;      // yarn; 0: none
  std::vector<float> rope_short_factors, rope_long_factors;  // longrope, [rotary_embedding / 2]
  float rope_local_theta = 0.0F;  // > 0: base of the layers with a window, which have no scaling (Gemma 3)
  int logn_length = 0;            // > 0: q at position p >= logn_length is scaled by log_{logn_length}(p + 1)
  bool alibi = false;             // slopes instead of a rotation; then rotary_embedding = 0
  int sliding_window = 0;         // 0: none
  std::string layer_windows;      // a letter for each layer: 's' has the window, 'f' has none; empty: all have it
  float attention_scale = 0.0F;   // 0: 1 / sqrt(size_per_head)
  float attention_soft_cap = 0.0F, logit_soft_cap = 0.0F;  // 0: none
  bool qk_norm = false;                                    // RMS norms of the heads of q and k, before the rotation
  bool norm_unit_offset = false;                           // norms multiply by 1 + weight (Gemma)
  bool post_norms = false;          // also the outputs of attention and feed-forward are normalised (Gemma)
  std::string activation = "silu";  // silu | gelu_tanh
  float embedding_scale = 1.0F;
  bool normalize_output = false;  // rows of the output layer have length 1 (Baichuan 2)
  int num_experts = 0, experts_per_token = 0, expert_inter_size = 0;  // mixture of experts; 0: none
  bool renormalize_experts = true;                                    // the chosen experts' weights add up to 1
  std::string layer_experts;  // a letter for each layer: 'm' has experts, 'd' is dense; empty: all as num_experts says
  std::string weight_type = "bf16";  // bf16 | fp16 | fp32
  int group_size = 0;
};

// One key as users see it.
struct ConfigField {
  std::string_view key;
  std::string_view kind;  // int | float | bool | string
  std::string_view default_value;
  std::string_view range;  // for humans and messages: ">= 1", "auto | cpu | cuda"
  std::string_view help;
  bool model_attribute;  // true: read-only, written by convert
  bool ignored;          // accepted for old files, without effect; a warning says so
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
