// A step on a CUDA device: packs and uploads it, issues or replays it, and fetches its samples.
#include <algorithm>
#include <cstring>
#include <utility>

#include "base/text.h"
#include "charonia/error.h"
#include "ops/cuda/collectives/nccl.h"
#include "ops/cuda/cuda_ops.h"
#include "ops/cuda/graph/decode_buckets.h"

namespace charonia::cuda {

using ops::StepInput;

namespace {

template <class Memory>
void grow(Memory& memory, std::size_t bytes) {
  if (memory.bytes() < bytes) memory = Memory(bytes + bytes / 2);
}

bool same(const AttentionShape& a, const AttentionShape& b) {
  return a.heads == b.heads && a.kv_heads == b.kv_heads && a.head_dim == b.head_dim && a.block_len == b.block_len &&
         a.kind == b.kind;
}

// Whether items made for window `a` contain all positions that window `b` needs. 0: all positions.
bool covers(int a, int b) { return a == 0 || (b != 0 && b <= a); }

}  // namespace

void CudaOps::begin_step(const StepInput& input) {
  const OnDevice on(device_.index);
  if (in_flight_.size() >= ops::kMaxStepsInFlight) {
    throw Error(ErrorCode::internal,
                cat("ops::begin_step: results of ", in_flight_.size(), " steps were not collected"));
  }
  begun_ = {};
  if (!prepared_) throw Error(ErrorCode::internal, "ops::begin_step: prepare() was not called");
  check_step(input, needs_.facts, sampled_before_);
  begun_.rows = static_cast<std::int64_t>(input.ids.size());
  begun_.logits_rows = static_cast<std::int64_t>(input.logits_rows.size());
  begun_.attention = !input.attention.positions.empty();
  begun_.samples = sampler_ != nullptr && begun_.logits_rows > 0;
  group_adapters(input);
  const auto& starts = input.attention.query_start;
  for (std::size_t s = 0; s + 1 < starts.size(); ++s) {
    if (starts[s + 1] - starts[s] <= begun_.longest) continue;
    begun_.longest = starts[s + 1] - starts[s];
    begun_.before = begun_.attention ? input.attention.positions[static_cast<std::size_t>(starts[s])] : 0;
  }
  begun_.decode = samples_every_row(input) && std::ssize(starts) - 1 <= begun_.rows &&
                  (begun_.longest == 1 || proposes_);
  begun_.kind.proposals = begun_.decode && begun_.longest > 1;
  begun_.kind.reads_main = input.reads_main;
  auto& slot = slots_[slot_];
  ++steps_;
  slot.text = begun_.decode ? cat("step ", steps_, " (decode of ", begun_.rows, " rows)")
                            : cat("step ", steps_, " (", begun_.rows, " rows, ",
                                  begun_.attention ? input.attention.query_start.size() - 1 : 0, " sequences)");
  slot.samples = 0;
  slot.logits_of.clear();
  for (std::size_t row = 0; row < input.sample.size(); ++row) {
    if (input.sample[row].logits) slot.logits_of.push_back(row);
  }
  set_step(slot.text);
  pack(input);
  begun_.any = begun_.open = true;
}

void CudaOps::pack(const StepInput& input) {
  auto& step = begun_;
  clear_plans();
  if (step.attention && needs_.facts.block_len > 0) {
    for (const auto kind : kTableKinds) {
      if (needs_.facts.num_blocks[kind] > 0) flatten_tables(input.attention, kind, needs_.facts.block_len, tables_);
    }
    for (std::size_t i = 0; i < plans_.size(); ++i) {
      plan_prompts(i, input.attention);
    }
  }
  step.captured = nullptr;
  const auto index = step.decode ? bucket_of(buckets_, step.rows) : buckets_.size();
  if (index < buckets_.size()) {
    // A decode step without a graph is also padded, so that its GEMMs have measured shapes.
    const auto padded = buckets_[index];
    step.capacity = capacity_of(padded, padded, padded, step.kind.proposals);
    const auto& captured = captured_[step.kind.index()];
    const auto at = index - (step.kind.proposals ? 1 : 0);  // the steps of one row have none
    if (at < captured.size()) step.captured = &captured[at];
  } else {
    step.capacity = capacity_of(step.rows, step.logits_rows, std::ssize(input.attention.state_in),
                                !input.attention.row_states.empty());
  }
  step.capacity.adapter_items = std::ssize(adapter_batch_.items);
  step.capacity.adapter_rows = std::ssize(adapter_batch_.rows);
  sampling_.clear();
  if (step.samples) {
    step.packed = sampler_->pack(input.sample, step.capacity.logits_rows, sampling_, slots_[slot_].notes);
  }
  choose_captured();
  if (step.captured != nullptr) {
    step.capacity = step.captured->capacity;
    step.layout = step.captured->layout;
  } else {
    for (const auto& plan : plans_) step.capacity.plans.push_back({std::ssize(plan.decode), std::ssize(plan.prefill)});
    step.capacity.sampling_bytes = sampling_.size();
    step.layout = step_layout(step.capacity);
  }
  send(input, sampling_);
}

// Plans attention for the kernel that was chosen for prompts. Decode steps use the other one, also with proposals, and
// so does a step whose copies of a quantised cache would need too much memory.
void CudaOps::plan_prompts(std::size_t plan, const ops::AttentionBatch& batch) {
  auto shape = needs_.attention[plan];
  shape.wgmma = !begun_.decode && prompts_.uses_wgmma(plan, begun_.longest, begun_.before);
  const auto& begin = tables_.begin[shape.kind];
  plan_attention(shape, batch, begin, plans_[plan]);
  if (!shape.wgmma || trace_.layers[plan].cache.quant_bits == 0) return;
  if (widen_plan(shape, static_cast<std::int64_t>(wide_blocks(plan)), plans_[plan], tables_.blocks)) return;
  shape.wgmma = false;
  plan_attention(shape, batch, begin, plans_[plan]);
}

// Keeps the captured step of the bucket if it can serve this step. Rows with lists, penalties or masks are sampled
// after the replay; in the replay the sampler treats all rows as padding.
void CudaOps::choose_captured() {
  auto& step = begun_;
  if (step.captured == nullptr) return;
  const auto& captured = *step.captured;
  step.sampled_after = !step.packed.plain;
  const auto behind = step.sampled_after ? sampling_.size() : 0;
  if ((step.packed.plain && step.packed.bytes != captured.packed.bytes) ||
      !fits(plans_, captured.capacity) ||
      step_bytes(captured.layout, tables_.blocks.size()) + behind > upload_.bytes()) {
    step.captured = nullptr;
    step.sampled_after = false;
  }
}

void CudaOps::send(const StepInput& input, std::span<const std::byte> sampling) {
  const auto of_step = step_bytes(begun_.layout, tables_.blocks.size());
  const auto bytes = of_step + (begun_.sampled_after ? sampling.size() : 0);
  auto& host = slots_[slot_].upload;
  grow(host, bytes);
  const auto written = begun_.sampled_after ? std::span<const std::byte>(begun_.captured->padding) : sampling;
  write_step(host.data(), begun_.capacity, begun_.layout, input, needs_.facts.block_len, tables_, plans_,
             adapter_batch_, written);
  begun_.sampling_at = begun_.layout.sampling;
  if (begun_.sampled_after) {
    begun_.sampling_at = of_step;
    std::copy(sampling.begin(), sampling.end(), host.data() + of_step);
  }
  auto* memory = &upload_;
  if (bytes > upload_.bytes()) {
    memory = &long_upload_;
    if (bytes > long_upload_.bytes()) stream_.wait("growth of the step's memory");
    grow(long_upload_, bytes);
  }
  begun_.device = memory->as<std::byte>();
  stream_.upload(begun_.device, host.data(), bytes, "upload of a step");
}

void CudaOps::need_cache(const ops::KvCache& cache) {
  auto& facts = needs_.facts;
  if (tracing_) {
    facts.block_len = cache.layout().block_len;
    facts.num_blocks = cache.num_blocks();
  } else if (facts.block_len != cache.layout().block_len || facts.num_blocks != cache.num_blocks()) {
    throw Error(ErrorCode::internal, "the KV cache is not the one that prepare() was called with");
  }
}

// Layers with the same heads and kind of cache share a plan. Its items are made for the widest window.
std::size_t CudaOps::need_attention(const AttentionShape& shape) {
  auto& shapes = needs_.attention;
  const auto found = std::ranges::find_if(shapes, [&](const auto& one) { return same(one, shape); });
  const auto index = static_cast<std::size_t>(found - shapes.begin());
  const bool known = found != shapes.end();
  if (known && covers(found->window, shape.window)) return index;
  if (!tracing_) {
    throw Error(ErrorCode::internal, known ? "the attention window is wider than in prepare()"
                                           : "the attention heads are not those of prepare()");
  }
  if (known) {
    *found = shape;
  } else {
    shapes.push_back(shape);
  }
  return index;
}

void CudaOps::clear_plans() {
  tables_.clear();
  for (auto& plan : plans_) {
    plan.decode.clear();
    plan.prefill.clear();
    plan.num_partials = 0;
    plan.wgmma = false;
  }
}

void CudaOps::need_sampler(int vocab, std::int64_t rows) {
  if (tracing_) {
    needs_.sampled_vocab = vocab;
    sampler_rows_ = static_cast<int>(rows);
    return;
  }
  if (needs_.sampled_vocab == vocab && rows <= sampler_rows_) return;
  throw Error(ErrorCode::internal, cat("ops::sample: [", rows, ", ", vocab, "], but prepare() was called with [",
                                       sampler_rows_, ", ", needs_.sampled_vocab, "]"));
}

void CudaOps::run_step(const Issue& issue) {
  if (!begun_.open) throw Error(ErrorCode::internal, "ops::run_step: begin_step() was not called");
  const OnDevice on(device_.index);
  auto& slot = slots_[slot_];
  set_step(slot.text);
  begun_.open = false;
  sampled_before_ = sampler_ ? begun_.logits_rows : 0;  // what the next step may refer to
  if (group_) group_->check();
  if (begun_.captured != nullptr) {
    begun_.captured->graph.launch(stream_, "replay of a step");
    ++replayed_steps_;
    begun_.sampled = begun_.logits_rows > 0;
    if (begun_.sampled_after) sample_rows(begun_.captured->logits);
  } else {
    issue(begun_.kind.shape(begun_.capacity));
  }
  if (begun_.sampled) {
    slot.samples = begun_.logits_rows;
    const auto bytes = sampler_->result_bytes(begun_.packed);
    stream_.download(slot.results.data(), sampler_->results(), bytes, "download of a step");
    download_logits(slot, begun_.captured != nullptr ? begun_.captured->logits : begun_.logits);
  }
  slot.done.record(stream_);
  in_flight_.push_back(slot_);
  slot_ = (slot_ + 1) % slots_.size();
}

void CudaOps::sample_rows(const ops::Tensor& logits) {
  sampler_->launch(stream_, logits, begun_.packed, begun_.device + begun_.sampling_at, slots_[slot_].notes);
  begun_.sampled = true;
}

// Sampling does not change the logits of a row with a target.
void CudaOps::download_logits(Slot& slot, const ops::Tensor& logits) {
  const auto bytes = static_cast<std::size_t>(logits.cols) * sizeof(float);
  grow(slot.logits, slot.logits_of.size() * bytes);
  for (std::size_t i = 0; i < slot.logits_of.size(); ++i) {
    const auto* const row = static_cast<const float*>(logits.data) +
                            static_cast<std::int64_t>(slot.logits_of[i]) * logits.stride;
    stream_.download(slot.logits.data() + i * bytes, row, bytes, "download of logits");
  }
}

std::vector<ops::Sampled> CudaOps::collect() {
  if (in_flight_.empty()) throw Error(ErrorCode::internal, "ops::collect: run_step() was not called");
  const OnDevice on(device_.index);
  const auto& slot = slots_[in_flight_.front()];
  in_flight_.pop_front();
  set_step(slot.text);
  slot.done.wait("wait for the end of a step");
  if (slot.samples == 0) return {};
  auto sampled = sampler_->parse(slot.results.data(), slot.samples, slot.notes);
  const auto vocab = static_cast<std::size_t>(needs_.sampled_vocab);
  for (std::size_t i = 0; i < slot.logits_of.size(); ++i) {
    auto& row = sampled[slot.logits_of[i]];
    row.logits.resize(vocab);
    std::memcpy(row.logits.data(), slot.logits.data() + i * vocab * sizeof(float), vocab * sizeof(float));
  }
  return sampled;
}

void CudaOps::require_step(std::string_view op, std::int64_t rows, std::int64_t of) const {
  if (!begun_.any || rows != of) {
    throw Error(ErrorCode::internal, begun_.any ? cat("ops::", op, ": ", rows, " rows, but the step has ", of)
                                                : cat("ops::", op, ": begin_step() was not called"));
  }
}

}  // namespace charonia::cuda
