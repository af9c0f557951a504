#include "runtime/memory_plan.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <utility>

#include "base/bytes.h"
#include "base/text.h"
#include "charonia/engine.h"
#include "charonia/error.h"
#include "model/decoder_plan.h"
#include "model/layers.h"
#include "model/rope.h"
#include "model/rounding.h"
#include "model/weights.h"
#include "ops/cpu/free_memory.h"
#include "ops/cpu/make_cpu_ops.h"
#include "ops/cuda/experts_workspace.h"
#include "ops/cuda/device/cuda_settings.h"
#include "ops/cuda/gemm/dequantised_parts.h"
#include "ops/cuda/graph/decode_buckets.h"
#include "ops/cuda/low_rank_workspace.h"
#include "ops/cuda/make_cuda_ops.h"
#include "runtime/adapter.h"
#include "runtime/devices.h"
#include "runtime/draft_model.h"
#include "runtime/kv_offload.h"
#include "runtime/proposals.h"
#include "runtime/settings.h"
#include "schedule/scheduler.h"

namespace charonia::runtime {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

std::string text(std::size_t bytes) { return bytes_text(static_cast<std::int64_t>(bytes)); }

// How to compute a step size for a GPU.
struct Rule {
  std::size_t per_sm;
  std::size_t bytes_each;  // free memory for each token or sequence
  std::size_t multiple;    // the size is rounded down to a multiple of it
  std::size_t min, max;
};
constexpr Rule kTokens = {.per_sm = 16, .bytes_each = 8 * kMiB, .multiple = 256, .min = 512, .max = 8192};
constexpr Rule kSequences = {.per_sm = 2, .bytes_each = 256 * kMiB, .multiple = 64, .min = 64, .max = 512};

int size_by(const Rule& rule, const StepDevice& device) {
  if (device.device == "cpu") return static_cast<int>(rule.min);
  const auto wanted = std::min(static_cast<std::size_t>(device.sms) * rule.per_sm, device.free_bytes / rule.bytes_each);
  return static_cast<int>(std::clamp(wanted / rule.multiple * rule.multiple, rule.min, rule.max));
}

void require_step_sizes(const EngineConfig& config) {
  for (const auto& [name, value] :
       {std::pair{"token_budget", config.token_budget}, std::pair{"max_batch_size", config.max_batch_size}}) {
    if (value >= 1) continue;
    throw Error(ErrorCode::internal,
                cat(name, " = ", value, " was not resolved: runtime::resolve_step_sizes must come before it is used"));
  }
}

// Estimate of the memory of captured decode steps of one kind (CudaOps), besides those without adapters and proposals.
// more_kernels: of a step. CUDA takes 64 KiB for each kernel of a graph before version 12.4 (PyTorch's documentation,
// "CUDAGraph Trees"). Later drivers take 30 % of it (issue 5517 of vLLM).
std::size_t graph_bytes(const ModelConfig& model, int max_rows, int sampled_rows, std::size_t more_kernels) {
  constexpr std::size_t kKernel = std::size_t{20} << 10;
  constexpr std::size_t kOfLayer = 16;  // kernels; a layer with a delta net or a shared expert may have a few more
  const auto steps = cuda::decode_buckets(std::min(max_rows, sampled_rows)).size();
  return steps * (kOfLayer * static_cast<std::size_t>(model.num_layer) + more_kernels) * kKernel;
}

// Upper bound of the memory for 16-bit copies of blocks of the KV cache (PromptKernels).
std::size_t wide_bytes(const ops::KvLayout& layout, const ops::StepLimits& limits, bool reproducible) {
  if (layout.quant_bits == 0 || reproducible || !cuda::unproven_setting()) return 0;
  auto copies = layout;
  copies.quant_bits = 0;
  std::size_t block = 0;
  for (const auto& layer : copies.layers) {
    if (layer.kind != CacheKind::state) block = std::max(block, copies.layer_bytes(layer));
  }
  return cuda::wide_cache_bytes(limits.max_sequences * cuda::divide_up(limits.max_positions, layout.block_len),
                                static_cast<std::int64_t>(block));
}

// Upper bound of the memory of a GPU's steps, in addition to the model's activations.
std::size_t cuda_step_bytes(const ModelConfig& model, const model::Shard& shard, const ops::StepLimits& limits,
                            std::size_t wide, bool cuda_graphs) {
  constexpr std::size_t kWorkspaces = 66 * kMiB;  // of GEMMs: cuBLASLt's (32 MiB), ours (18 MiB), inputs (16 MiB)
  // Lists of penalties and bans (16 MiB), tables and partial results of attention, and the CUDA graphs of decode steps.
  constexpr std::size_t kFixed = 128 * kMiB;
  // Counts of tokens for penalties (16 bits each), token masks (1 bit each), and histograms of logits.
  constexpr std::size_t kHistograms = 16384;
  const auto vocab = static_cast<std::size_t>(model.vocab_size);
  const auto sampled = static_cast<std::size_t>(limits.logits_rows());
  const auto collectives = shard.ranks == 1 ? 0
                                            : static_cast<std::size_t>(limits.max_rows) *
                                                  static_cast<std::size_t>(model.hidden_units) * sizeof(float) *
                                                  static_cast<std::size_t>(shard.ranks);
  const auto graphs = cuda_graphs && limits.logits_rows() > limits.max_sequences
                          ? graph_bytes(model, limits.max_rows, limits.logits_rows(), 0)
                          : 0;
  const auto of_steps = kFixed + wide + graphs + sampled * (vocab * 2 + vocab / 8 + kHistograms) + collectives;
  return kWorkspaces + std::max(of_steps, cuda::kGemmOperandBytes);
}

constexpr double kShare = 0.8;          // of the free memory, for the KV cache
constexpr int kShortChatTokens = 1024;  // a chat of this length counts as short

std::int64_t blocks_of(const EngineConfig& config, int tokens) {
  return (std::int64_t{tokens} + config.cache_block_seq_len - 1) / config.cache_block_seq_len;
}

// Whether the cache has the default size of a CPU: the blocks of max_batch_size short chats, or of one sequence of full
// length, because other programs need the memory too.
bool is_for_short_chats(const EngineConfig& config) {
  return config.device == "cpu" && config.cache_users == 0 && config.cache_size.empty() &&
         config.cache_max_entry_count == 0;
}
std::int64_t blocks_of_short_chats(const EngineConfig& config) {
  return config.max_batch_size * std::min(blocks_of(config, kShortChatTokens), blocks_of(config, config.session_len));
}

// The assumed length of sequences. The cache of a model with windows is divided for them.
int tokens_of_sequence(const EngineConfig& config, int window) {
  constexpr int kWindows = 4;
  auto tokens = static_cast<std::int64_t>(kWindows) * window;
  if (config.cache_users > 0) tokens = config.session_len;
  if (is_for_short_chats(config) && blocks_of_short_chats(config) > blocks_of(config, config.session_len)) {
    tokens = kShortChatTokens;
  } else if (is_for_short_chats(config)) {
    tokens = config.session_len;
  }
  if (config.cache_user_tokens > 0) tokens = config.cache_user_tokens;
  return static_cast<int>(std::min<std::int64_t>(tokens, config.session_len));
}

// The number of window blocks.
int window_blocks(const EngineConfig& config, int window, int full_blocks) {
  const auto sequence = std::max<std::int64_t>(1, blocks_of(config, tokens_of_sequence(config, window)));
  const auto of_window = std::min(sequence, blocks_of(config, window - 1) + 1);
  const auto of_step = blocks_of(config, config.token_budget) + 1;
  const auto wanted = (full_blocks + sequence - 1) / sequence * of_window + of_step;
  return static_cast<int>(std::min<std::int64_t>(full_blocks, wanted));
}

// The number of states: for running sequences, and for snapshots. The first take at most twice the memory of the full
// blocks, and the second at most the same, so that large states leave memory for tokens. Sequences without a state
// wait. With proposals there are as many further states as the scheduler takes for them, but no more than a step has
// proposals.
int num_states(const EngineConfig& config, const CacheMemory& memory, int full_blocks) {
  constexpr int kTokensOfSnapshot = 512;
  if (full_blocks == 0) return 0;
  const auto by_tokens = std::int64_t{full_blocks} * config.cache_block_seq_len / kTokensOfSnapshot;
  const auto by_memory = static_cast<std::int64_t>(static_cast<double>(full_blocks) *
                                                   static_cast<double>(memory.block_bytes.full) /
                                                   static_cast<double>(memory.block_bytes.state));
  const std::int64_t most_running = std::min(config.max_batch_size, full_blocks);
  const auto running = std::clamp<std::int64_t>(2 * by_memory, 1, most_running);
  // At a snapshot, a step reads one state and writes another.
  const auto snapshots = config.enable_prefix_caching ? std::min(by_tokens, by_memory) : 0;
  const auto others = static_cast<int>(running + std::max<std::int64_t>(1, snapshots));
  int all = others;
  while (all < others + std::min(memory.proposals, schedule::most_proposal_states(all + 1))) ++all;
  return all;
}

std::size_t one_block_each(const PerKind<std::size_t>& bytes) { return bytes.full + bytes.window + bytes.state; }

// Bytes of a cache with this many full blocks.
double cache_bytes(const EngineConfig& config, const CacheMemory& memory, int full_blocks) {
  const auto blocks = blocks_by_kind(config, memory, full_blocks);
  double bytes = 0;
  for (const auto kind : kCacheKinds) bytes += static_cast<double>(memory.block_bytes[kind]) * blocks[kind];
  return bytes;
}

// The largest number of full blocks that fit into this memory with their window blocks.
std::int64_t most_blocks(const EngineConfig& config, const CacheMemory& memory, std::size_t bytes) {
  if (memory.window == 0 && memory.block_bytes.state == 0) {
    return static_cast<std::int64_t>(bytes / memory.block_bytes.full);
  }
  std::int64_t fits = 0, too_many = std::numeric_limits<int>::max();
  while (too_many - fits > 1) {
    const auto middle = fits + (too_many - fits) / 2;
    const bool fit = cache_bytes(config, memory, static_cast<int>(middle)) <= static_cast<double>(bytes);
    (fit ? fits : too_many) = middle;
  }
  return fits;
}

// The number of full blocks that the settings ask for.
struct CacheBlocks {
  std::int64_t blocks = 0;
  std::string setting;  // the setting, with its value
  std::string remedy;   // how to ask for fewer blocks
};

CacheBlocks blocks_asked_for(const EngineConfig& config, const CacheMemory& memory) {
  const int block_len = config.cache_block_seq_len;
  if (config.cache_users > 0) {
    const bool own = config.cache_user_tokens > 0;
    const int tokens = own ? config.cache_user_tokens : config.session_len;
    return {config.cache_users * blocks_of(config, tokens),
            cat("cache_users = ", config.cache_users, " with ", tokens, " tokens each (",
                own ? "cache_user_tokens" : "session_len", ")"),
            own ? "Lower cache_users or cache_user_tokens"
                : "Lower cache_users, or set cache_user_tokens below session_len"};
  }
  if (!config.cache_size.empty()) {
    const auto bytes = parse_bytes(config.cache_size);
    if (!bytes)
      throw Error(ErrorCode::invalid_argument, cat("cache_size = '", config.cache_size, "' is no memory size"));
    const auto of_rank = static_cast<std::size_t>(*bytes) / static_cast<std::size_t>(memory.ranks);
    const auto blocks = most_blocks(config, memory, of_rank);
    return {blocks, cat("cache_size = ", config.cache_size),
            blocks < 1 ? cat("Raise cache_size, or lower cache_block_seq_len (now ", block_len, ")")
                       : cat("Lower cache_size (block: ", block_len, " tokens)")};
  }
  const bool by_device = config.cache_max_entry_count == 0;
  const double entry = by_device ? kShare : config.cache_max_entry_count;
  const auto setting = cat("cache_max_entry_count = ", entry);
  if (entry >= 1) {
    return {static_cast<std::int64_t>(entry), setting,
            cat("Lower cache_max_entry_count or cache_block_seq_len (now ", block_len, ")")};
  }
  require_step_sizes(config);
  // A share of the free memory, but at most the blocks of max_batch_size sequences of full length.
  const auto sequence = blocks_of(config, config.session_len);
  const auto most = is_for_short_chats(config) ? blocks_of_short_chats(config) : config.max_batch_size * sequence;
  const auto bytes = static_cast<std::size_t>(entry * static_cast<double>(memory.free_bytes));
  const auto share = most_blocks(config, memory, bytes);
  return {std::min(share, std::max(most, sequence)), setting,
          cat("Lower cache_block_seq_len (now ", block_len, ")")};
}

}  // namespace

