// The operations on a CUDA device. The computations are in kernels/ and gemm_runner.h. This class owns weights and KV
// blocks, uploads, captures and replays steps, checks operations, and issues them to the device's stream.
//
//   begin_step   packs the step's arrays (step_upload.h) and uploads them
//   run_step     replays the graph of the step's bucket, or issues its operations one by one. (A graph samples plain
//                rows. If a row has lists, penalties or a mask, all rows are sampled after the replay, when the masks
//                are ready.)
//   collect      waits until the samples of the oldest step are in host memory
// Sampled token ids stay on the device for the next step's embedding, so a step can begin and be issued while the
// previous step runs.
#pragma once

#include <array>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ops/check_step.h"
#include "ops/cuda/cuda_weights.h"
#include "ops/cuda/decode_kernels.h"
#include "ops/cuda/device/runtime.h"
#include "ops/cuda/expert_kernels.h"
#include "ops/cuda/gemm/gemm_runner.h"
#include "ops/cuda/graph/step_upload.h"
#include "ops/cuda/kernels/attention.h"
#include "ops/cuda/make_cuda_ops.h"
#include "ops/cuda/prompt_kernels.h"
#include "ops/cuda/sampling/sampler.h"
#include "ops/ops.h"

namespace charonia::cuda {

class CudaOps final : public ops::Ops {
 public:
  // The device must be the calling thread's current device (OnDevice). Later calls may come from any thread, one at a
  // time.
  CudaOps(const ops::CudaOptions& options, std::shared_ptr<ops::NcclGroup> group, int rank);
  ~CudaOps() override;

  std::string_view device() const override { return "cuda"; }
  std::string_view instruction_set() const override { return instruction_set_; }
  std::string warning() const override;
  std::vector<std::string> report() const override;  // the device, captured steps, and GemmRunner::report()
  std::int64_t gemms_rejected() const override { return gemms_.rejected(); }
  bool asynchronous() const override { return true; }
  ops::Precision precision(DType weight) const override;
  std::size_t free_memory() const override;

  std::unique_ptr<ops::Buffer> allocate(std::size_t bytes) override;
  void upload(void* device, const void* host, std::size_t bytes) override;
  void download(void* host, const void* device, std::size_t bytes) override;
  void upload_parts(std::span<const ops::DevicePart> parts, const std::byte* host) override;
  void download_parts(std::byte* host, std::span<const ops::DevicePart> parts) override;

  bool has_adapter_slots() const override { return true; }
  void make_adapter_slots(const ops::AdapterSlots& slots) override;
  std::unique_ptr<ops::Buffer> allocate_host(std::size_t bytes) override;
  void fill_adapter_slot(int slot, const ops::Buffer& image) override;

  std::unique_ptr<ops::Linear> make_linear(std::span<const ops::HostMatrix> parts,
                                           std::span<const ops::HostMatrix> bias, DType weight) override;
  void share_linear(const ops::Linear& weight) override;
  std::unique_ptr<ops::Embedding> make_embedding(const ops::HostMatrix& table, DType weight,
                                                 bool in_host_memory) override;
  std::unique_ptr<ops::Embedding> make_embedding(const ops::Linear& weight) override;
  std::unique_ptr<ops::KvCache> make_kv_cache(const ops::KvLayout& layout, const PerKind<int>& num_blocks,
                                              const std::optional<PerKind<int>>& committed) override;
  void commit_blocks(ops::KvCache& cache, const PerKind<int>& num_blocks) override;
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

