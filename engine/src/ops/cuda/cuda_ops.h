// The operations on a CUDA device. What each computes stands in kernels/ and in gemm_runner.h; here weights and KV
// blocks are kept, steps are uploaded, captured and replayed, and operations are checked and issued to the device's one
// stream.
//
//   begin_step   packs the step's arrays (step_upload.h) and has them copied
//   run_step     replays the graph of the step's bucket, or issues its operations one by one
//                (a graph samples plain rows; where a row has lists, penalties or a mask all are sampled behind it,
//                when the masks are known)
//   collect      waits until the samples of the oldest step are in host memory
// Token ids that a step samples stay on the device, where the next step's embedding takes them: so a step is begun and
// issued while the one before it runs.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ops/check_step.h"
#include "ops/cuda/cuda_weights.h"
#include "ops/cuda/device/runtime.h"
#include "ops/cuda/gemm/gemm_runner.h"
#include "ops/cuda/graph/step_upload.h"
#include "ops/cuda/kernels/attention.h"
#include "ops/cuda/make_cuda_ops.h"
#include "ops/cuda/sampling/sampler.h"
#include "ops/ops.h"

namespace charonia::cuda {

class CudaOps final : public ops::Ops {
 public:
  // The device must be the calling thread's own (OnDevice); later calls may come from any thread, one at a time.
  CudaOps(const ops::CudaOptions& options, std::shared_ptr<ops::NcclGroup> group, int rank);
  ~CudaOps() override;

  std::string_view device() const override { return "cuda"; }
  std::string_view instruction_set() const override { return instruction_set_; }
  std::string warning() const override { return gemms_.warning(); }
  std::vector<std::string> report() const override;  // the device, captured steps, and GemmRunner::report()
  std::int64_t gemms_rejected() const override { return gemms_.rejected(); }
  bool asynchronous() const override { return true; }
  ops::Precision precision(DType weight) const override;
  std::size_t free_memory() const override;

  std::unique_ptr<ops::Buffer> allocate(std::size_t bytes) override;
  void upload(void* device, const void* host, std::size_t bytes) override;
  void download(void* host, const void* device, std::size_t bytes) override;

  std::unique_ptr<ops::Linear> make_linear(std::span<const ops::HostMatrix> parts,
                                           std::span<const ops::HostMatrix> bias, DType weight) override;
  std::unique_ptr<ops::Embedding> make_embedding(const ops::HostMatrix& table, DType weight) override;
  std::unique_ptr<ops::KvCache> make_kv_cache(const ops::KvLayout& layout, int num_blocks, int committed = -1) override;
  void commit_blocks(ops::KvCache& cache, int num_blocks) override;
  std::unique_ptr<ops::Experts> make_experts(std::span<const ops::ExpertSource> experts, DType weight) override;
  std::unique_ptr<ops::Linear> make_quantised_linear(std::span<const ops::QuantSource* const> parts,
                                                     std::span<const ops::HostMatrix> bias, DType data) override;
  std::unique_ptr<ops::Experts> make_quantised_experts(std::span<const ops::QuantExpertSource> experts,
                                                       DType data) override;
  std::size_t experts_scratch_bytes(const ops::ExpertsShape& shape, std::int64_t rows) const override;

  void prepare(const ops::StepLimits& limits, const Issue& issue) override;
  void begin_step(const ops::StepInput& input) override;
  void run_step(const Issue& issue) override;
  std::vector<ops::Sampled> collect() override;

  void copy_blocks(ops::KvCache& cache, std::span<const std::pair<std::int32_t, std::int32_t>> pairs) override;
  void embed(const ops::Tensor& out, const ops::Embedding& table, float scale) override;
  void rms_norm(const ops::Tensor& out, const ops::Tensor& residual, const ops::Tensor& delta,
                const ops::NormParams& how) override;
  void feeds(const ops::Linear& weight) override {
    if (!tracing_) fed_ = &weight;
  }
  void linear(const ops::Tensor& out, const ops::Tensor& in, const ops::Linear& weight) override;
  void qk_squares(const ops::Tensor& sums, const ops::Tensor& qkv, std::int64_t q_size, std::int64_t k_size) override;
  void rotary_store(const ops::Tensor& qkv, const ops::RotaryParams& how, ops::KvCache& cache, int layer,
                    int heads) override;
  void attention(const ops::Tensor& out, const ops::Tensor& qkv, const ops::KvCache& cache, int layer, int heads,
                 const ops::AttentionParams& how) override;
  void gated_linear(const ops::Tensor& out, const ops::Tensor& gate_up, const ops::Tensor& in,
                    const ops::Linear& weight, ops::Activation activation) override;
  void gated_activation(const ops::Tensor& out, const ops::Tensor& gate_up, ops::Activation activation) override;
  void experts(const ops::Tensor& out, const ops::Tensor& in, const ops::Tensor& router, const ops::Experts& weights,
               const ops::RouterParams& how, ops::Activation activation, void* scratch,
               const ops::SharedExpert& shared) override;
  void scale_logits(const ops::Tensor& logits, float scale, float cap) override;
  void gather_rows(const ops::Tensor& out, const ops::Tensor& in) override;
  void sample(const ops::Tensor& logits) override;

  int ranks() const override;
  int rank() const override { return rank_; }
  void all_reduce(const ops::Tensor& tensor) override;
  void all_gather(const ops::Tensor& out, const ops::Tensor& in) override;
  void abort_collectives(std::string_view why) noexcept override;