void resolve_step_sizes(EngineConfig& config, const StepDevice& device) {
  if (config.token_budget == 0) config.token_budget = size_by(kTokens, device);
  if (config.max_batch_size == 0) config.max_batch_size = size_by(kSequences, device);
}

ops::StepLimits step_limits(const EngineConfig& config, const ModelConfig& model) {
  require_step_sizes(config);
  // A mean needs the rows of all tokens, which have hidden_units numbers. A GPU has room for max_batch_size rows.
  const bool all_rows = model.pooling == "mean" && config.device == "cpu";
  const bool keeps = speculates(config, model) && method_of(config).reads_hidden;
  return {.max_rows = config.token_budget,
          .max_sequences = config.max_batch_size,
          .max_positions = config.session_len,
          .block_len = config.cache_block_seq_len,
          .kv_quant_bits = config.quant_policy,
          .max_logits_rows = all_rows ? std::max(config.token_budget, config.max_batch_size)
                                      : config.max_batch_size + most_proposals(config, model),
          .kept_hidden = keeps ? config.max_batch_size * kKeptHidden + 2 * config.token_budget : 0};
}

ops::StepLimits layer_limits(const EngineConfig& config, const ModelConfig& model) {
  auto out = step_limits(config, model);
  out.max_logits_rows = out.kept_hidden = 0;
  out.reads_hidden = true;
  return out;
}