  void copy_blocks(ops::KvCache& cache, std::span<const BlockCopy> copies) override;
  void embed(const ops::Tensor& out, const ops::Embedding& table, float scale) override;
  void add_embedding(const ops::Tensor& x, const ops::Embedding& table, const ops::EmbeddingSum& how) override;
  void rms_norm(const ops::Tensor& out, const ops::Tensor& residual, const ops::Tensor& delta,
                const ops::NormParams& how) override;
  void announce_linear(const ops::Linear& weight) override {
    if (!tracing_) announced_linear_ = &weight;
  }
  void linear(const ops::Tensor& out, const ops::Tensor& in, const ops::Linear& weight) override;
  void add_adapters(const ops::Tensor& out, const ops::Tensor& in, int weight) override;
  void qk_squares(const ops::Tensor& sums, const ops::Tensor& qkv, std::int64_t q_size, std::int64_t k_size) override;
  void rotary_store(const ops::Tensor& qkv, const ops::RotaryParams& how, ops::KvCache& cache, int layer,
                    int heads) override;
  void latent_store(const ops::Tensor& queries, const ops::Tensor& plain, const ops::Tensor& q,
                    const ops::Tensor& latent, const ops::LatentParams& how, ops::KvCache& cache, int layer,
                    int heads) override;
  void attention(const ops::Tensor& out, const ops::Tensor& qkv, const ops::KvCache& cache, int layer, int heads,
                 const ops::AttentionParams& how) override;
  void short_conv(const ops::Tensor& out, const ops::Tensor& in, const ops::ShortConvParams& how, ops::KvCache& cache,
                  int layer) override;
  void gated_linear(const ops::Tensor& out, const ops::Tensor& gate_up, const ops::Tensor& in,
                    const ops::Linear& weight, ops::Activation activation) override;
  void gated_activation(const ops::Tensor& out, const ops::Tensor& gate_up, ops::Activation activation) override;
  void delta_net(const ops::Tensor& qkv, const ops::Tensor& gates, const ops::DeltaNetParams& how, ops::KvCache& cache,
                 int layer) override;
  void sigmoid_gate(const ops::Tensor& x, const ops::Tensor& gate) override;
  void gated_norm(const ops::Tensor& out, const ops::Tensor& x, const ops::Tensor& gate, const float* weight, float eps,
                  int head_dim) override;
  void experts(const ops::Tensor& out, const ops::Tensor& in, const ops::Tensor& router, const ops::Experts& weights,
               const ops::RouterParams& how, ops::Activation activation, void* scratch,
               const ops::SharedExpert& shared) override;
  void scale_logits(const ops::Tensor& logits, float scale, float cap) override;
  void scatter_logits(const ops::Tensor& out, const ops::Tensor& in, const std::int32_t* columns) override;
  void gather_rows(const ops::Tensor& out, const ops::Tensor& in) override;
  void store_rows(const ops::Tensor& out, const ops::Tensor& in) override;
  void load_rows(const ops::Tensor& out, const ops::Tensor& in) override;
  void sample(const ops::Tensor& logits) override;

  int ranks() const override;
  int rank() const override { return rank_; }
  void all_reduce(const ops::Tensor& tensor) override;
  void all_gather(const ops::Tensor& out, const ops::Tensor& in) override;
  void abort_collectives(std::string_view why) noexcept override;

  // For tests: number of replayed steps.
  std::int64_t replayed_steps() const { return replayed_steps_; }

 private:
  // Facts about a step's operations that packing needs. prepare() collects them by calling `issue` in a mode that
  // issues nothing.
  struct Needs {
    ops::StepFacts facts;
    std::vector<AttentionShape> attention;  // one plan each
    int sampled_vocab = 0;
  };

  // Codes that rms_norm or gated_activation has written for a weight instead of a tensor.
  struct WrittenCodes {
    const ops::Linear* weight = nullptr;  // null: no codes
    const void* instead_of = nullptr;
    RowCodes codes;
  };
  template <class Write>
  bool write_codes(const ops::Tensor& out, Write write);

  static Gemm gemm_of(const ops::Tensor& out, const ops::Tensor& in, const ops::Linear& weight);

