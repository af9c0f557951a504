// Preparation before the first step: collects facts about steps, allocates memory, measures GEMMs and captures graphs.
#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>

#include "base/text.h"
#include "charonia/error.h"
#include "ops/cuda/collectives/nccl.h"
#include "ops/cuda/cuda_ops.h"
#include "ops/cuda/gemm/dequantised_parts.h"
#include "ops/cuda/graph/decode_buckets.h"

namespace charonia::cuda {
namespace {

// Space for the histories and bans of a step's sampling without an allocation. Longer lists are rare, and allocate.
constexpr std::size_t kMaxListBytes = std::size_t{16} << 20;
constexpr std::size_t kMinListBytes = std::size_t{64} << 10;

}  // namespace

std::vector<std::string> CudaOps::report() const {
  auto lines = gemms_.report();
  const auto about = [](std::string_view steps, const std::vector<CapturedStep>& all) {
    std::string rows;
    for (const auto& captured : all) rows += cat(rows.empty() ? "" : ", ", captured.capacity.rows);
    return rows.empty() ? cat("no ", steps, " are captured: each kernel is launched separately")
                        : cat(steps, " are captured for ", rows, " rows");
  };
  std::vector first{cat("device ", device_.index, ": ", device_.name, ", sm_", device_.major, device_.minor, ", ",
                        device_.sms, " SMs; GEMMs: ", gemms_.library())};
  for (const auto kind : decode_kinds()) {
    first.push_back(about(cat("decode steps", kind.adapters || kind.proposals ? " with " : "",
                              kind.adapters ? "adapters" : "", kind.adapters && kind.proposals ? " and " : "",
                              kind.proposals ? "proposals" : "",
                              kind.reads_main ? " that read hidden states of the model" : ""),
                          captured_[kind.index()]));
  }
  lines.insert(lines.begin(), first.begin(), first.end());
  for (const auto* more : {&prompts_.report(), &decodes_.report(), &experts_.report()}) {
    lines.insert(lines.end(), more->begin(), more->end());
  }
  return lines;
}

std::vector<CudaOps::DecodeKind> CudaOps::decode_kinds() const {
  std::vector<DecodeKind> out;
  for (unsigned bits = 0; bits < captured_.size(); ++bits) {
    const DecodeKind kind{(bits & 1U) != 0, (bits & 2U) != 0, (bits & 4U) != 0};  // the reverse of index()
    if ((kind.adapters && adapter_slots_.count == 0) || (kind.proposals && !proposes_)) continue;
    if (!kind.reads_main || reads_main_) out.push_back(kind);
  }
  return out;
}

std::string CudaOps::warning() const {
  std::string all;
  for (const auto& one : {gemms_.warning(), prompts_.warning(), decodes_.warning(), experts_.warning()}) {
    if (all.find(one) == std::string::npos) all += cat(all.empty() ? "" : "; ", one);
  }
  return all;
}

void CudaOps::prepare(const ops::StepLimits& limits, const Issue& issue) {
  const OnDevice on(device_.index);
  set_step("the preparation of steps");
  ops::check_limits(limits);
  if (!in_flight_.empty()) throw Error(ErrorCode::internal, "ops::prepare: steps are in flight");
  weights_upload_.reset();
  prepared_ = false;
  begun_ = {};
  sampled_before_ = 0;
  for (auto& captured : captured_) captured.clear();
  trace(limits, issue);
  measure_gemms(limits);
  sampler_.reset();
  attention_.clear();
  wide_ = {};
  collective_ = {};
  experts_.prepare(stream_, trace_.experts, limits.max_rows, gemms_.seconds_left());
  choose_attention_kernels(limits);
  if (needs_.sampled_vocab > 0) sampler_ = std::make_unique<Sampler>(needs_.sampled_vocab, sampler_rows_);
  if (trace_.collective_bytes > 0) collective_ = DeviceMemory(trace_.collective_bytes, "the ranks' shards");
  make_adapter_workspace(limits);
  make_uploads(limits);
  if (options_.graphs && !needs_.attention.empty() && sampler_ && !waits_for_every_launch() &&
      (group_ == nullptr || group_->capturable())) {
    for (const auto kind : decode_kinds()) capture_steps(kind, limits, issue);
  }
  stream_.wait("the preparation of steps");
  begun_ = {};
  prepared_ = true;
}

// Calls `issue` for the largest step in a mode that issues nothing and records the arguments of operations: types and
// rows of GEMMs, the heads, the cache, the vocabulary.
void CudaOps::trace(const ops::StepLimits& limits, const Issue& issue) {
  needs_ = {};
  needs_.facts.max_rows = limits.max_rows;
  needs_.facts.max_sequences = limits.max_sequences;
  needs_.facts.max_positions = limits.max_positions;
  needs_.facts.max_logits_rows = limits.logits_rows();
  sampler_rows_ = 0;
  trace_ = {};
  tracing_ = true;
  try {
    issue({limits.max_rows, std::min(limits.max_rows, limits.logits_rows()), adapter_slots_.count > 0,
           limits.reads_hidden});
  } catch (...) {
    tracing_ = false;
    throw;
  }
  tracing_ = false;
  for (const auto first : trace_.attention) {
    auto& weights = trace_.weights.emplace_back();
    auto left = prefetch_setting();
    for (auto i = first; i < trace_.gemms.size() && left > 0; ++i) {
      const auto bytes = std::min(left, weight_bytes(trace_.gemms[i]));
      weights.emplace_back(static_cast<const std::byte*>(trace_.gemms[i].weight), bytes);
      left -= bytes;
    }
  }
  if (needs_.facts.block_len != 0 && limits.block_len != 0 && needs_.facts.block_len != limits.block_len) {
    throw Error(ErrorCode::internal, cat("ops::prepare: blocks have ", needs_.facts.block_len,
                                         " tokens in the cache, but ", limits.block_len, " in the limits"));
  }
}

void CudaOps::measure_gemms(const ops::StepLimits& limits) {
  auto& all = trace_.gemms;
  const auto key = [](const Gemm& gemm) {
    return std::tuple(gemm.rows, gemm.n, gemm.k, gemm.weight_stride, gemm.type, gemm.out_type, gemm.bias != nullptr,
                      gemm.gate, gemm.quant ? std::optional(gemm.quant->format) : std::nullopt);
  };
  std::stable_sort(all.begin(), all.end(), [&](const Gemm& a, const Gemm& b) { return key(a) < key(b); });
  all.erase(std::unique(all.begin(), all.end(), [&](const Gemm& a, const Gemm& b) { return key(a) == key(b); }),
            all.end());
  gemms_.prepare(stream_, all, limits.max_rows);
}

void CudaOps::choose_attention_kernels(const ops::StepLimits& limits) {
  for (std::size_t i = 0; i < trace_.layers.size(); ++i) trace_.layers[i].shape = needs_.attention[i];
  prompts_.prepare(stream_, trace_.layers, limits.max_rows, limits.max_positions);
  decodes_.prepare(stream_, trace_.layers, limits.max_sequences, limits.max_positions, prompts_.seconds_left());
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < trace_.layers.size(); ++i) {
    const auto& cache = trace_.layers[i].cache;
    if (!prompts_.chosen(i) || cache.quant_bits == 0) continue;
    const auto blocks = limits.max_sequences * divide_up(limits.max_positions, cache.block_len);
    bytes = std::max(bytes, wide_cache_bytes(blocks, dequantised(cache, nullptr).block_bytes()));
  }
  wide_ = DeviceMemory(bytes, "copies of blocks of the cache");
}