int most_proposals(const EngineConfig& config, const ModelConfig& model) {
  return speculates(config, model) ? 2 * config.speculative_tokens : 0;
}

model::DeviceRules rules_of(std::string_view device) {
  if (device == "cuda") {
    return {ops::cuda_precision, [](const ops::ExpertsShape& shape, std::int64_t rows) {
              return cuda::ExpertsWorkspace(shape, rows).bytes;
            }};
  }
  const std::shared_ptr<ops::Ops> cpu = ops::make_cpu_ops(1);
  return {[cpu](DType weight) { return cpu->precision(weight); },
          [cpu](const ops::ExpertsShape& shape, std::int64_t rows) { return cpu->experts_scratch_bytes(shape, rows); }};
}

RankMemory rank_memory(std::string_view device, const model::DeviceRules& rules, const ModelConfig& model,
                       const model::Manifest& manifest, const model::Shard& shard, const ops::StepLimits& limits,
                       const EngineConfig& config) {
  const auto precision = rules.precision(model::data_type(model));
  auto elements = manifest.elements(shard.rank, model.normalize_output);
  // An fp32 router is stored as two halves, so it counts twice.
  for (int i = 0; model.router_fp32 && precision.weight != DType::f32 && i < model.num_layer; ++i) {
    if (!model::has_experts(manifest.layers()[static_cast<std::size_t>(i)])) continue;
    const auto& router = manifest.tensor(cat("layers.", i, ".feed_forward.gate.weight"));
    if (router.dtype == DType::f32) elements.matrices += router.rows * router.cols;
  }
  RankMemory out;
  if (device == "cuda" && model.per_layer_embedding > 0) {
    const auto& table = manifest.tensor("per_layer_embeddings.weight");
    elements.matrices -= table.rows * table.cols;
    out.host = static_cast<std::size_t>(table.rows * table.cols) * size_of(precision.weight);
  }
  if (model::shares_embedding(model, manifest, device)) {
    const auto& table = manifest.tensor("tok_embeddings.weight");
    elements.matrices -= table.rows * table.cols;
  }
  if (device == "cuda") {
    elements.matrices += elements.dequantised;
    elements.quantised_bytes -= elements.dequantised_bytes;
  }
  auto floats = static_cast<std::size_t>(elements.vectors);
  for (std::size_t i = 0; i < manifest.layers().size(); ++i) {
    const auto& mixer = manifest.layers()[i].mixer;
    if (mixer == "attention") continue;
    const auto* const name = mixer == "delta_net" ? ".delta.conv_qkv." : ".conv.w_conv.";
    const auto& conv = manifest.tensor(cat("layers.", i, name, shard.rank, ".weight"));
    elements.matrices -= conv.rows * conv.cols;
    floats += static_cast<std::size_t>(conv.rows * conv.cols);
  }
  if (model::has_q_scales(model)) floats += static_cast<std::size_t>(limits.max_positions);
  if (model.layer_scalars) floats -= static_cast<std::size_t>(model.num_layer);  // not in the device's memory
  if (model.alibi) floats += static_cast<std::size_t>(shard.heads);
  const model::DecoderPlan plan(model, manifest.layers(), shard, rules, limits);
  plan.kv_layout.check();
  if (limits.kv_quant_bits == ops::kKvFp8 && model.kv_scales != "none" && !shard.is_mtp) {
    for (const auto& layer : plan.kv_layout.layers) {
      if (layer.kind != CacheKind::state) floats += 2 * static_cast<std::size_t>(layer.kv_heads);
    }
  }
  if (device != "null") {  // the null device keeps no weights
    out.tables = model::RotaryTables(model, limits.max_positions, limits.max_rows).bytes();
    out.weights = static_cast<std::size_t>(elements.matrices) * size_of(precision.weight) +
                  static_cast<std::size_t>(elements.quantised_bytes) + floats * sizeof(float) + out.tables;
  }
  out.quantised = elements.quantised_bytes > 0;
  out.dequantised = device == "cuda" && elements.dequantised > 0;
  out.activations = plan.activation_bytes;
  if (device == "cuda") {  // on the CPU, each thread uses less than a megabyte
    out.loaded_steps = out.quantised ? cuda::kDequantisedBytes : 0;
    const auto wide = wide_bytes(plan.kv_layout, limits, config.reproducible);
    out.steps = cuda_step_bytes(model, shard, limits, wide, config.cuda_graphs);
  }
  for (const auto kind : kCacheKinds) out.kv_block[kind] = plan.kv_layout.block_bytes(kind);
  out.window = plan.kv_layout.window;
  return out;
}

