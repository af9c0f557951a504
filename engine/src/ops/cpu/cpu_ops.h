// The operations on the CPU. kernels/ computes rows; this class checks the arguments and distributes the work over
// threads.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string_view>
#include <vector>

#include "base/huge_memory.h"
#include "base/text.h"
#include "base/thread_pool.h"
#include "charonia/error.h"
#include "ops/check_step.h"
#include "ops/cpu/cpu_experts.h"
#include "ops/cpu/cpu_linear.h"
#include "ops/cpu/dispatch.h"
#include "ops/cpu/process_group.h"
#include "ops/cpu/sample.h"
#include "ops/ops.h"

namespace charonia::ops::cpu {

inline void require(bool holds, std::string_view op, std::string_view what) {
  if (!holds) throw Error(ErrorCode::internal, cat("ops::", op, ": ", what));
}
// `what` is called only for an error, because every step makes these checks in every layer.
template <std::invocable What>
void require(bool holds, std::string_view op, What what) {
  if (!holds) [[unlikely]]
    require(false, op, what());
}

inline std::byte* row_at(const Tensor& tensor, std::int64_t row) {
  return static_cast<std::byte*>(tensor.data) + static_cast<std::size_t>(row * tensor.stride) * size_of(tensor.dtype);
}

// Rows [begin, begin + rows).
inline Tensor rows_of(const Tensor& tensor, std::int64_t begin, std::int64_t rows) {
  return {row_at(tensor, begin), tensor.dtype, rows, tensor.cols, tensor.stride};
}

class CpuOps : public Ops {
 public:
  CpuOps(int threads, const InstructionSet& isa, std::shared_ptr<ProcessGroup> group = nullptr, int rank = 0);

  std::string_view device() const override { return "cpu"; }
  std::string_view instruction_set() const override { return isa_.name; }
  std::string warning() const override { return instruction_set_warning(); }
  Precision precision(DType weight) const override;
  std::size_t free_memory() const override;

  std::unique_ptr<Buffer> allocate(std::size_t bytes) override;
  void upload(void* device, const void* host, std::size_t bytes) override;
  void download(void* host, const void* device, std::size_t bytes) override;

  std::unique_ptr<Linear> make_linear(std::span<const HostMatrix> parts, std::span<const HostMatrix> bias,
                                      DType weight) override;
  std::unique_ptr<Embedding> make_embedding(const HostMatrix& table, DType weight, bool) override;
  std::unique_ptr<Embedding> make_embedding(const Linear& weight) override;
  std::unique_ptr<KvCache> make_kv_cache(const KvLayout& layout, const PerKind<int>& num_blocks,
                                         const std::optional<PerKind<int>>& committed) override;
  void commit_blocks(KvCache& cache, const PerKind<int>& num_blocks) override;
  std::unique_ptr<Experts> make_experts(std::span<const ExpertSource> experts, DType weight) override;
  std::unique_ptr<Linear> make_quantised_linear(std::span<const QuantSource* const> parts,
                                                std::span<const HostMatrix> bias, DType data) override;
  std::unique_ptr<Experts> make_quantised_experts(std::span<const QuantExpertSource> experts, DType data) override;
  std::size_t experts_scratch_bytes(const ExpertsShape& shape, std::int64_t rows) const override;

  void prepare(const StepLimits& limits, const Issue& issue) override;
  void begin_step(const StepInput& input) override;
  void run_step(const Issue& issue) override;
  std::vector<Sampled> collect() override;

  void copy_blocks(KvCache& cache, std::span<const BlockCopy> copies) override;
  void embed(const Tensor& out, const Embedding& table, float scale) override;
  void add_embedding(const Tensor& x, const Embedding& table, const EmbeddingSum& how) override;
  void rms_norm(const Tensor& out, const Tensor& residual, const Tensor& delta, const NormParams& how) override;
  void linear(const Tensor& out, const Tensor& in, const Linear& weight) override;
  void add_low_rank(const Tensor& out, const Tensor& in, std::span<const LowRankRows> changes) override;
  void qk_squares(const Tensor& sums, const Tensor& qkv, std::int64_t q_size, std::int64_t k_size) override;
  void rotary_store(const Tensor& qkv, const RotaryParams& how, KvCache& cache, int layer, int heads) override;
  void latent_store(const Tensor& queries, const Tensor& plain, const Tensor& q, const Tensor& latent,
                    const LatentParams& how, KvCache& cache, int layer, int heads) override;
  void heads_linear(const Tensor& out, const Tensor& in, std::span<const std::unique_ptr<Linear>> heads) override;
  void attention(const Tensor& out, const Tensor& qkv, const KvCache& cache, int layer, int heads,
                 const AttentionParams& how) override;
  void short_conv(const Tensor& out, const Tensor& in, const ShortConvParams& how, KvCache& cache, int layer) override;
  void gated_activation(const Tensor& out, const Tensor& gate_up, Activation activation) override;
  void delta_net(const Tensor& qkv, const Tensor& gates, const DeltaNetParams& how, KvCache& cache,
                 int layer) override;
  void sigmoid_gate(const Tensor& x, const Tensor& gate) override;
  void gated_norm(const Tensor& out, const Tensor& x, const Tensor& gate, const float* weight, float eps,
                  int head_dim) override;
  void experts(const Tensor& out, const Tensor& in, const Tensor& router, const Experts& weights,
               const RouterParams& how, Activation activation, void* scratch, const SharedExpert& shared) override;
  void scale_logits(const Tensor& logits, float scale, float cap) override;
  void scatter_logits(const Tensor& out, const Tensor& in, const std::int32_t* columns) override;
  void store_rows(const Tensor& out, const Tensor& in) override { copy_rows(out, in, true); }
  void load_rows(const Tensor& out, const Tensor& in) override { copy_rows(out, in, false); }
  void gather_rows(const Tensor& out, const Tensor& in) override;
  void sample(const Tensor& logits) override;

