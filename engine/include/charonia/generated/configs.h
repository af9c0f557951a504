// Generated from definitions/engine_settings.toml and definitions/model_attributes.toml by `make generate`; do not edit.
#pragma once

#include <string>
#include <vector>

namespace charonia {

// Settings that users may change.
struct EngineConfig {
  // number of tensor-parallel ranks that share the model: GPUs, or groups of the CPU device's threads; a workspace is
  // converted for a fixed number (--tp); >= 1
  int tensor_para_size = 1;
  // longest sequence in tokens; 0: the length that the model was trained for; >= 0
  int session_len = 0;
  // maximum number of sequences decoded together; 0: depends on the device: 64 on a CPU, 64 to 512 on a GPU, by its SMs
  // and memory; >= 0; runtime/memory_plan.h has the rule
  int max_batch_size = 0;
  // KV block memory: share of the memory that is free after loading the weights, or a number of blocks; 0: 0.8, and on
  // a CPU at most max_batch_size sequences of 1024 tokens, or one of full length;
  // 0, a share in (0, 1) or an integer >= 1; runtime/memory_plan.cpp has the rule
  double cache_max_entry_count = 0.0;
  // tokens per KV block; >= 1
  int cache_block_seq_len = 64;
  // KV blocks that are allocated together when needed; -1: all at start; 0: the square root of their number; >= -1
  int cache_chunk_size = -1;
  // KV block memory in bytes, of all ranks together; overrides cache_max_entry_count;
  // bytes, with or without a unit: 8GiB, 500MB; or empty
  std::string cache_size;
  // KV block memory for this many simultaneous sequences of cache_user_tokens; overrides cache_size; 0: not set; >= 0
  int cache_users = 0;
  // tokens of each sequence of cache_users; 0: session_len; >= 0
  int cache_user_tokens = 0;
  // reuse the KV blocks of equal prompt prefixes (results do not change)
  bool enable_prefix_caching = true;
  // type of the KV cache; 0: the model's type; 8 or 4: integers of 8 or 4 bits, with a scale and a minimum for each
  // token and head (in the oldest workspaces 4 meant 8 bits; here it means 4); 0 | 4 | 8
  int quant_policy = 0;
  // 1 or more enables dynamic NTK for contexts beyond max_position_embeddings, with this factor; only for models
  // without their own rotary scaling; 0: off; >= 0
  double rope_scaling_factor = 0.0;
  // 1 scales attention by the logarithm of the position beyond max_position_embeddings (log-n); 0 | 1
  int use_logn_attn = 0;
  // auto: temperature, top_k, top_p, min_p and repetition_penalty of the model's generation_config.json are the
  // defaults of requests; none: that file is ignored; auto | none
  std::string generation_config = "auto";
  // device that runs the model; null computes nothing and generates meaningless words, to measure gateways and clients
  // (docs/scaling.md); auto | cpu | cuda | null
  std::string device = "auto";
  // duration of a step with device = null, in milliseconds; 0: as fast as possible. Not for other devices; 0 to 1000
  double null_step_ms = 0.0;
  // GPUs to run on, one for each tensor-parallel rank; empty: the first ones; numbers separated by commas
  std::string device_ids;
  // CUDA: a request's tokens do not depend on other requests in the batch, at some cost in speed (on the CPU they never
  // do)
  bool reproducible = false;
  // CUDA: capture decode steps as CUDA graphs at start and replay them; False to debug
  bool cuda_graphs = true;
  // threads of the CPU device; 0: the number of CPUs; >= 0
  int threads = 0;
  // maximum number of tokens computed in one step; 0: depends on the device: 512 on a CPU, 512 to 8192 on a GPU, by its
  // SMs and memory; >= 0; runtime/memory_plan.h has the rule
  int token_budget = 0;
  // target duration in milliseconds of a step that computes prompts while other requests decode: it gets as many prompt
  // tokens as fit, up to token_budget; -1: 3 times the duration of such a step without prompts, or 3 times
  // stream_interval_ms if that is more; 0: off; >= -1; for the rule see schedule/step_time.h
  int step_time_ms = -1;
  // maximum number of waiting requests; further requests are rejected as overload; >= 1
  int max_queue_size = 512;
  // maximum number of prompt tokens of waiting requests; further requests are rejected as overload; 0: no limit; >= 0
  int max_queue_tokens = 1048576;
  // maximum time in seconds that a request waits for its start; then it is rejected as overload; 0: no limit; >= 0
  double max_queue_time_s = 120.0;
  // deadline in seconds of requests that set none; 0: no deadline; >= 0
  double request_timeout_s = 0.0;
  // seconds that running requests have to end when the service shuts down; >= 0
  double drain_timeout_s = 30.0;
  // maximum bytes of the schema, expression or grammar of a request with structured output; >= 1
  int guide_max_bytes = 65536;
  // structured output: text that the grammar determines is not sampled, but split into tokens as the tokenizer does
  // (docs/structured_output.md)
  bool jump_forward = false;
  // seconds after which an idle session is deleted; 0: no sessions; >= 0
  double session_ttl_s = 3600.0;
  // maximum share of the KV blocks that sessions may pin; 0 to 1
  double session_quota = 0.5;
  // maximum number of sessions; the session that is idle longest is deleted first; >= 1
  int max_sessions = 1000;
  // folder that keeps session histories over restarts; empty: only in memory; a folder or empty
  std::string session_dir;
  // minimum time between two responses of a request, in milliseconds; 0: one response per token; >= 0
  int stream_interval_ms = 20;
  // if many requests stream at the same time, the time between two responses of each is at least this many milliseconds
  // times their number, up to stream_interval_max_ms; streams of a subscription count a fifth; 0: off; >= 0; for the
  // rule see runtime/stream_interval.h
  double stream_interval_per_stream_ms = 0.8;
  // maximum time between two responses that stream_interval_per_stream_ms causes, in milliseconds; >= 0
  int stream_interval_max_ms = 100;
};

// Properties of a model. `charonia convert` writes them to config.ini; users do not edit them.
struct ModelConfig {
  // name of the model for clients; any text
  std::string model_name;
  // llama, mistral, qwen2, gemma2, mixtral, ...; a supported family
  std::string model_family;
  // attention heads; >= 1
  int head_num = 0;
  // heads of keys and values; >= 1
  int kv_head_num = 0;
  // elements per head; >= 2
  int size_per_head = 0;
  // width of the residual stream; >= 1
  int hidden_units = 0;
  // width of the feed-forward layer; >= 1
  int inter_size = 0;
  // decoder layers; >= 1
  int num_layer = 0;
  // rows of the embedding; >= 1
  int vocab_size = 0;
  // positions the model was trained for; >= 1
  int max_position_embeddings = 0;
  // epsilon of the RMS norms; > 0
  float norm_eps = 1e-06F;
  // q, k and v have biases
  bool attn_bias = false;
  // the attention's output has a bias
  bool attn_output_bias = false;
  // the feed-forward layer has biases
  bool mlp_bias = false;
  // the output layer is the embedding
  bool tie_word_embeddings = false;
  // token that begins a text; -1: none; >= -1
  int start_id = -1;
  // tokens that end a sequence; token ids separated by commas
  std::vector<int> end_ids;
  // rotated elements per head; 0: none; >= 0; all of size_per_head, or none
  int rotary_embedding = 0;
  // base of the rotary embedding; > 0
  float rope_theta = 10000.0F;
  // kind of rotary scaling; default | linear | dynamic | llama3 | yarn | longrope | qwen; qwen: dynamic NTK as in the
  // code of Qwen 1
  std::string rope_scaling_type = "default";
  // rotary scaling: factor; > 0
  float rope_factor = 1.0F;
  // llama3 scaling: low_freq_factor; > 0
  float rope_low_freq_factor = 1.0F;
  // llama3 scaling: high_freq_factor; > 0
  float rope_high_freq_factor = 4.0F;
  // rotary scaling: positions of the model before scaling; >= 0
  int rope_original_max_position_embeddings = 0;
  // yarn: beta_fast; > 0
  float rope_beta_fast = 32.0F;
  // yarn: beta_slow; > 0
  float rope_beta_slow = 1.0F;
  // yarn: the ramp's bounds are integers
  bool rope_truncate = true;
  // yarn and longrope: factor of cosines and sines; 0: by formula; >= 0
  float rope_attention_factor = 0.0F;
  // yarn: mscale; >= 0; 0: none
  float rope_mscale = 0.0F;
  // yarn: mscale_all_dim; >= 0; 0: none
  float rope_mscale_all_dim = 0.0F;
  // longrope: short_factor; numbers separated by commas; rotary_embedding / 2 numbers
  std::vector<float> rope_short_factors;
  // longrope: long_factor; numbers separated by commas; rotary_embedding / 2 numbers
  std::vector<float> rope_long_factors;
  // rotary base of the layers with a window; 0: same as other layers; >= 0; these layers have no rotary scaling (Gemma
  // 3)
  float rope_local_theta = 0.0F;
  // layers with rotation (r) and without (n); empty: all r; letters r and n
  std::string layer_rotary;
  // the rotation pairs elements 2i and 2i + 1, not i and i + rotary_embedding / 2; GLM, ERNIE, Cohere
  bool rotary_interleaved = false;
  // log-n attention scaling begins at this position; 0: none; >= 0; q at position p >= logn_length is scaled by
  // log_{logn_length}(p + 1)
  int logn_length = 0;
  // q at position p is multiplied by 1 + q_scale_beta ln(1 + floor(p / q_scale_length)); 0: none; >= 0; after the
  // rotation (Ministral 3)
  float q_scale_beta = 0.0F;
  // number of positions with the same factor of q_scale_beta; >= 0; needed with q_scale_beta
  int q_scale_length = 0;
  // attention uses slopes (ALiBi) instead of a rotation; then rotary_embedding = 0
  bool alibi = false;
  // number of previous tokens that attention reads; 0: all; >= 0
  int sliding_window = 0;
  // layers with the window (s) and without (f); empty: all s; letters s and f
  std::string layer_windows;
  // factor of q k; 0: 1 / sqrt(size_per_head); >= 0
  float attention_scale = 0.0F;
  // soft cap of attention scores; 0: none; >= 0
  float attention_soft_cap = 0.0F;
  // each head has a sink: one more score in its softmax, without a value; GPT-OSS
  bool attention_sinks = false;
  // soft cap of logits; 0: none; >= 0
  float logit_soft_cap = 0.0F;
  // heads of q and k are normalised; RMS norms, before the rotation
  bool qk_norm = false;
  // with qk_norm: one norm for all q heads of a token, and one for all its k heads; OLMo 2; the weights are [head_num *
  // size_per_head] and [kv_head_num * size_per_head]
  bool qk_norm_rows = false;
  // with qk_norm: the norms come after the rotation; Hunyuan
  bool qk_norm_after_rotary = false;
  // inputs of attention and feed-forward are normalised; 0: they read the residual stream itself; 0 needs post_norms =
  // 1 (OLMo 2, EXAONE 4)
  bool pre_norms = true;
  // norms multiply by 1 + weight; Gemma
  bool norm_unit_offset = false;
  // outputs of attention and feed-forward are normalised too; Gemma
  bool post_norms = false;
  // norms subtract the mean first; LayerNorm without bias (Cohere)
  bool layer_norm = false;
  // attention and feed-forward of a layer have the same normalised input; Cohere
  bool parallel_block = false;
  // activation of the feed-forward layer; silu | gelu_tanh | clamped_swiglu; clamped_swiglu: g sigmoid(swiglu_alpha g)
  // (u + 1) with clamped g and u (GPT-OSS)
  std::string activation = "silu";
  // clamped_swiglu: limit of the gate and of the other factor; > 0
  float swiglu_limit = 7.0F;
  // clamped_swiglu: factor of the gate in its sigmoid; > 0
  float swiglu_alpha = 1.702F;
  // factor of the embedding; > 0
  float embedding_scale = 1.0F;
  // factor of the output of attention and feed-forward; > 0; Granite
  float residual_multiplier = 1.0F;
  // factor of the logits, before the soft cap; > 0; Granite: 1 / logits_scaling; Cohere: logit_scale
  float logits_scale = 1.0F;
  // rows of the output layer are scaled to length 1; Baichuan 2
  bool normalize_output = false;
  // experts of a feed-forward layer; 0: dense; >= 0
  int num_experts = 0;
  // experts per token; >= 0
  int experts_per_token = 0;
  // width of an expert; >= 0
  int expert_inter_size = 0;
  // the three matrices of each expert have biases; GPT-OSS
  bool expert_bias = false;
  // weights of the chosen experts add up to 1
  bool renormalize_experts = true;
  // function of the router's logits; softmax | sigmoid
  std::string router_score = "softmax";
  // the router has a bias for each expert; it is added to the scores that choose experts, but not to their weights
  bool router_bias = false;
  // with router_bias: the bias is added to the router's logits, so weights have it too; GPT-OSS
  bool router_logit_bias = false;
  // groups of experts: the best groups are chosen first, then experts in them; 0: no groups; >= 0; a group's score is
  // the sum of its two best experts' scores
  int router_groups = 0;
  // groups whose experts can be chosen for a token; >= 0
  int router_top_groups = 0;
  // factor of the weights of the chosen experts; > 0
  float router_scale = 1.0F;
  // with renormalize_experts: minimum divisor of the weights; >= 0
  float router_norm_min = 0.0F;
  // the router's weight stays fp32 if it is fp32 in the files
  bool router_fp32 = false;
  // width of the shared expert, which every token uses; 0: none; >= 0
  int shared_expert_inter_size = 0;
  // the shared expert's output is multiplied by a sigmoid
  bool shared_expert_gate = false;
  // layers with experts (m) and dense ones (d); empty: all m; letters m and d
  std::string layer_experts;
  // type of most of the weights; bf16 | fp16 | fp32 | int4 | int8 | fp8 | mxfp4
  std::string weight_type = "bf16";
  // type of activations and of weights that are not quantised; empty: weight_type;  | bf16 | fp16 | fp32
  std::string data_type;
  // input features that share a scale of a quantised weight; 0: one scale per output feature, or not quantised; >= 0
  int group_size = 0;
  // default temperature of requests, from generation_config.json; >= 0
  float default_temperature = 1.0F;
  // default top_k of requests, from generation_config.json; >= 0 (0: all tokens)
  int default_top_k = 0;
  // default top_p of requests, from generation_config.json; in (0, 1]
  float default_top_p = 1.0F;
  // default min_p of requests, from generation_config.json; in [0, 1]
  float default_min_p = 0.0F;
  // default repetition_penalty of requests, from generation_config.json; in [0.01, 100]
  float default_repetition_penalty = 1.0F;
};

}  // namespace charonia