std::size_t CudaOps::wide_blocks(std::size_t plan) const {
  const auto& cache = trace_.layers[plan].cache;
  return wide_.bytes() / static_cast<std::size_t>(dequantised(cache, nullptr).block_bytes());
}

StepCapacity CudaOps::capacity_of(std::int64_t rows, std::int64_t logits_rows, std::int64_t sequences,
                                  bool proposals) const {
  return {.rows = rows,
          .logits_rows = logits_rows,
          .states = has_states() ? sequences : 0,
          .row_states = has_states() && proposals ? rows : 0,
          .hidden_rows = needs_.facts.hidden_rows > 0 ? rows : 0,
          .plans = {}};
}

// The capacity of a captured decode step with this number of rows, at any positions.
StepCapacity CudaOps::capacity_for(std::int64_t rows, DecodeKind kind, const ops::StepLimits& limits) const {
  auto out = capacity_of(rows, rows, rows, kind.proposals);
  if (kind.adapters) {
    out.adapter_items = max_adapter_items(rows, adapter_slots_.count);
    out.adapter_rows = rows;
  }
  for (const auto& shape : needs_.attention) {
    const auto bounds = attention_bounds(shape, static_cast<int>(rows), static_cast<int>(rows), limits.max_positions);
    if (kind.proposals) {
      out.plans.push_back({bounds.decode_items, bounds.prefill_items});
      continue;
    }
    // All decodes have the same kind of items. The plan of a single decode shows which kind.
    const std::int32_t starts[] = {0, 1}, zero[] = {0};
    AttentionPlan one;
    plan_attention(shape, {.query_start = starts, .positions = zero, .block_tables = {}}, zero, one);
    out.plans.push_back(
        {one.decode.empty() ? 0 : bounds.decode_items, one.prefill.empty() ? 0 : bounds.prefill_items});
  }
  return out;
}