  int ranks() const override { return group_ ? group_->ranks() : 1; }
  int rank() const override { return rank_; }
  void all_reduce(const Tensor& tensor) override;
  void all_gather(const Tensor& out, const Tensor& in) override;
  void abort_collectives(std::string_view why) noexcept override;

 private:
  // By StepInput::hidden_rows. stores: these are rows of out, otherwise of in.
  void copy_rows(const Tensor& out, const Tensor& in, bool stores);
  std::int64_t split_low_rank(const Tensor& out, const Tensor& in, std::span<const LowRankRows> changes);
  // Calls fn(row) for every row; inline if rows * elements is small.
  template <class Fn>
  void for_rows(std::int64_t rows, std::int64_t elements, Fn fn) {
    constexpr std::int64_t kSmall = 16384;  // elements that take less time than waking a thread
    const auto grain = std::max<std::int64_t>(1, kSmall / std::max<std::int64_t>(1, elements));
    pool_.parallel_for(rows, grain, [&](std::int64_t begin, std::int64_t end) {
      for (auto row = begin; row < end; ++row) fn(row);
    });
  }

  // The loop over panels and rows of a GEMM.
  void multiply(const Tensor& out, const GemmRows& in, const CpuLinear& w, const GemmKernel& gemm);
  // reserve_prepared() reserves memory for prepared rows. prepare() prepares rows, from row `first` of that memory on.
  void reserve_prepared(std::int64_t rows, const GemmKernel& gemm);
  GemmRows prepare(const Tensor& in, const CpuLinear& w, const GemmKernel& gemm, std::int64_t first);

  // Adds the output of experts [first, last) to out.
  void expert_group(const Tensor& out, const Tensor& in, const CpuExperts& weights, int first, int last,
                    Activation activation, const ExpertsWorkspace& workspace, void* scratch);
  // add_expert_gemm() collects a GEMM of an expert (or of a head); multiply_experts() computes the collected GEMMs.
  void add_expert_gemm(const Tensor& out, const Tensor& in, const CpuLinear& weight);
  void multiply_experts(ExpertGemms& gemms);

  // Rows of a change of a weight, with the results of `down` from low_rank_t_[t] on.
  struct LowRankItem {
    const LowRank* change = nullptr;
    std::span<const std::int32_t> rows;
    std::int64_t t = 0, first_piece = 0;
  };

  // Queries [begin, end) of the (row, head of the group) pairs of a sequence and a KV head. They attend to `splits`
  // splits of their context, from `first_split` on. If several threads compute the splits, their states are at `states`
  // in states_.
  struct AttentionTile {
    std::int32_t sequence = 0, kv_head = 0, begin = 0, end = 0, first_split = 0, splits = 1;
    std::int64_t states = -1;
  };
  // The unit of work of a thread.
  struct AttentionItem {
    std::int32_t tile = 0, split = -1;  // -1: all splits
  };
  // Converts tiles_ to items_, and reserves memory for the states of shared tiles. state_floats: for one query.
  float* share_tiles(bool small, std::int64_t state_floats);

  InstructionSet isa_;
  const Kernels& kernels_;
  ThreadPool pool_;
  HugeArena weights_;
  std::unique_ptr<HugeMemory> prepared_rows_;  // activations of the current call
  std::unique_ptr<HugeMemory> heads_out_;      // heads_linear(): the output before it is rounded
  std::shared_ptr<ProcessGroup> group_;        // null: a single rank
  int rank_ = 0;
  bool prepared_ = false;
  StepFacts facts_;
  StepInput input_;  // of the last step that began
  bool begun_ = false;
  std::vector<std::int32_t> ids_;              // token ids of the step, with samples of the previous step filled in
  std::vector<std::int32_t> sampled_ids_;      // of the last step that ran; -1: the row failed
  std::vector<Sampled> sampled_;               // of the current step
  std::deque<std::vector<Sampled>> results_;   // of uncollected steps
  std::vector<AttentionTile> tiles_;           // of the current call
  std::vector<AttentionItem> items_;           // of the current call
  std::vector<float> states_;                  // of tiles whose splits are computed by several threads
  std::vector<LowRankItem> low_rank_items_;    // of the current call
  std::vector<float> low_rank_t_;              // of the current call
  Routing routing_;                            // of the current call
  ExpertGemms plain_gemms_;                    // collected GEMMs of experts
  ExpertGemms prepared_gemms_;                 // the same, with prepared activations
  std::vector<std::int32_t> sequence_of_row_;  // of the last step that began
};

}  // namespace charonia::ops::cpu
