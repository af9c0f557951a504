#include "model/decoder.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/safetensors.h"
#include "base/text.h"
#include "charonia/error.h"
#include "model/layers.h"

namespace charonia::model {

namespace {

// Reads the tokens of the rows of a head's output layer. Returns the row of each token; -1: none.
std::vector<std::int32_t> draft_columns(const ModelConfig& config, const std::filesystem::path& dir) {
  const auto file = SafetensorsFile::open(dir / "draft_tokens.safetensors");
  const auto tensor = file.tensor("tokens");
  std::vector<std::int64_t> tokens(tensor.data.size() / sizeof(std::int64_t));
  if (tensor.dtype == DType::i64) std::memcpy(tokens.data(), tensor.data.data(), tensor.data.size());
  const auto wrong = [&](std::int64_t token) { return token < 0 || token >= config.vocab_size; };
  if (tensor.dtype != DType::i64 || std::ssize(tokens) != config.draft_vocab_size ||
      std::ranges::any_of(tokens, wrong)) {
    throw Error(ErrorCode::invalid_argument,
                cat(file.path().string(), " must have ", config.draft_vocab_size, " tokens (draft_vocab_size) below ",
                    config.vocab_size, " (vocab_size), of type I64: download or convert the head again"));
  }
  std::vector<std::int32_t> columns(static_cast<std::size_t>(config.vocab_size), -1);
  for (std::size_t row = 0; row < tokens.size(); ++row) {
    columns[static_cast<std::size_t>(tokens[row])] = static_cast<std::int32_t>(row);
  }
  return columns;
}

}  // namespace

Decoder::Decoder(const ModelConfig& config, const WeightFiles& files, ops::Ops& ops, const ops::StepLimits& limits,
                 const Decoder* main)
    : plan_(config, files.manifest().layers(), Shard(config, files.manifest(), ops.rank()), rules_of(ops), limits),
      config_(plan_.config),
      shard_(plan_.shard),
      ops_(ops),
      limits_(limits),
      main_(main),
      embedding_scale_(rounded(config.embedding_scale, plan_.precision.weight)),
      rotary_tables_(config, limits.max_positions, limits.max_rows) {
  make_tables();
  load(files);
  activation_memory_ = ops_.allocate(plan_.activation_bytes);
}

void Decoder::make_tables() {
  const auto on_device = [this](std::span<const float> values) { return ops_.copy_of(values); };
  if (rotary_tables_.rows() > 0) {
    tables_.rotary = on_device(rotary_tables_.global_table());
    if (rotary_tables_.has_local()) tables_.local_rotary = on_device(rotary_tables_.local_table());
  }
  if (has_q_scales(config_)) tables_.q_scales = on_device(q_scales(config_, limits_.max_positions));
  if (config_.alibi) {
    const auto all = alibi_slopes(config_.head_num);
    tables_.slopes = on_device(std::span(all).subspan(static_cast<std::size_t>(shard_.rank * shard_.heads),
                                                      static_cast<std::size_t>(shard_.heads)));
  }
}

void Decoder::load(const WeightFiles& files) {
  const std::int64_t hidden = config_.hidden_units;
  const auto type = plan_.precision.weight;
  WeightLoader loader(files, ops_, type, config_.norm_unit_offset, tables_);
  loader.fp8_cache = plan_.kv_layout.quant_bits == ops::kKvFp8;
  for (const auto& part : plan_.parts) {
    auto& norms = norms_.emplace_back();
    const bool joined = is_head(config_) && norms_.size() == 1;  // the attention of a head reads other norms
    const bool pre_norm = config_.pre_norms && part.pre_norm && !part.same_input && !joined;
    if (pre_norm) norms.before = loader.norm(part.name + "_norm.weight", hidden);
    if (config_.post_norms) norms.after = loader.norm(part.name + "_post_norm.weight", hidden);
    if (!part.scalar.empty()) norms.scale = files.get_vector(part.scalar, 1).front();
    part.block->load(loader);
    if (part.block->cache()) ++loader.cache_layer;
    files.drop_pages();  // otherwise the weights would be in this process's memory twice until all are loaded
  }
  if (config_.per_layer_embedding > 0) {
    per_layer_.emplace(config_, plan_.per_layer_inputs);
    per_layer_->load(loader);
  }
  final_norm_ = loader.norm("norm.weight", hidden);
  if (main_ != nullptr) {
    embedding_norm_ = loader.norm("enorm.weight", hidden);
    hidden_norm_ = loader.norm("hnorm.weight", hidden);
    const auto fused = plan_.fused.cols;  // 0 in an MTP layer
    if (config_.fused_norm != "none") fused_norm_ = loader.norm("fused_norm.weight", fused);
    joined_ = fused > 0 ? loader.linear({{{"fc.weight", hidden, fused}}}, {})
                        : loader.linear({{{"eh_proj.weight", hidden, 2 * hidden}}}, {});
  }
  places_ = std::move(loader.places);
  slot_weights_ = slot_weights(places_);
  if (!shard_.is_mtp) load_ends(files, loader);
  if (is_head(config_)) {
    const auto columns = draft_columns(config_, files.manifest().dir());
    draft_columns_ = ops_.copy_of(std::span(columns));
  }
  if (shard_.is_mtp) ops_.share_linear(*output());
  files.drop_pages();
  weight_bytes_ = loader.bytes;
  weight_bytes_per_step_ = loader.bytes_per_step;
}

// Loads the output layer and the embedding.
void Decoder::load_ends(const WeightFiles& files, WeightLoader& loader) {
  const std::int64_t hidden = config_.hidden_units;
  const int output_rank = pools(config_) ? 0 : shard_.rank;
  const WeightLoader::Wanted output{cat("output.", output_rank, ".weight"), shard_.logits, hidden};
  if (config_.model_task == "embed") {
    output_ = nullptr;
  } else if (config_.normalize_output) {
    output_ = loader.dense_linear({{loader.unit_rows(output).matrix()}});
  } else {
    output_ = loader.linear({{output}}, {});
  }
  files.drop_pages();
  if (is_head(config_) && !files.has("tok_embeddings.weight")) return;
  embedding_ = shares_embedding(config_, files.manifest(), ops_.device())
                   ? ops_.make_embedding(*output_)
                   : loader.embedding({"tok_embeddings.weight", config_.vocab_size, hidden});
}

void Decoder::prepare(ops::KvCache& cache) {
  cache_ = &cache;
  issue_ = [this](const ops::StepShape& shape) { issue(shape); };
  ops_.prepare(limits_, issue_);
}

std::unique_ptr<Adapter> Decoder::make_adapter(const AdapterFiles& files, const Modules& modules) const {
  return std::make_unique<Adapter>(files, adapted_weights(modules), ops_);
}

std::size_t Decoder::adapter_bytes(const AdapterFiles& files, const Modules& modules) const {
  return Adapter::bytes_of(files, adapted_weights(modules));
}

AdaptedWeights Decoder::adapted_weights(const Modules& modules) const {
  return {modules, places_, ops_.has_adapter_slots() ? &slot_weights_ : nullptr, shard_.rank,
          plan_.precision.activation};
}

void Decoder::make_adapter_slots(const Modules& modules, int count, int max_rank) {
  ops_.make_adapter_slots(Adapter::slots_of(adapted_weights(modules), count, max_rank));
  in_slots_.assign(static_cast<std::size_t>(count), 0);
}

// Copies the step's adapters to their slots, if they are not there.
void Decoder::fill_slots(std::span<const std::int32_t> slots, std::span<const Adapter* const> adapters) {
  for (std::size_t s = 0; s < slots.size(); ++s) {
    if (slots[s] < 0) continue;
    auto& in_slot = in_slots_.at(static_cast<std::size_t>(slots[s]));
    if (in_slot == adapters[s]->id()) continue;
    ops_.fill_adapter_slot(slots[s], adapters[s]->image());
    in_slot = adapters[s]->id();
  }
}

void Decoder::group_rows(const ops::StepInput& input, std::span<const Adapter* const> adapters) {
  adapters_.clear();
  const auto& starts = input.attention.query_start;
  for (std::size_t s = 0; s < adapters.size(); ++s) {
    if (adapters[s] == nullptr) continue;
    auto group = std::ranges::find(adapters_, adapters[s], &AdapterRows::adapter);
    if (group == adapters_.end()) group = adapters_.insert(group, {adapters[s], {}});
    for (auto row = starts[s]; row < starts[s + 1]; ++row) group->rows.push_back(row);
  }
}

void Decoder::launch(const ops::StepInput& input, std::span<const Adapter* const> adapters) {
  if (ops_.has_adapter_slots()) {
    fill_slots(input.adapters, adapters);
  } else {
    group_rows(input, adapters);
  }
  auto step = input;
  if (rotary_tables_.by_prompt()) step.attention.rotary_rows = rotary_rows(input);
  ops_.begin_step(step);
  if (!input.block_copies.empty()) ops_.copy_blocks(*cache_, input.block_copies);
  ops_.run_step(issue_);
}

// Also writes the spare rows of the tables. The write is ordered after earlier steps, which read them.
std::span<const std::int32_t> Decoder::rotary_rows(const ops::StepInput& input) {
  auto& rows = rotary_rows_[rotary_rows_index_];
  rotary_rows_index_ = (rotary_rows_index_ + 1) % rotary_rows_.size();
  rotary_tables_.place(input.attention, input.prompt_tokens, rows, spare_);
  const auto upload = [&](const Vector& table, std::span<const float> values, int dim) {
    if (values.empty()) return;
    ops_.upload(table->as<float>() + spare_.first_row * dim, values.data(), values.size_bytes());
  };
  upload(tables_.rotary, spare_.global, config_.rotary_embedding);
  upload(tables_.local_rotary, spare_.local, local_rotary_dim(config_));
  return rows;
}

void Decoder::issue(const ops::StepShape& shape) {
  StepContext step{ops_, shape, *cache_, activation_memory_->as<std::byte>()};
  const auto residual = step.view(plan_.residual), delta = step.view(plan_.delta), normed = step.view(plan_.normed);
  const ops::Tensor unwritten{nullptr, normed.dtype, normed.rows, normed.cols, normed.stride};
  step.residual = residual;
  step.adapters = adapters_;
  step.slot_weights = &slot_weights_;
  if (main_ != nullptr) load_previous(step);  // of a head: from the residual stream of the last step
  ops_.embed(residual, embedding(), embedding_scale_);
  const bool head = is_head(config_);
  if (head) {
    issue_head_input(step, residual);
  } else if (main_ != nullptr) {
    issue_joined(step, residual);
  }
  if (per_layer_) {
    ops_.rms_norm(normed, residual, {}, norm_params(nullptr, nullptr));
    per_layer_->issue(step, normed);
  }
  ops::Tensor pending{};  // the tensor that the next norm adds to the residual stream
  const Norms* pending_norms = nullptr;
  for (std::size_t i = 0; i < plan_.parts.size(); ++i) {
    const auto& part = plan_.parts[i];
    const auto& norms = norms_[i];
    // In a parallel block, several weights read the norm's output.
    const auto* const weight = part.block->input_weight();
    const bool joined = head && i == 0;
    // Between the norm and the weight, keep_input() is another norm.
    const bool first = i == 0 || plan_.parts[i - 1].layer != part.layer;
    const bool kept = first && std::ranges::count(shard_.kept_layers, static_cast<int>(part.layer)) > 0;
    if (weight != nullptr && !config_.parallel_block && !joined && !kept) step.announce_linear(*weight);
    if (!joined) {
      ops_.rms_norm(part.same_input ? unwritten : normed, residual, pending,
                    norm_params(data(norms.before), pending_norms));
    }
    if (first) keep_input(step, static_cast<int>(part.layer));
    part.block->issue(step, delta, joined ? step.view(plan_.joined) : normed);
    if (!part.block->whole_output()) step.sum_ranks(delta);
    pending = delta;
    pending_norms = &norms;
  }
  if (shape.logits_rows > 0) issue_output(step, *pending_norms);
  if (shard_.keeps_hidden || config_.norm_output) {  // two steps, because `pending` may have another type
    ops_.rms_norm(unwritten, residual, pending, norm_params(nullptr, pending_norms));
    ops_.rms_norm(step.view(plan_.hidden), residual, {}, norm_params(data(final_norm_), nullptr));
  } else if (const auto& kept = shard_.kept_layers; head || std::ranges::count(kept, config_.num_layer) > 0) {
    ops_.rms_norm(unwritten, residual, pending, norm_params(nullptr, pending_norms));  // a head's plan_.hidden
    keep_input(step, config_.num_layer);
  }
  if (plan_.kept.cols > 0 && limits_.kept_hidden > 0) ops_.store_rows(kept(), step.view(plan_.hidden));
}

ops::Tensor Decoder::kept() const {
  const auto& [offset, dtype, cols] = plan_.kept;
  return {activation_memory_->as<std::byte>() + offset, dtype, limits_.kept_hidden, cols, cols};
}

// Loads the hidden states of the tokens before the rows of an MTP layer or a head.
void Decoder::load_previous(const StepContext& step) {
  const bool fuses = step.shape.reads_main && is_head(config_);
  ops_.load_rows(step.view(fuses ? plan_.states : plan_.previous),
                 step.shape.reads_main ? main_->kept() : step.view(plan_.hidden, limits_.max_rows));
}

// Keeps the residual stream before a layer, or after the last one, if a head reads it.
void Decoder::keep_input(const StepContext& step, int layer) {
  const std::int64_t hidden = config_.hidden_units;
  for (std::size_t i = 0; i < shard_.kept_layers.size(); ++i) {
    if (shard_.kept_layers[i] != layer) continue;
    const auto to = columns_of(step.view(plan_.hidden), static_cast<std::int64_t>(i) * hidden, hidden);
    ops_.rms_norm(to, step.residual, {}, {});  // a copy
  }
}

// Computes the residual stream and the input of a head's attention. `residual` has the embeddings.
void Decoder::issue_head_input(const StepContext& step, const ops::Tensor& residual) {
  const auto joined = step.view(plan_.joined), previous = step.view(plan_.previous);
  const std::int64_t hidden = config_.hidden_units;
  if (step.shape.reads_main) {
    const auto fused = step.view(plan_.fused), states = step.view(plan_.states);
    const auto parts = config_.fused_norm == "parts" ? kHeadLayers : 1;
    const auto size = fused.cols / parts;
    for (std::int64_t at = 0; at < fused.cols; at += size) {  // without a norm: a copy in the activation type
      const auto* const norm = fused_norm_ ? data(fused_norm_) + at : nullptr;
      ops_.rms_norm(columns_of(fused, at, size), columns_of(states, at, size), {}, norm_params(norm, nullptr));
    }
    ops_.linear(previous, fused, *joined_);
  }
  ops_.rms_norm(columns_of(joined, 0, hidden), residual, {}, norm_params(data(embedding_norm_), nullptr));
  ops_.rms_norm(columns_of(joined, hidden, hidden), previous, {}, norm_params(data(hidden_norm_), nullptr));
  const auto* const norm = config_.norm_before_residual ? data(hidden_norm_) : nullptr;
  ops_.rms_norm(residual, previous, {}, norm_params(norm, nullptr));
}

// Replaces the embeddings in the residual stream by the input of an MTP layer.
void Decoder::issue_joined(const StepContext& step, const ops::Tensor& residual) {
  const auto joined = step.view(plan_.joined);
  const std::int64_t hidden = config_.hidden_units;
  ops_.rms_norm(columns_of(joined, 0, hidden), residual, {}, norm_params(data(embedding_norm_), nullptr));
  ops_.rms_norm(columns_of(joined, hidden, hidden), step.view(plan_.previous), {},
                norm_params(data(hidden_norm_), nullptr));
  ops_.linear(residual, joined, *joined_);
}

void Decoder::issue_output(const StepContext& step, const Norms& pending_norms) {
  const auto rows = step.shape.logits_rows;
  const auto last_residual = step.view(plan_.last_residual, rows), last_delta = step.view(plan_.last_delta, rows);
  const auto last_normed = step.view(plan_.last_normed, rows);
  ops_.gather_rows(last_residual, step.view(plan_.residual));
  ops_.gather_rows(last_delta, step.view(plan_.delta));
  auto logits = step.view(plan_.logits, rows);
  if (output() == nullptr) {  // an embedding, in f32
    const ops::Tensor unwritten{nullptr, last_normed.dtype, rows, last_normed.cols, last_normed.stride};
    ops_.rms_norm(unwritten, last_residual, last_delta, norm_params(nullptr, &pending_norms));
    ops_.rms_norm(logits, last_residual, {}, norm_params(data(final_norm_), nullptr));
    return ops_.sample(logits);
  }
  ops_.announce_linear(*output());
  ops_.rms_norm(last_normed, last_residual, last_delta, norm_params(data(final_norm_), &pending_norms));
  if (is_head(config_)) {
    const auto drafts = step.view(plan_.logits_share, rows);
    ops_.linear(drafts, last_normed, *output());
    ops_.scatter_logits(logits, drafts, draft_columns_->as<std::int32_t>());
  } else if (shard_.ranks > 1 && !pools(config_)) {
    const auto share = step.view(plan_.logits_share, rows);
    auto mine = share;
    mine.cols = shard_.logits;
    ops_.linear(mine, last_normed, *output());
    ops_.all_gather(logits, share);
    logits.cols = config_.vocab_size;
  } else {
    ops_.linear(logits, last_normed, *output());
  }
  if (config_.logits_scale != 1 || config_.logit_soft_cap > 0) {
    ops_.scale_logits(logits, config_.logits_scale, config_.logit_soft_cap);
  }
  // Every rank samples. Equal logits give equal tokens, and the next step reads them from the rank's own memory.
  ops_.sample(logits);
}

ops::NormParams Decoder::norm_params(const float* weight, const Norms* pending) const {
  const float scale = pending == nullptr ? 1 : pending->scale;
  return {.weight = weight,
          .eps = config_.norm_eps,
          .delta_weight = pending == nullptr ? nullptr : data(pending->after),
          .delta_scale = scale * config_.residual_multiplier,
          .residual_scale = scale,
          .subtract_mean = config_.layer_norm};
}

}  // namespace charonia::model