std::string dequantised_warning(std::string_view device, const ModelConfig& model, const model::Manifest& manifest) {
  std::int64_t elements = 0, bytes = 0;
  for (int rank = 0; device == "cuda" && rank < manifest.ranks(); ++rank) {
    const auto of_rank = manifest.elements(rank, model.normalize_output);
    elements += of_rank.dequantised;
    bytes += of_rank.dequantised_bytes;
  }
  if (elements == 0) return {};
  const bool gguf = std::ranges::any_of(manifest.tensors(), [](const auto& named) {
    const auto& how = named.second.quantization;
    return how && how->layout == model::QuantLayout::gguf;
  });
  const auto type = ops::cuda_precision(model::data_type(model)).weight;
  return cat("GPUs hold quantised weights with minimums or in groups of 16 columns (GGUF's K types, Q4_1 and Q5_1) in ",
             to_string(type), ": ", bytes_text(elements * static_cast<std::int64_t>(size_of(type))), " instead of ",
             bytes_text(bytes), " on a CPU", gguf ? ". A file with all weights in Q4_0 or Q8_0 stays quantised" : "");
}

void count_adapter_slots(RankMemory& memory, const model::DeviceRules& rules, const EngineConfig& config,
                         const ModelConfig& model, const model::Manifest& manifest, int rank) {
  if (config.device != "cuda" || config.lora_device_adapters == 0) return;
  const auto type = rules.precision(model::data_type(model)).activation;
  const auto slots =
      model::Adapter::slots_of(manifest.modules(), rank, type, config.lora_device_adapters, config.lora_max_rank);
  memory.adapters = static_cast<std::size_t>(slots.count) * slots.bytes;
  const auto limits = step_limits(config, model);
  const auto kinds = limits.max_logits_rows > limits.max_sequences ? 2U : 1U;  // with proposals
  if (config.cuda_graphs) {
    memory.steps += kinds * graph_bytes(model, limits.max_rows, limits.max_logits_rows, 2 * slots.weights.size());
  }
  // Twice, because two tensors may be one weight, such as gate and up.
  memory.steps += 2 * cuda::low_rank_workspace_bytes(slots, config.token_budget, type == DType::f32);
}

void check_model_fits(const EngineConfig& config, std::string_view device, const RankMemory& memory,
                      std::size_t free_bytes, std::size_t reserved_bytes) {
  require_step_sizes(config);
  const auto kv_block = one_block_each(memory.kv_block);
  const auto needed = memory.all_but_cache() + kv_block;
  if (needed <= free_bytes) return;
  const bool half_fits = device == "cpu" && !memory.quantised && needed - memory.weights / 2 <= free_bytes;
  const bool long_tables = memory.tables > memory.weights / 2;
  throw Error(ErrorCode::resource_exhausted,
              cat("the model does not fit: its weights take ", text(memory.weights),
                  long_tables ? cat(", most of it for the positions of session_len = ", config.session_len) : "",
                  ", the activations of ",
                  config.token_budget, " tokens (token_budget) and ", config.max_batch_size,
                  " sequences (max_batch_size) ", text(memory.all_but_cache() - memory.weights - memory.adapters),
                  memory.adapters > 0 ? cat(", ", config.lora_device_adapters, " LoRA adapters of rank ",
                                            config.lora_max_rank, " ", text(memory.adapters))
                                      : "",
                  ", one KV block ", text(kv_block), ", and ", text(free_bytes), " are free on the device (", device,
                  reserved_bytes > 0 ? cat(", beside ", text(reserved_bytes), " for speculative_method = ",
                                           config.speculative_method)
                                     : "",
                  "). ",
                  long_tables ? "Lower session_len, or take"
                  : half_fits ? "Set quantization = w8a16, which halves most 16-bit weights, or take"
                              : "Take",
                  memory.dequantised
                      ? " a file in Q4_0 or Q8_0 (GPUs hold GGUF's K types, Q4_1 and Q5_1 in the data type),"
                      : "",
                  " a smaller or quantised model, a larger tensor_para_size, a lower token_budget or "
                  "max_batch_size, ", memory.adapters > 0 ? "lower lora_device_adapters or lora_max_rank, " : "",
                  reserved_bytes > 0 ? "set speculative_method = ngram, " : "", "or free memory"));
}

void check_host_memory(const RankMemory& memory, int ranks, std::size_t free_bytes) {
  const auto wanted = memory.host * static_cast<std::size_t>(ranks);
  if (wanted <= free_bytes) return;
  throw Error(ErrorCode::resource_exhausted,
              cat("the model does not fit: GPUs read its per-layer embeddings from host memory, where they take ",
                  text(wanted), " for ", ranks, " ranks, and ", text(free_bytes),
                  " are free. Take a smaller tensor_para_size, or free memory"));
}

PerKind<int> blocks_by_kind(const EngineConfig& config, const CacheMemory& memory, int full_blocks) {
  PerKind<int> out{.full = full_blocks};
  if (memory.window == 0 && memory.block_bytes.state == 0) return out;
  require_step_sizes(config);
  if (memory.window > 0) out.window = window_blocks(config, memory.window, full_blocks);
  if (memory.block_bytes.state > 0) out.state = num_states(config, memory, full_blocks);
  return out;
}


