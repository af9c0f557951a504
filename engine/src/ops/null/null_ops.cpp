#include <algorithm>
#include <deque>
#include <exception>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "base/text.h"
#include "charonia/error.h"
#include "ops/check_step.h"
#include "ops/cpu/dispatch.h"
#include "ops/cpu/make_cpu_ops.h"
#include "ops/cpu/sample.h"
#include "ops/generated/penalties.h"
#include "ops/null/make_null_ops.h"

namespace charonia::ops {
namespace {

using Clock = std::chrono::steady_clock;

constexpr float kWordLogit = 9;  // added to the logit of the position's word

class NullLinear : public Linear {
 public:
  NullLinear(std::int64_t n, std::int64_t k) { n_ = n, k_ = k; }
};

class NullEmbedding : public Embedding {};

class NullExperts : public Experts {
 public:
  NullExperts(std::size_t count, std::int64_t hidden, std::int64_t inter) {
    count_ = static_cast<int>(count), hidden_ = hidden, inter_ = inter;
  }
};

class NullKvCache : public KvCache {
 public:
  NullKvCache(const KvLayout& layout, const PerKind<int>& num_blocks) : KvCache(layout, num_blocks) {}
};

// Used for greedy sampling, and for the noise of logits.
constexpr std::uint64_t kGreedySeed = 0;

class NullOps : public Ops {
 public:
  NullOps(NullOptions options, int ranks, int rank)
      : options_(std::move(options)), ranks_(ranks), rank_(rank), kernels_(*cpu::instruction_set({}).kernels) {
    if (options_.vocab < 1 || options_.words.empty()) {
      throw Error(ErrorCode::internal, "ops::make_null_ops: a vocabulary and a word are needed");
    }
    facts_.vocab = options_.vocab;
  }

  std::string_view device() const override { return "null"; }
  std::string_view instruction_set() const override { return "no kernels"; }
  std::string warning() const override {
    return "device = null computes nothing: responses are random words. It is only for measurements; set device = "
           "auto to serve the model";
  }

  // The same sizes as on the CPU.
  Precision precision(DType weight) const override { return sizes_->precision(weight); }
  std::size_t free_memory() const override { return sizes_->free_memory() / static_cast<std::size_t>(ranks_); }
  std::size_t experts_scratch_bytes(const ExpertsShape& shape, std::int64_t rows) const override {
    return sizes_->experts_scratch_bytes(shape, rows);
  }

  // For norms, tables and activations; untouched memory takes no pages.
  std::unique_ptr<Buffer> allocate(std::size_t bytes) override { return sizes_->allocate(bytes); }
  void upload(void* device, const void* host, std::size_t bytes) override { sizes_->upload(device, host, bytes); }
  void download(void* host, const void* device, std::size_t bytes) override { sizes_->download(host, device, bytes); }

  std::unique_ptr<Linear> make_linear(std::span<const HostMatrix> parts, std::span<const HostMatrix>, DType) override {
    std::int64_t rows = 0;
    for (const auto& part : parts) rows += part.rows;
    return std::make_unique<NullLinear>(rows, parts.front().cols);
  }
  std::unique_ptr<Linear> make_quantised_linear(std::span<const QuantSource* const> parts, std::span<const HostMatrix>,
                                                DType) override {
    std::int64_t rows = 0;
    for (const auto* part : parts) rows += part->rows();
    return std::make_unique<NullLinear>(rows, parts.front()->cols());
  }
  std::unique_ptr<Embedding> make_embedding(const HostMatrix&, DType, bool) override {
    return std::make_unique<NullEmbedding>();
  }
  std::unique_ptr<Embedding> make_embedding(const Linear&) override { return std::make_unique<NullEmbedding>(); }
  std::unique_ptr<Experts> make_experts(std::span<const ExpertSource> experts, DType) override {
    const auto& gate = experts.front().gate;
    return std::make_unique<NullExperts>(experts.size(), gate.cols, gate.rows);
  }
  std::unique_ptr<Experts> make_quantised_experts(std::span<const QuantExpertSource> experts, DType) override {
    const auto& gate = *experts.front().gate;
    return std::make_unique<NullExperts>(experts.size(), gate.cols(), gate.rows());
  }
  std::unique_ptr<KvCache> make_kv_cache(const KvLayout& layout, const PerKind<int>& num_blocks,
                                         const std::optional<PerKind<int>>&) override {
    auto cache = std::make_unique<NullKvCache>(layout, num_blocks);
    facts_.block_len = layout.block_len;
    facts_.num_blocks = cache->num_blocks();
    return cache;
  }
  void commit_blocks(KvCache&, const PerKind<int>&) override {}