// Allocates the memory of uploads, results and attention for any step within the limits.
void CudaOps::make_uploads(const ops::StepLimits& limits) {
  proposes_ = limits.logits_rows() > limits.max_sequences;
  reads_main_ = limits.reads_hidden;
  buckets_ = decode_buckets(std::min(limits.max_rows, proposes_ ? limits.logits_rows() : limits.max_sequences));
  auto capacity = capacity_of(limits.max_rows, limits.logits_rows(), limits.max_sequences, proposes_);
  if (adapter_slots_.count > 0) {
    capacity.adapter_items = max_adapter_items(limits.max_rows, std::min(adapter_slots_.count, limits.max_sequences));
    capacity.adapter_rows = limits.max_rows;
  }
  std::size_t tables = 0;
  plans_.assign(needs_.attention.size(), {});
  for (std::size_t i = 0; i < plans_.size(); ++i) {
    const auto& shape = needs_.attention[i];
    auto bounds = attention_bounds(shape, limits.max_rows, limits.max_sequences, limits.max_positions);
    if (prompts_.chosen(i)) {
      auto other = shape;
      other.wgmma = true;
      const auto more = attention_bounds(other, limits.max_rows, limits.max_sequences, limits.max_positions);
      bounds = {std::max(bounds.decode_items, more.decode_items), std::max(bounds.prefill_items, more.prefill_items),
                std::max(bounds.partials, more.partials)};
      if (trace_.layers[i].cache.quant_bits != 0) tables += wide_blocks(i);
    }
    capacity.plans.push_back({bounds.decode_items, bounds.prefill_items});
    attention_.push_back(
        {bounds, DeviceMemory(attention_workspace_bytes(shape, bounds), "partial results of attention")});
    plans_[i].decode.reserve(static_cast<std::size_t>(bounds.decode_items));
    plans_[i].prefill.reserve(static_cast<std::size_t>(bounds.prefill_items));
  }
  for (const auto kind : kTableKinds) {
    const auto& facts = needs_.facts;
    if (facts.num_blocks[kind] == 0) continue;
    tables += static_cast<std::size_t>(limits.max_sequences) *
              static_cast<std::size_t>((limits.max_positions + facts.block_len - 1) / facts.block_len);
    tables_.begin[kind].reserve(static_cast<std::size_t>(limits.max_sequences));
  }
  tables_.blocks.reserve(tables);
  std::size_t results = 0;
  if (sampler_) {
    sampling_.clear();
    const auto packed = sampler_->pack({}, sampler_rows_, sampling_, slots_[slot_].notes);
    results = sampler_->result_bytes(packed);
    const auto lists = static_cast<std::size_t>(limits.max_sequences) * static_cast<std::size_t>(limits.max_positions) *
                       sizeof(std::int32_t);
    capacity.sampling_bytes = sampling_.size() + std::clamp(lists, kMinListBytes, kMaxListBytes);
    sampling_.reserve(capacity.sampling_bytes);
  }
  const auto bytes = step_bytes(step_layout(capacity), tables);
  upload_ = DeviceMemory(bytes, "the arrays of a step");
  long_upload_ = {};
  for (auto& slot : slots_) {
    slot.upload = PinnedMemory(bytes);
    slot.results = PinnedMemory(results);
  }
}

void CudaOps::capture_steps(DecodeKind kind, const ops::StepLimits& limits, const Issue& issue) {
  auto& all = captured_[kind.index()];
  for (const auto rows : std::span(buckets_).subspan(kind.proposals ? 1 : 0)) {  // with proposals: more than one row
    if (!kind.proposals && !all.empty() && all.back().capacity.rows >= limits.max_sequences) break;
    sampling_.clear();
    const auto packed = sampler_->pack({}, rows, sampling_, slots_[slot_].notes);
    auto capacity = capacity_for(rows, kind, limits);
    capacity.sampling_bytes = sampling_.size();
    // the bounds of a few rows can exceed the bounds of all rows
    if (step_bytes(step_layout(capacity), 0) > upload_.bytes()) break;
    all.push_back(capture(capacity, kind, packed, sampling_, issue));
  }
}

// Captures a step of padding: no row is stored, attended to or sampled. It is issued once before the capture, to load
// kernels and select GEMM tactics. It is replayed once afterwards, so that the first request does not wait for the
// graph's first launch.
CudaOps::CapturedStep CudaOps::capture(const StepCapacity& capacity, DecodeKind kind, const SamplePacked& packed,
                                       std::span<const std::byte> sampling, const Issue& issue) {
  CapturedStep out{.capacity = capacity,
                   .layout = step_layout(capacity),
                   .packed = packed,
                   .graph = {},
                   .padding = {sampling.begin(), sampling.end()},
                   .logits = {}};
  begun_ = {};
  begun_.any = begun_.attention = begun_.decode = begun_.samples = true;
  begun_.capacity = out.capacity;
  begun_.layout = out.layout;
  begun_.packed = packed;
  begun_.kind = kind;
  adapter_batch_ = {};
  clear_plans();
  set_step(cat("the capture of a decode of ", capacity.rows, " rows"));
  send({}, sampling);
  issue(kind.shape(capacity));
  stream_.wait("a step before it is captured");
  if (prefetch_setting() > 0) prefetches_.emplace();
  attentions_ = 0;
  Graph::begin(stream_);
  try {
    issue(kind.shape(capacity));
    if (prefetches_) prefetches_->join(stream_);
    out.graph = Graph::end(stream_);
  } catch (...) {
    Graph::abandon(stream_);
    prefetches_.reset();
    throw;
  }
  prefetches_.reset();
  out.logits = begun_.logits;
  out.graph.launch(stream_, "replay of a step");
  stream_.wait("replay of a step");
  return out;
}

}  // namespace charonia::cuda