int blocks_that_fit(const EngineConfig& config, const CacheMemory& memory) {
  const auto asked = blocks_asked_for(config, memory);
  const auto most = most_blocks(config, memory, memory.free_bytes);
  const auto one = one_block_each(memory.block_bytes);
  if (asked.blocks >= 1 && asked.blocks <= std::min<std::int64_t>(most, std::numeric_limits<int>::max())) {
    return static_cast<int>(asked.blocks);
  }
  if (asked.blocks < 1) {
    throw Error(ErrorCode::resource_exhausted,
                cat("the KV cache holds no block: ", asked.setting, " is less than one of ", text(one),
                    memory.ranks > 1 ? cat(" on each of ", memory.ranks, " ranks") : "", " (", text(memory.free_bytes),
                    " are free beside the model). ", asked.remedy, ", or free memory"));
  }
  const auto full = static_cast<int>(std::min<std::int64_t>(asked.blocks, std::numeric_limits<int>::max()));
  const auto others = blocks_by_kind(config, memory, full);
  std::string also;
  if (others.window > 0) also += cat(" and ", others.window, " window blocks of ", text(memory.block_bytes.window));
  if (others.state > 0) also += cat(" and ", others.state, " states of ", text(memory.block_bytes.state));
  throw Error(ErrorCode::resource_exhausted,
              cat("the KV cache does not fit: ", asked.setting, " takes ", asked.blocks, " blocks of ",
                  text(memory.block_bytes.full), also, " each, and the ", text(memory.free_bytes),
                  " that are free beside the model hold ", most, ". ", asked.remedy, ", or free memory"));
}

Error DraftPlan::name(const Error& error) const {
  return {error.code(), is_mtp() ? cat("speculative_method = ", method->name, ": ", error.what())
                                 : cat("speculative_model = ", weights_dir.string(), ": ", error.what())};
}