  bool asynchronous() const override { return true; }
  void prepare(const StepLimits& limits, const Issue&) override {
    check_limits(limits);
    if (!steps_.empty()) throw Error(ErrorCode::internal, "ops::prepare: results of steps were not collected");
    facts_.max_rows = limits.max_rows;
    facts_.max_sequences = limits.max_sequences;
    facts_.max_positions = limits.max_positions;
    begun_ = false;
    prepared_ = true;
    sampled_ids_.clear();
  }
  void begin_step(const StepInput& input) override;
  void copy_blocks(KvCache&, std::span<const BlockCopy>) override {}
  // Issues no operations. Computes the samples immediately; collect() waits until the step would be done.
  void run_step(const Issue&) override;
  std::vector<Sampled> collect() override;

  void embed(const Tensor&, const Embedding&, float) override {}
  void add_embedding(const Tensor&, const Embedding&, const EmbeddingSum&) override {}
  void rms_norm(const Tensor&, const Tensor&, const Tensor&, const NormParams&) override {}
  void linear(const Tensor&, const Tensor&, const Linear&) override {}
  void qk_squares(const Tensor&, const Tensor&, std::int64_t, std::int64_t) override {}
  void rotary_store(const Tensor&, const RotaryParams&, KvCache&, int, int) override {}
  void attention(const Tensor&, const Tensor&, const KvCache&, int, int, const AttentionParams&) override {}
  void short_conv(const Tensor&, const Tensor&, const ShortConvParams&, KvCache&, int) override {}
  void add_low_rank(const Tensor&, const Tensor&, std::span<const LowRankRows>) override {}
  void latent_store(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const LatentParams&, KvCache&, int,
                    int) override {}
  void heads_linear(const Tensor&, const Tensor&, std::span<const std::unique_ptr<Linear>>) override {}
  void gated_activation(const Tensor&, const Tensor&, Activation) override {}
  void delta_net(const Tensor&, const Tensor&, const DeltaNetParams&, KvCache&, int) override {}
  void sigmoid_gate(const Tensor&, const Tensor&) override {}
  void gated_norm(const Tensor&, const Tensor&, const Tensor&, const float*, float, int) override {}
  void experts(const Tensor&, const Tensor&, const Tensor&, const Experts&, const RouterParams&, Activation, void*,
               const SharedExpert&) override {}
  void scale_logits(const Tensor&, float, float) override {}
  void scatter_logits(const Tensor&, const Tensor&, const std::int32_t*) override {}
  void gather_rows(const Tensor&, const Tensor&) override {}
  void store_rows(const Tensor&, const Tensor&) override {}
  void load_rows(const Tensor&, const Tensor&) override {}
  void sample(const Tensor&) override {}

  int ranks() const override { return ranks_; }
  int rank() const override { return rank_; }
  void all_reduce(const Tensor&) override {}
  void all_gather(const Tensor&, const Tensor&) override {}
  void abort_collectives(std::string_view) noexcept override {}

 private:
  struct Step {
    Clock::time_point done;
    std::vector<Sampled> samples;
  };

  std::int32_t word(const SampleRow& row) const {
    const auto at = cpu::random_unit(row.temperature == 0 ? kGreedySeed : row.seed, row.position);
    return options_.words[static_cast<std::size_t>(at * static_cast<double>(options_.words.size()))];
  }
  Sampled sample(const SampleRow& row);
  Sampled sample_of_logits(const SampleRow& row, std::int32_t word);