  // Other facts that prepare()'s call of `issue` collects.
  struct Trace {
    std::vector<Gemm> gemms;           // each shape once, with the maximum number of rows
    std::size_t collective_bytes = 0;  // of the ranks' shards together
    bool f32_adapters = false;         // the inputs of weights that adapters change have f32
    std::map<std::pair<const void*, const void*>, std::int64_t> row_capacity;  // of GEMMs, by in and out
    std::vector<AttentionLayers> layers;                           // of each plan; without scores: no candidates
    std::vector<ExpertLayers> experts;                             // with quantised weights
    std::vector<std::size_t> attention;                            // for each attention, the number of GEMMs before it
    std::vector<std::vector<std::span<const std::byte>>> weights;  // the weights that follow each attention
  };

  // A captured decode step.
  struct CapturedStep {
    StepCapacity capacity;
    StepLayout layout;
    SamplePacked packed;
    Graph graph;
    std::vector<std::byte> padding;  // the sampling upload if no row is sampled
    ops::Tensor logits;
  };

  // Host memory of a step in flight.
  struct Slot {
    PinnedMemory upload, results;
    PinnedMemory logits;                 // of the rows that return their logits, contiguous
    std::vector<std::size_t> logits_of;  // indices of these rows, ascending
    Event done;
    SampleNotes notes;
    std::string text;          // name of the step for messages
    std::int64_t samples = 0;  // rows of results; 0: nothing was sampled
  };

  // Each kind of decode steps has its captured steps.
  struct DecodeKind {
    bool adapters = false;   // rows have adapters
    bool proposals = false;  // sequences have several rows
    bool reads_main = false;  // StepShape::reads_main

    std::size_t index() const { return (reads_main ? 4U : 0U) + (proposals ? 2U : 0U) + (adapters ? 1U : 0U); }
    ops::StepShape shape(const StepCapacity& capacity) const {
      return {capacity.rows, capacity.logits_rows, adapters, reads_main};
    }
  };

  // The step of the last begin_step().
  struct Begun {
    bool any = false;   // a step has begun
    bool open = false;  // it has not run yet
    std::int64_t rows = 0, logits_rows = 0;
    bool attention = false, decode = false;
    DecodeKind kind;
    std::int64_t longest = 1;  // the most rows of a sequence
    std::int64_t before = 0;   // positions before these rows
    bool samples = false;  // it has rows to sample: `packed` and sampling_ belong to this step
    bool sampled = false;  // sample() was called
    StepCapacity capacity;
    StepLayout layout;
    SamplePacked packed;
    const CapturedStep* captured = nullptr;
    bool sampled_after = false;   // the graph does not sample; rows are sampled after the replay
    std::size_t sampling_at = 0;  // offset in the upload
    std::byte* device = nullptr;  // the upload
    ops::Tensor logits;           // the logits that were sampled last
  };

  // cuda_step.cpp
  void pack(const ops::StepInput& input);
  void choose_captured();
  void clear_plans();
  void send(const ops::StepInput& input, std::span<const std::byte> sampling);
  void sample_rows(const ops::Tensor& logits);
  void download_logits(Slot& slot, const ops::Tensor& logits);
  void need_cache(const ops::KvCache& cache);
  bool has_states() const { return needs_.facts.num_blocks.state > 0; }
  std::size_t need_attention(const AttentionShape& shape);  // returns the index of its plan
  void plan_prompts(std::size_t plan, const ops::AttentionBatch& batch);
  void need_sampler(int vocab, std::int64_t rows);
  template <class T>
  const T* uploaded(std::size_t at) const {
    return reinterpret_cast<const T*>(begun_.device + at);
  }
  StateRows state_rows() const;
  void require_step(std::string_view op, std::int64_t rows, std::int64_t of) const;
  // of: the tensor that the step's hidden_rows refer to. Returns them; null: nothing is copied.
  const std::int32_t* hidden_rows(std::string_view op, const ops::Tensor& out, const ops::Tensor& in,
                                  const ops::Tensor& of);

  // cuda_adapters.cpp
  void group_adapters(const ops::StepInput& input);
  void make_adapter_workspace(const ops::StepLimits& limits);