namespace {

// One rank on the device of the engine's first rank, without adapters.
void place_draft(EngineConfig& config, const EngineConfig& engine) {
  config.device = engine.device;
  config.device_ids = engine.device_ids.substr(0, engine.device_ids.find(','));
  config.reproducible = engine.reproducible;
  config.cuda_graphs = engine.cuda_graphs;
  config.threads = engine.threads;
  config.lora_adapters = {};
  config.lora_device_adapters = 0;
}

// The settings of the draft model come from its own config.ini, except sizes that depend on the engine.
ResolvedSettings draft_settings(const EngineConfig& engine, const std::filesystem::path& weights_dir) {
  auto out = read_settings(weights_dir, {{"device", engine.device},
                                         {"tensor_para_size", "1"},
                                         {"speculative_method", "off"},
                                         {"speculative_model", ""},
                                         {"cache_size", ""},
                                         {"cache_users", "0"},
                                         {"cache_chunk_size", "-1"},
                                         {"quant_policy", "0"}});
  auto& config = out.config;
  place_draft(config, engine);
  config.session_len = std::min(config.session_len, engine.session_len);
  config.max_batch_size = engine.max_batch_size;
  config.token_budget = std::max(kMostDraftRows, engine.max_batch_size);
  config.enable_prefix_caching = engine.enable_prefix_caching;
  config.cache_block_seq_len = engine.cache_block_seq_len;
  config.cache_user_tokens = engine.cache_block_seq_len;  // so that each block has a window block
  if (out.model.model_task != "generate") {
    throw Error(ErrorCode::unsupported, cat("it is a model for task = ", out.model.model_task,
                                            ", and a draft model must generate text"));
  }
  return out;
}

// Memory of the model, with one KV block, where the draft model is: of all ranks on the CPU, or of the first one.
std::size_t least_memory(const EngineConfig& engine, const ModelConfig& model, const model::Manifest& manifest) {
  const auto rules = rules_of(engine.device);
  std::size_t out = 0;
  for (int rank = 0; rank < (engine.device == "cpu" ? engine.tensor_para_size : 1); ++rank) {
    const model::Shard shard(model, manifest, rank);
    auto needs = rank_memory(engine.device, rules, model, manifest, shard, step_limits(engine, model), engine);
    count_adapter_slots(needs, rules, engine, model, manifest, rank);
    out += needs.all_but_cache() + one_block_each(needs.kv_block);
  }
  return out;
}

// Whether the model has recurrent layers.
bool has_states(const model::Manifest& manifest) {
  return std::ranges::any_of(manifest.layers(), [](const auto& layer) { return layer.mixer != "attention"; });
}

// Throws Error(unsupported) if the model cannot have proposals of a layer that reads its hidden states.
void check_layer(const DraftPlan& plan, const EngineConfig& engine, const ModelConfig& model,
                 const model::Manifest& manifest) {
  auto why = speculation_obstacle(engine, model);
  if (why.empty() && plan.is_mtp() && !manifest.has_mtp()) {
    why = cat("the weights in ", manifest.dir().string(), " have no MTP layer: convert a checkpoint that has one again, "
              "with: charonia convert MODEL --speculative-method mtp");
  } else if (why.empty() && plan.is_mtp() && has_states(*manifest.mtp())) {
    why = "the MTP layer is recurrent, and only layers with attention are supported: serve another model";
  }
  if (why.empty()) return;
  throw Error(ErrorCode::unsupported, cat("speculative_method = ", plan.method->name, ": ", why,
                                          ", or choose another speculative_method"));
}

// The weights folder that speculative_model names: itself, or of a workspace.
std::filesystem::path draft_dir(const EngineConfig& engine) {
  std::filesystem::path out = engine.speculative_model;
  std::error_code ignored;  // reading it will say more
  const auto inside = out / "triton_models" / "weights";
  return exists(inside, ignored) ? inside : out;
}

// Throws Error(unsupported) if a head, or a draft model, does not belong to the model. files: of `draft`.
void check_draft(const SpeculativeMethod& method, const ModelConfig& draft, const model::Manifest& files,
                 const ModelConfig& model) {
  const auto refuse_if = [](bool wrong, const auto&... why) {
    if (wrong) throw Error(ErrorCode::unsupported, cat(why...));
  };
  const bool head = model::is_head(draft);
  refuse_if(head && !method.reads_hidden, "it is an EAGLE-3 head: set speculative_method = eagle3");
  refuse_if(!head && method.reads_hidden, "it is a model, and no EAGLE-3 head: set speculative_method = draft_model");
  refuse_if(has_states(files),
            "a draft model with recurrent layers is not supported, because their state cannot be taken back to "
            "the last accepted token: choose another draft model, or speculative_method = ngram");
  if (!head) return;
  constexpr auto kOther = ": choose the head that was trained for this model";
  refuse_if(draft.target_hidden_units != model.hidden_units, "it is for models with hidden_units = ",
            draft.target_hidden_units, ", and the model has ", model.hidden_units, kOther);
  refuse_if(draft.vocab_size != model.vocab_size, "it is for models with vocab_size = ", draft.vocab_size,
            ", and the model has ", model.vocab_size, kOther);
  const bool embeds = files.tensors().contains("tok_embeddings.weight");
  refuse_if(!embeds && draft.hidden_units != model.hidden_units, "it has no embedding, and its hidden_units = ",
            draft.hidden_units, " differ from the model's ", model.hidden_units, kOther);
}

// The warning that a head names another model; empty if the names agree. A copy of the model may have an ending.
std::string target_warning(const ModelConfig& head, const ModelConfig& model) {
  const std::string_view all = head.target_model, name = all.substr(all.find_last_of('/') + 1);
  const auto same = [](unsigned char a, unsigned char b) { return std::tolower(a) == std::tolower(b); };
  const auto begin = std::string_view(model.model_name).substr(0, name.size());
  if (std::ranges::equal(begin, name, same)) return {};
  return cat("speculative_model = ", head.model_name, " was trained for ", all, ", and the model is ", model.model_name,
             ". If this is another model, few proposals are accepted: choose the head that was trained for it");
}

// The layers of the model whose inputs the head reads; their number stands for the output of the last one. Throws
// Error(unsupported) if the model does not have them.
std::vector<int> layers_for(const ModelConfig& head, const ModelConfig& model) {
  const int count = model.num_layer;
  auto out = head.target_layers;
  if (out.empty()) out = {2, count / 2, count - 3};
  for (const int layer : out) {
    if (layer >= 0 && layer <= count) continue;
    if (head.target_layers.empty()) {
      throw Error(ErrorCode::unsupported,
                  cat("its config.json has no eagle_aux_hidden_state_layer_ids, and the usual layers 2, n / 2 and n - 3 "
                      "need a model of 3 layers or more, not ", count, ": write the layers into config.json"));
    }
    throw Error(ErrorCode::unsupported, cat("it reads the input of layer ", layer, ", and the model has ", count,
                                            " layers: choose the head that was trained for this model"));
  }
  return out;
}

// The MTP layer has the model's attributes.
ModelConfig mtp_model(const ModelConfig& model) {
  auto out = model;
  out.num_layer = 1;
  out.tie_word_embeddings = false;
  return out;
}

EngineConfig mtp_config(const EngineConfig& engine) {
  auto out = engine;
  place_draft(out, engine);
  out.cache_size = {};
  out.cache_users = 0;
  out.cache_chunk_size = -1;
  out.cache_user_tokens = engine.cache_block_seq_len;  // so that each block has a window block
  out.quant_policy = 0;
  return out;
}

// Plans the memory of out.model, whose manifest is `files`. quantised: the engine's model is.
void plan_draft_memory(DraftPlan& out, const model::Manifest& files, std::size_t of_model, bool quantised,
                       std::size_t free_bytes) {
  auto& config = out.config;
  const model::Shard shard(out.model, files, 0);
  const bool layer = out.method->reads_hidden;
  const auto limits = layer ? layer_limits(config, out.model) : step_limits(config, out.model);
  auto needs = rank_memory(config.device, rules_of(config.device), out.model, files, shard, limits, config);
  // The layer uses the model's output layer.
  if (config.device == "cuda" && out.is_mtp() && quantised) needs.loaded_steps = cuda::kDequantisedBytes;
  check_model_fits(config, config.device, needs, free_bytes);
  const auto taken = needs.all_but_cache() + of_model;
  const CacheMemory memory{needs.kv_block, needs.window, free_bytes - std::min(free_bytes, taken)};
  constexpr int kSequences = 16;
  const auto sequences = layer ? config.max_batch_size : std::min(kSequences, config.max_batch_size);
  const auto wanted = std::max(blocks_of(config, config.session_len),
                               sequences * blocks_of(config, std::min(kShortChatTokens, config.session_len)));
  config.cache_max_entry_count = 1;  // blocks, while the number is not known
  const auto blocks = static_cast<int>(
      std::max<std::int64_t>(1, std::min(wanted, most_blocks(config, memory, memory.free_bytes / 4))));
  config.cache_max_entry_count = blocks;
  out.bytes = needs.all_but_cache() + static_cast<std::size_t>(cache_bytes(config, memory, blocks));
}

}  // namespace

model::Manifest manifest_of(const std::filesystem::path& weights_dir, const EngineConfig& config,
                            const ModelConfig& model) {
  model::Manifest out(weights_dir, config.tensor_para_size);
  if (config.speculative_method != "mtp") out.drop_mtp();
  if (config.speculative_method != "eagle3") return out;
  DraftPlan head;
  head.weights_dir = draft_dir(config);
  head.method = &method_of(config);
  try {
    const auto found = read_settings(head.weights_dir, {{"speculative_method", "off"}}).model;
    if (model::is_head(found)) out.keep_layers(layers_for(found, model));  // otherwise plan_draft() rejects it
  } catch (const Error& error) {
    throw head.name(error);
  }
  return out;
}

void check_is_model(const ModelConfig& model) {
  if (!model::is_head(model)) return;
  throw Error(ErrorCode::unsupported,
              cat(model.model_name, " is an EAGLE-3 head, and no model: serve the model that it was trained for, with "
                  "speculative_method = eagle3, and name the head in speculative_model"));
}