  NullOptions options_;
  int ranks_, rank_;
  const cpu::Kernels& kernels_;
  std::unique_ptr<Ops> sizes_ = make_cpu_ops(1);
  StepFacts facts_;
  bool prepared_ = false, begun_ = false;
  StepInput input_;                        // of the last step that began
  std::vector<std::int32_t> sampled_ids_;  // of the last step that ran; -1: the row failed
  std::deque<Step> steps_;                 // not collected yet
  Clock::time_point last_done_{};          // end time of the last step that ran
  std::vector<float> logits_;              // of the current row
  std::vector<std::int32_t> output_;       // of the current row
  cpu::SampleScratch scratch_;
};

void NullOps::begin_step(const StepInput& input) {
  begun_ = false;
  if (!prepared_) throw Error(ErrorCode::internal, "ops::begin_step: steps were not prepared");
  if (steps_.size() >= kMaxStepsInFlight) {
    throw Error(ErrorCode::internal, cat("ops::begin_step: results of ", steps_.size(), " steps were not collected"));
  }
  check_step(input, facts_, std::ssize(sampled_ids_));
  input_ = input;
  begun_ = true;
}

void NullOps::run_step(const Issue&) {
  if (!begun_) throw Error(ErrorCode::internal, "ops::run_step: no step was begun");
  begun_ = false;
  Step step;
  step.samples.reserve(input_.sample.size());
  for (const auto& row : input_.sample) step.samples.push_back(sample(row));
  sampled_ids_.clear();
  for (const auto& one : step.samples) sampled_ids_.push_back(one.error.empty() ? one.token : -1);
  step.done = last_done_ = std::max(last_done_, Clock::now()) + options_.step_time;
  steps_.push_back(std::move(step));
}

std::vector<Sampled> NullOps::collect() {
  if (steps_.empty()) throw Error(ErrorCode::internal, "ops::collect: no step was run");
  auto step = std::move(steps_.front());
  steps_.pop_front();
  if (options_.step_time.count() > 0) std::this_thread::sleep_until(step.done);
  return std::move(step.samples);
}

Sampled NullOps::sample(const SampleRow& row) {
  const auto chosen = word(row);
  const bool plain = row.mask == nullptr && row.target < 0 && row.logprobs < 0 && row.bias.empty() &&
                     !has_penalties(row) && !std::ranges::binary_search(row.banned, chosen);
  Sampled out;
  if (plain) {
    out.token = chosen;
    return out;
  }
  try {
    return sample_of_logits(row, chosen);
  } catch (const std::exception& error) {
    out.error = error.what();
  }
  return out;
}

Sampled NullOps::sample_of_logits(const SampleRow& row, std::int32_t word) {
  logits_.resize(static_cast<std::size_t>(options_.vocab));
  auto state = static_cast<std::uint64_t>(row.position) * 0x9e3779b97f4a7c15U;
  for (auto& logit : logits_) {
    state = state * 6364136223846793005U + 1442695040888963407U;  // the generator of Knuth's MMIX
    logit = static_cast<float>(state >> 40) * 0x1p-24F;
  }
  logits_[static_cast<std::size_t>(word)] += kWordLogit;
  auto greedy = row;
  greedy.temperature = 0;
  if (row.pending >= 0) {
    output_.assign(row.output.begin(), row.output.end());
    const auto last = sampled_ids_[static_cast<std::size_t>(row.pending)];
    if (last >= 0) output_.push_back(last);
    greedy.output = output_;
  }
  return cpu::sample_row(logits_, greedy, kernels_, scratch_);
}

}  // namespace

std::unique_ptr<Ops> make_null_ops(NullOptions options, int ranks, int rank) {
  return std::make_unique<NullOps>(std::move(options), ranks, rank);
}

}  // namespace charonia::ops