  // For tests: how many steps were replayed.
  std::int64_t replayed_steps() const { return replayed_steps_; }

 private:
  // What must be known of a step's operations before its arrays are packed. prepare() learns it from a call of `issue`
  // that issues nothing.
  struct Needs {
    ops::StepFacts facts;
    std::optional<AttentionShape> attention;
    int sampled_vocab = 0;
  };

  // Codes that rms_norm or gated_activation has left for a weight, instead of a tensor.
  struct CodesLeft {
    const ops::Linear* weight = nullptr;  // null: none
    const void* instead_of = nullptr;
    RowCodes codes;
  };
  template <class Leave>
  bool leave_codes(const ops::Tensor& out, Leave leave);

  static Gemm gemm_of(const ops::Tensor& out, const ops::Tensor& in, const ops::Linear& weight);

  // What prepare()'s call of `issue` finds beside that.
  struct Trace {
    std::vector<Gemm> gemms;           // each shape once, with the most rows that it gets
    std::size_t collective_bytes = 0;  // of what the ranks' shards need side by side
  };

  // A captured decode step.
  struct CapturedStep {
    StepCapacity capacity;
    StepLayout layout;
    SamplePacked packed;
    Graph graph;
    std::vector<std::byte> padding;  // what sampling is uploaded where no row is sampled
    ops::Tensor logits;
  };

  // Host memory of a step in flight.
  struct Slot {
    PinnedMemory upload, results;
    PinnedMemory logits;                 // of the rows that report theirs, one after the other
    std::vector<std::size_t> logits_of;  // which rows these are, ascending
    Event done;
    SampleNotes notes;
    std::string text;          // for messages: which step
    std::int64_t samples = 0;  // rows of results; 0: none were sampled
  };

  // The step that was begun last.
  struct Begun {
    bool any = false;   // there is one
    bool open = false;  // and it was not run
    std::int64_t rows = 0, logits_rows = 0;
    bool attention = false, decode = false;
    bool samples = false;  // it has rows to sample: `packed` and sampling_ are of this step
    bool sampled = false;  // sample() was called
    StepCapacity capacity;
    StepLayout layout;
    SamplePacked packed;
    const CapturedStep* captured = nullptr;
    bool sampled_after = false;   // the graph samples nothing; its rows are sampled once it is replayed
    std::size_t sampling_at = 0;  // in the upload
    std::byte* device = nullptr;  // the upload
    ops::Tensor logits;           // that were sampled from last
  };

  // cuda_step.cpp
  void pack(const ops::StepInput& input);
  void choose_captured();
  void send(const ops::StepInput& input, std::span<const std::byte> sampling);
  void sample_rows(const ops::Tensor& logits);
  void download_logits(Slot& slot, const ops::Tensor& logits);
  void need_cache(const ops::KvCache& cache);
  void need_attention(const AttentionShape& shape);
  void need_sampler(int vocab, std::int64_t rows);
  template <class T>
  const T* uploaded(std::size_t at) const {
    return reinterpret_cast<const T*>(begun_.device + at);
  }
  void require_step(std::string_view op, std::int64_t rows, std::int64_t of) const;

  // cuda_prepare.cpp
  void trace(const ops::StepLimits& limits, const Issue& issue);
  void measure_gemms(const ops::StepLimits& limits);
  StepCapacity capacity_for(std::int64_t rows, const ops::StepLimits& limits) const;
  void make_uploads(const ops::StepLimits& limits);
  void capture_steps(const ops::StepLimits& limits, const Issue& issue);
  CapturedStep capture(const StepCapacity& capacity, const SamplePacked& packed, std::span<const std::byte> sampling,
                       const Issue& issue);

  const DeviceMemory& collective_memory(std::size_t bytes);

  ops::CudaOptions options_;
  DeviceInfo device_;
  std::string instruction_set_;
  std::shared_ptr<ops::NcclGroup> group_;
  int rank_;
  Stream stream_;
  GemmRunner gemms_;
  std::unique_ptr<MatrixUpload> weights_upload_;  // while weights are loaded

  const ops::Linear* fed_ = nullptr;  // feeds()
  CodesLeft codes_left_;
  bool prepared_ = false;
  bool tracing_ = false;
  Needs needs_;
  Trace trace_;
  std::vector<std::int64_t> buckets_;  // of captured steps, ascending
  std::vector<CapturedStep> captured_;

  std::unique_ptr<Sampler> sampler_;
  int sampler_rows_ = 0;
  DeviceMemory upload_;               // of steps that fit, captured ones among them
  DeviceMemory long_upload_;          // of others; grows
  DeviceMemory attention_;            // partial results
  AttentionBounds attention_bounds_;  // that it was made for
  DeviceMemory collective_;           // shards of the ranks

  std::array<Slot, ops::kMaxStepsInFlight + 1> slots_;
  std::size_t slot_ = 0;  // of the step begun last
  std::deque<std::size_t> in_flight_;
  Begun begun_;
  std::int64_t steps_ = 0, replayed_steps_ = 0;
  std::int64_t sampled_before_ = 0;

  // Of the step begun last; kept to spare allocations.
  FlatTables tables_;
  AttentionPlan plan_;
  std::vector<std::byte> sampling_;
};

}  // namespace charonia::cuda