std::vector<std::size_t> free_memory(const DeviceChoice& choice, int ranks, std::int64_t memory_bytes) {
  const auto count = static_cast<std::size_t>(ranks);
  if (choice.device != "cuda") {
    const auto all = memory_bytes > 0 ? static_cast<std::size_t>(memory_bytes) : ops::make_cpu_ops(1)->free_memory();
    return std::vector<std::size_t>(count, all / count);
  }
  if (memory_bytes > 0) return std::vector<std::size_t>(count, static_cast<std::size_t>(memory_bytes));
  std::map<int, std::size_t> of_gpu;
  std::string why;
  for (const auto& gpu : ops::cuda_devices(why)) of_gpu[gpu.index] = gpu.free_bytes;
  std::vector<std::size_t> out;
  for (const int gpu : choice.gpus) {
    out.push_back(of_gpu[gpu] / static_cast<std::size_t>(std::ranges::count(choice.gpus, gpu)));
  }
  return out;
}

std::size_t free_for_draft(std::string_view device, std::span<const std::size_t> free_of_ranks) {
  if (device == "cuda") return free_of_ranks.front();
  return std::accumulate(free_of_ranks.begin(), free_of_ranks.end(), std::size_t{0});
}

std::size_t draft_share(std::size_t bytes, std::string_view device, int rank, int ranks) {
  if (device == "cuda") return rank == 0 ? bytes : 0;
  return bytes / static_cast<std::size_t>(ranks);
}

std::optional<DraftPlan> plan_draft(const EngineConfig& engine, const ModelConfig& model,
                                    const model::Manifest& manifest, std::size_t free_bytes) {
  DraftPlan out;
  out.method = &method_of(engine);
  if (!out.method->has_drafts()) return std::nullopt;
  if (out.method->reads_hidden) check_layer(out, engine, model, manifest);
  if (!speculates(engine, model)) return std::nullopt;
  try {
    auto& config = out.config;
    std::optional<model::Manifest> files;
    if (out.is_mtp()) {
      out.weights_dir = manifest.dir();
      out.model = mtp_model(model);
      config = mtp_config(engine);
      files = manifest.mtp();
    } else {
      out.weights_dir = draft_dir(engine);
      auto settings = draft_settings(engine, out.weights_dir);
      out.model = settings.model;
      config = std::move(settings.config);
      files.emplace(out.weights_dir, 1);
      files->drop_mtp();
      check_draft(*out.method, out.model, *files, model);
      out.warning = target_warning(out.model, model);
    }
    if (out.method->reads_hidden) config.token_budget = std::max(engine.token_budget, engine.max_batch_size);
    const auto unrounded = out.model;
    model::round_weights(out.model, *files, config.quantization);
    const bool quantised = manifest.elements(0, model.normalize_output).quantised_bytes > 0;
    plan_draft_memory(out, *files, least_memory(engine, model, manifest), quantised, free_bytes);
    out.model = unrounded;  // Executor rounds it
  } catch (const Error& error) {
    throw out.name(error);
  }
  return out;
}

int blocks_per_chunk(int cache_chunk_size, int num_blocks) {
  if (cache_chunk_size < 0) return num_blocks;
  if (cache_chunk_size > 0) return std::min(cache_chunk_size, num_blocks);
  return static_cast<int>(std::ceil(std::sqrt(static_cast<double>(num_blocks))));
}

}  // namespace charonia::runtime

namespace charonia {
namespace {

using runtime::DeviceChoice;

constexpr std::int64_t kUnknown = std::int64_t{1} << 62;  // memory of another machine

DeviceChoice choose(const EngineConfig& config, std::int64_t memory_bytes) {
  if (memory_bytes > 0 && config.device == "cuda") return {.device = "cuda", .gpus = {}, .note = {}};
  try {
    return runtime::choose_devices(config);
  } catch (const Error& error) {
    throw Error(error.code(), cat(error.what(),
                                  ". To plan for GPUs that are elsewhere, name the memory of one "
                                  "(charonia plan --device cuda --memory 80GiB)"));
  }
}

// The memory that the model, its draft model and its KV cache leave.
std::int64_t left_bytes(const MemoryPlan& plan) {
  return plan.free_bytes - plan.weight_bytes - plan.activation_bytes - plan.speculative_bytes -
         plan.num_blocks * plan.kv_block_bytes - plan.num_window_blocks * plan.kv_window_block_bytes -
         plan.num_states * plan.state_bytes;
}

// The last warning of a plan without blocks says why.
void refuse(MemoryPlan& plan, std::string warning) {
  plan.warnings.push_back(std::move(warning));
  plan.num_blocks = plan.num_window_blocks = plan.num_states = 0;
}

void refuse_unless(MemoryPlan& plan, const auto& check) {
  try {
    check();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::resource_exhausted) throw;
    refuse(plan, error.what());
  }
}

// host_bytes: the free memory of the host, if it is not the memory of the model.
void count_offload(MemoryPlan& plan, std::int64_t host_bytes) {
  if (plan.config.kv_offload_path.empty() && plan.config.kv_offload_memory.empty()) return;
  plan.offload_bytes = parse_bytes(plan.config.kv_offload_memory).value_or(0);
  if (plan.num_blocks == 0) return;  // the last warning says why
  const auto left = plan.device == "cpu" ? left_bytes(plan) : host_bytes - plan.host_bytes;
  refuse_unless(plan, [&] { runtime::check_offload(plan.config, plan.device, left, plan.warnings); });
}

// The draft model or MTP layer. Returns false, with a warning, if it does not fit. Throws the errors of plan_draft().
bool count_draft(MemoryPlan& plan, const model::Manifest& manifest, std::size_t free_bytes) {
  try {
    const auto draft = runtime::plan_draft(plan.config, plan.model, manifest, free_bytes);
    if (!draft) return true;
    plan.speculative_bytes = static_cast<std::int64_t>(draft->bytes);
    if (!draft->warning.empty()) plan.warnings.push_back(draft->warning);
    // Models that are not converted yet have no table.
    const auto table = manifest.dir() / "token_table.safetensors";
    if (!draft->method->reads_hidden && exists(table) && exists(draft->weights_dir / table.filename())) {
      runtime::check_vocabulary(*draft, text::TokenTable::load(table));
    }
  } catch (const Error& error) {
    if (error.code() != ErrorCode::resource_exhausted) throw;
    plan.warnings.push_back(error.what());
    return false;
  }
  return true;
}

// The engine loads them after it has reserved the memory of the cache. A GPU has slots for some of them, which
// plan.adapter_bytes already has; all are in host memory. host_bytes: as in count_offload().
void count_adapters(MemoryPlan& plan, const model::Manifest& manifest, const model::DeviceRules& rules,
                    std::int64_t host_bytes) {
  const auto type = rules.precision(model::data_type(plan.model)).activation;
  const bool in_host_memory = plan.device == "cuda";
  const auto of_ranks = runtime::adapter_bytes(plan.config, plan.model.model_name, manifest.modules(), type);
  const auto bytes = static_cast<std::int64_t>(std::accumulate(of_ranks.begin(), of_ranks.end(), std::size_t{0}));
  const auto left = (in_host_memory ? host_bytes - plan.host_bytes : left_bytes(plan)) - plan.offload_bytes;
  (in_host_memory ? plan.host_bytes : plan.adapter_bytes) += bytes;
  if (plan.num_blocks == 0 || bytes <= left) return;
  if (in_host_memory) {
    return refuse_unless(plan, [&] { runtime::check_host_memory(plan.config, bytes, left); });
  }
  refuse(plan, cat("the LoRA adapters do not fit: they take ", bytes_text(bytes), ", and ", bytes_text(left),
                   " are free beside the model, ", plan.speculative_bytes > 0 ? "its draft model, " : "",
                   "and its KV cache. Leave an adapter out, lower cache_max_entry_count, or free memory"));
}

}  // namespace