  // cuda_prepare.cpp
  void trace(const ops::StepLimits& limits, const Issue& issue);
  void trace_gemm(Gemm gemm);
  void prefetch_weights();
  void measure_gemms(const ops::StepLimits& limits);
  void choose_attention_kernels(const ops::StepLimits& limits);
  std::size_t wide_blocks(std::size_t plan) const;  // that wide_ has memory for
  std::vector<DecodeKind> decode_kinds() const;  // that steps may have
  // For steps with at most these numbers of rows and sequences, without adapters and plans.
  StepCapacity capacity_of(std::int64_t rows, std::int64_t logits_rows, std::int64_t sequences, bool proposals) const;
  StepCapacity capacity_for(std::int64_t rows, DecodeKind kind, const ops::StepLimits& limits) const;
  std::byte* memory_for(std::span<const ops::DevicePart> parts);
  void make_uploads(const ops::StepLimits& limits);
  void capture_steps(DecodeKind kind, const ops::StepLimits& limits, const Issue& issue);
  CapturedStep capture(const StepCapacity& capacity, DecodeKind kind, const SamplePacked& packed,
                       std::span<const std::byte> sampling, const Issue& issue);

  const DeviceMemory& collective_memory(std::size_t bytes);
  MatrixUpload& weights_upload() {
    if (!weights_upload_) weights_upload_ = std::make_unique<MatrixUpload>(stream_);
    return *weights_upload_;
  }

  ops::CudaOptions options_;
  DeviceInfo device_;
  std::string instruction_set_;
  std::shared_ptr<ops::NcclGroup> group_;
  int rank_;
  Stream stream_;
  GemmRunner gemms_;
  PromptKernels prompts_;
  DecodeKernels decodes_;
  ExpertKernels experts_;
  std::unique_ptr<MatrixUpload> weights_upload_;  // while weights are loaded

  const ops::Linear* announced_linear_ = nullptr;  // the weight of announce_linear()
  WrittenCodes written_codes_;
  bool prepared_ = false;
  bool tracing_ = false;
  Needs needs_;
  Trace trace_;
  std::vector<std::int64_t> buckets_;  // row numbers of captured steps, ascending
  std::array<std::vector<CapturedStep>, 8> captured_;  // by DecodeKind
  bool proposes_ = false;  // steps may have proposals
  bool reads_main_ = false;  // StepLimits::reads_hidden
  std::optional<Branch> prefetches_;  // during a capture, if weights are prefetched (CHARONIA_CUDA_PREFETCH)
  std::size_t attentions_ = 0;        // in that capture

  ops::AdapterSlots adapter_slots_;
  DeviceMemory adapters_;           // [slots][bytes of an image, rounded up]
  DeviceMemory adapter_workspace_;  // LowRankWork::workspace
  std::size_t slot_bytes() const { return adapters_.bytes() / static_cast<std::size_t>(adapter_slots_.count); }

  std::unique_ptr<Sampler> sampler_;
  int sampler_rows_ = 0;
  DeviceMemory upload_;               // for steps that fit, including captured steps
  DeviceMemory long_upload_;          // for other steps; grows
  PinnedMemory parts_;                // of upload_parts() and download_parts(); grows
  struct PartialResults {
    AttentionBounds bounds;
    DeviceMemory memory;
  };
  std::vector<PartialResults> attention_;  // of each plan
  DeviceMemory wide_;                      // AttentionWork::wide, of all layers
  DeviceMemory collective_;                // the ranks' shards

  std::array<Slot, ops::kMaxStepsInFlight + 1> slots_;
  std::size_t slot_ = 0;  // of the last step that began
  std::deque<std::size_t> in_flight_;
  Begun begun_;
  std::int64_t steps_ = 0, replayed_steps_ = 0;
  std::int64_t sampled_before_ = 0;

  // For the last step that began; members, to avoid allocations.
  FlatTables tables_;
  AdapterBatch adapter_batch_;
  std::vector<AttentionPlan> plans_;  // of each shape of needs_.attention
  std::vector<std::byte> sampling_;
};

}  // namespace charonia::cuda