MemoryPlan plan_memory(const std::filesystem::path& weights_dir, const Settings& overrides, std::int64_t memory_bytes) {
  auto settings = runtime::read_settings(weights_dir, overrides);
  MemoryPlan out;
  out.model = std::move(settings.model);
  out.config = std::move(settings.config);
  out.warnings = std::move(settings.warnings);
  const auto& config = out.config;
  runtime::check_is_model(out.model);
  auto manifest = runtime::manifest_of(weights_dir, config, out.model);
  model::round_weights(out.model, manifest, config.quantization);
  if (!manifest.files().empty()) {
    const model::WeightFiles checked(manifest);
  }
  const auto choice = choose(config, memory_bytes);
  out.device = out.config.device = choice.device;
  out.device_note = choice.note;

  const auto rules = runtime::rules_of(out.device);
  const int ranks = config.tensor_para_size;
  const auto free = runtime::free_memory(choice, ranks, memory_bytes);
  const int sms = memory_bytes > 0 ? runtime::kUsualSms : runtime::sms_of(choice.gpus);
  runtime::resolve_step_sizes(out.config, {out.device, sms, *std::ranges::min_element(free)});
  if (auto warning = runtime::resolve_adapter_slots(out.config, manifest.modules()); !warning.empty()) {
    out.warnings.push_back(std::move(warning));
  }
  if (auto warning = runtime::dequantised_warning(out.device, out.model, manifest); !warning.empty()) {
    out.warnings.push_back(std::move(warning));
  }
  const auto limits = runtime::step_limits(config, out.model);
  if (auto why = runtime::speculation_warning(config, out.model); !why.empty()) {
    out.warnings.push_back(std::move(why));
  }
  const int proposals = runtime::most_proposals(config, out.model);
  int blocks = std::numeric_limits<int>::max();
  if (!count_draft(out, manifest, runtime::free_for_draft(out.device, free))) blocks = 0;
  PerKind<std::int64_t> kv_block;
  for (int rank = 0; rank < ranks; ++rank) {
    const model::Shard shard(out.model, manifest, rank);
    auto needs = runtime::rank_memory(out.device, rules, out.model, manifest, shard, limits, config);
    runtime::count_adapter_slots(needs, rules, config, out.model, manifest, rank);
    out.adapter_bytes += static_cast<std::int64_t>(needs.adapters);
    const auto all_free = free[static_cast<std::size_t>(rank)];
    const auto draft =
        runtime::draft_share(static_cast<std::size_t>(out.speculative_bytes), out.device, rank, ranks);
    const auto free_bytes = all_free - std::min(all_free, draft);
    out.weight_bytes += static_cast<std::int64_t>(needs.weights);
    out.host_bytes += static_cast<std::int64_t>(needs.host);
    out.activation_bytes += static_cast<std::int64_t>(needs.all_but_cache() - needs.weights - needs.adapters);
    for (const auto kind : kCacheKinds) kv_block[kind] += static_cast<std::int64_t>(needs.kv_block[kind]);
    out.window = needs.window;
    out.free_bytes += static_cast<std::int64_t>(all_free);
    if (blocks == 0) continue;  // one rank's warning is enough
    try {
      runtime::check_model_fits(config, out.device, needs, free_bytes, draft);
      if (memory_bytes == 0) runtime::check_host_memory(needs, ranks, ops::cpu::free_memory());
      const auto left = free_bytes - needs.all_but_cache();
      blocks = std::min(blocks, runtime::blocks_that_fit(
                                    config, {needs.kv_block, needs.window, left, ranks, proposals}));
    } catch (const Error& error) {
      out.warnings.push_back(ranks > 1 ? cat("rank ", rank, ": ", error.what()) : error.what());
      blocks = 0;
    }
  }
  runtime::CacheMemory memory{.window = out.window, .proposals = proposals};
  for (const auto kind : kCacheKinds) memory.block_bytes[kind] = static_cast<std::size_t>(kv_block[kind] / ranks);
  const auto num_blocks = runtime::blocks_by_kind(config, memory, blocks);
  out.num_blocks = num_blocks.full;
  out.num_window_blocks = num_blocks.window;
  out.num_states = num_blocks.state;
  out.kv_block_bytes = kv_block.full;
  out.kv_window_block_bytes = kv_block.window;
  out.state_bytes = kv_block.state;
  out.kv_token_bytes = (kv_block.full + kv_block.window) / config.cache_block_seq_len;
  const auto host_bytes = memory_bytes == 0 ? static_cast<std::int64_t>(ops::cpu::free_memory()) : kUnknown;
  count_offload(out, host_bytes);
  count_adapters(out, manifest, rules, host_bytes);
  return out;
}

}  // namespace charonia
