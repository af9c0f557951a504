// The operation set of the decoder. ops/cpu and ops/cuda implement it, and nothing else differs between devices.
//
// All operations of one step are issued from one thread, in order. Rows are tokens of the step, in batch order. Every
// output row depends on that row's inputs alone, in an order of operations fixed by the row, never by the number of
// rows, the number of threads or a row's place in the batch (DESIGN.md section 3); on CUDA that holds bitwise in the
// reproducible mode.
//
// A step goes like this:
//   begin_step(input)   hands over all its host arrays (a device with its own memory uploads them as one piece)
//   run_step(issue)     has `issue` call the operations, or replays what they were the last time
//   collect()           waits for the step's samples
// An asynchronous device takes the next begin_step and run_step before collect() of the one before: results are
// collected in the order of the steps, at most kMaxStepsInFlight may be uncollected. Operations that need host arrays
// (embed, rotary_store, attention, gather_rows, sample) take those of the step that was begun last.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/dtype.h"

namespace charonia::ops {

// Memory on the device, freed with the object. Zero-filled when allocated.
class Buffer {
 public:
  virtual ~Buffer() = default;
  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 protected:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// Row-major [rows, cols] in host memory, at any alignment. The source of weights.
struct HostMatrix {
  const void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t rows = 0, cols = 0;
  std::int64_t stride = 0;  // elements from row to row; 0: cols

  std::int64_t row_stride() const { return stride == 0 ? cols : stride; }
  const std::byte* row(std::int64_t index) const {
    return static_cast<const std::byte*>(data) + static_cast<std::size_t>(index * row_stride()) * size_of(dtype);
  }
};

// Row-major [rows, cols] on the device; `stride` elements from row to row.
struct Tensor {
  void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t rows = 0, cols = 0, stride = 0;
};

// A weight [out_features, in_features] in the device's own layout, and its optional bias [out_features].
class Linear {
 public:
  virtual ~Linear() = default;
  std::int64_t out_features() const { return n_; }
  std::int64_t in_features() const { return k_; }
  std::size_t bytes() const { return bytes_; }  // read from memory by one GEMM
 protected:
  std::int64_t n_ = 0, k_ = 0;
  std::size_t bytes_ = 0;
};

// The weights of one expert: gate and up [inter, hidden], down [hidden, inter].
struct ExpertSource {
  HostMatrix gate, up, down;
};

// The experts of a layer in the device's own layout. No biases.
class Experts {
 public:
  virtual ~Experts() = default;
  int count() const { return count_; }
  std::int64_t hidden() const { return hidden_; }
  std::int64_t inter() const { return inter_; }
  std::size_t bytes() const { return bytes_; }  // of all experts

 protected:
  int count_ = 0;
  std::int64_t hidden_ = 0, inter_ = 0;
  std::size_t bytes_ = 0;
};

struct ExpertsShape {
  int count = 0, top_k = 0;
  std::int64_t hidden = 0, inter = 0;  // inter: of this rank
  DType weight = DType::f32;
};

// A table [vocab, hidden] to gather rows from, in the weight type.
class Embedding {
 public:
  virtual ~Embedding() = default;
  std::size_t bytes() const { return bytes_; }

 protected:
  std::size_t bytes_ = 0;
};

// Which element types the device computes in, by weight type.
struct Precision {
  DType weight;
  DType residual;    // the residual stream
  DType gemm_out;    // the outputs of linear (but logits are always f32)
  DType activation;  // the inputs of linear and the outputs of norms, activations and attention
  DType kv;          // what KV blocks hold
};

struct KvLayout {
  int num_layers = 0, kv_heads = 0, head_dim = 0;
  int block_len = 0;         // tokens per block
  DType dtype = DType::f32;  // that k and v are computed in, and stored in
  int quant_bits = 0;        // 8 or 4: they are stored as integers instead, as kv_quant.h says
};

// The KV blocks of all layers. Contents are finite at all times.
class KvCache {
 public:
  virtual ~KvCache() = default;
  const KvLayout& layout() const { return layout_; }
  int num_blocks() const { return num_blocks_; }

 protected:
  KvLayout layout_;
  int num_blocks_ = 0;
};

// A step as attention sees it. Sequence s has query rows [query_start[s], query_start[s+1]) of the step; row r stands
// at position positions[r] and sees the positions 0 .. positions[r] of its own sequence. Position p of sequence s lives
// in block block_tables[s * table_stride + p / block_len], slot p % block_len.
struct AttentionBatch {
  std::span<const std::int32_t> query_start;   // [sequences + 1]
  std::span<const std::int32_t> positions;     // [rows], ascending by one within a sequence
  std::span<const std::int32_t> block_tables;  // [sequences, table_stride]
  std::int64_t table_stride = 0;
  std::span<const std::int32_t> rotary_rows =
      {};  // [rows]: the row of cos_sin that turns each row; empty: its position
};

// What rotary_store() does to the heads of q and k before k and v are stored. Pointers are the device's.
struct RotaryParams {
  const float* cos_sin = nullptr;  // [table rows, rotary_dim]: cosines in the first half of a row, sines in the second;
                                   // null: nothing is rotated (ALiBi)
  int rotary_dim = 0;              // even, 2 .. head_dim: pairs (d, d + rotary_dim / 2); the elements beyond stay
  const float* q_norm = nullptr;   // [head_dim] with k_norm: RMS norm of every head, before the rotation; null: none
  const float* k_norm = nullptr;
  float norm_eps = 0;
  const float* q_scale = nullptr;  // [positions]: q at position p is multiplied by q_scale[p], last (log-n); null: none
};

// How attention() weighs a key at position j for a query at position i >= j:
//   x = scale * q k;  x = soft_cap * tanh(x / soft_cap) where there is a cap;  x += alibi[head] * (j - i) where there
//   are slopes;  a key with i - j >= window is not seen where there is a window.
struct AttentionParams {
  float scale = 1;
  int window = 0;                // keys that a query sees, itself among them; 0: all
  float soft_cap = 0;            // 0: none
  const float* alibi = nullptr;  // [heads of this rank] on the device; null: none
};

enum class Activation { silu, gelu_tanh };

// How a mixture-of-experts layer chooses: the `top_k` experts of greatest router logits (ties: the lowest index), with
// the softmax of the logits over all experts as weights; with `renormalize` these are divided by their sum.
struct RouterParams {
  int top_k = 0;
  bool renormalize = true;
};

// Which tokens a row may sample, worked out on a thread of its own while the step's forward pass runs.
class TokenMask {
 public:
  virtual ~TokenMask() = default;
  // Waits until the mask is known: bit t % 32 of word t / 32 says whether token t may be sampled, [ceil(vocab / 32)].
  // Valid until the step is collected. Throws Error when there is none: then the row has that text as its error.
  virtual std::span<const std::uint32_t> wait() const = 0;
};

// One row to sample from.
struct SampleRow {
  float temperature = 1;  // 0: greedy (ties: the lowest id)
  int top_k = 0;          // 0: all
  float top_p = 1, min_p = 0;
  float repetition_penalty = 1, presence_penalty = 0, frequency_penalty = 0;
  std::uint64_t seed = 0;
  std::int64_t position = 0;   // of the token to sample; the random number is a function of (seed, position) alone
  std::uint64_t sequence = 0;  // whose row it is: the same in all steps of a sequence, never given to another
  std::span<const std::int32_t> prompt;  // token ids, for the penalties
  std::span<const std::int32_t> output;  // token ids sampled so far, as far as the host knows them
  std::int32_t pending = -1;  // >= 0: the one after `output` is what row `pending` of the step before sampled
  std::span<const std::pair<std::int32_t, float>> bias;  // added to logits first; -infinity bans a token
  std::span<const std::int32_t> banned;  // token ids that must not be sampled (min_tokens' end ids, bad words)
  int logprobs = -1;                     // -1: none; n: sampled token's and the n likeliest, of the unmodified logits
  std::int32_t target = -1;  // >= 0: nothing is sampled: this token is reported, with the log probabilities asked for
  const TokenMask* mask = nullptr;  // asked as late as possible: a device waits for it when the logits are under way.
                                    // A step that has one is not launched before the step before it is collected
};

struct Sampled {
  std::int32_t token = 0;
  float logprob = 0;                                // log softmax of the unmodified logits
  std::vector<std::pair<std::int32_t, float>> top;  // likeliest first, ties by lowest id
  std::string error;  // why this row could not be sampled (NaN, nothing left to sample); else empty
};

// The arrays of one step. They need not live longer than begin_step() on a device that copies them; on the CPU they
// must live until collect().
struct StepInput {
  std::span<const std::int32_t> ids;          // [rows] token ids; -1 - i: what sample row i of the step before sampled
  AttentionBatch attention;                   // without positions: the step issues no attention
  std::span<const std::int32_t> logits_rows;  // the rows whose logits are wanted, ascending
  std::span<const SampleRow> sample;          // [logits_rows]: one each
  // [sequences]: tokens of each one's prompt, by which the model scales long contexts. Devices do not look at it.
  // Empty: positions alone count.
  std::span<const std::int32_t> prompt_tokens = {};
  // Blocks (from, to) that are copied before anything is computed, in all layers. Decoder::launch() hands them to
  // copy_blocks().
  std::span<const std::pair<std::int32_t, std::int32_t>> block_copies = {};
};

// The numbers of rows that a step's operations work on. A device that replays captured steps rounds them up to those of
// a graph; rows beyond the input's hold anything and give nothing.
struct StepShape {
  std::int64_t rows = 0, logits_rows = 0;
};

// What the steps of an engine are bounded by, and how its KV blocks are cut.
struct StepLimits {
  int max_rows = 0;       // token budget
  int max_sequences = 0;  // in a step, and rows of logits
  int max_positions = 0;  // of a sequence: session_len
  int vocab = 0;
  int block_len = 0;
  int kv_quant_bits = 0;  // KvLayout's
};

inline constexpr int kMaxStepsInFlight = 2;
inline constexpr int kMaxTopLogprobs = 20;

class Ops {
 public:
  using Issue = std::function<void(const StepShape&)>;

  virtual ~Ops() = default;

  virtual std::string_view device() const = 0;           // "cpu" | "cuda"
  virtual std::string_view instruction_set() const = 0;  // "avx512", "sm_90", ...
  // Why the device is slower than it could be, and the remedy, to be shown to the user; empty: it is not. After
  // prepare().
  virtual std::string warning() const = 0;
  // Which kernels operations go to, a line each, for people to read; empty where there is no choice. After prepare(),
  // between steps.
  virtual std::vector<std::string> report() const { return {}; }
  // How often a library refused a GEMM that it had been chosen for, so that an own kernel took it. From any thread.
  virtual std::int64_t gemms_rejected() const { return 0; }
  virtual bool asynchronous() const { return false; }  // run_step returns before the step is computed
  virtual Precision precision(DType weight) const = 0;
  virtual std::size_t free_memory() const = 0;  // bytes that may still be allocated, by each of the ranks

  // Memory. Copies are complete on return, after all that was issued before them.
  virtual std::unique_ptr<Buffer> allocate(std::size_t bytes) = 0;
  virtual void upload(void* device, const void* host, std::size_t bytes) = 0;
  virtual void download(void* host, const void* device, std::size_t bytes) = 0;

  // Weights: `parts` are stacked along the rows (out_features); each may have its own element type and is converted to
  // `weight`. bias: empty or one entry per part (an entry without data is zeros).
  virtual std::unique_ptr<Linear> make_linear(std::span<const HostMatrix> parts, std::span<const HostMatrix> bias,
                                              DType weight) = 0;
  virtual std::unique_ptr<Embedding> make_embedding(const HostMatrix& table, DType weight) = 0;
  virtual std::size_t kv_block_bytes(const KvLayout& layout) const = 0;  // all layers
  // The first `committed` blocks have memory; -1: all have.
  virtual std::unique_ptr<KvCache> make_kv_cache(const KvLayout& layout, int num_blocks, int committed = -1) = 0;
  // Provides memory for the first `num_blocks` blocks of a cache, those that have it stay as they are. Throws
  // Error(resource_exhausted), changing nothing. Between steps.
  virtual void commit_blocks(KvCache& cache, int num_blocks) = 0;

  virtual std::unique_ptr<Experts> make_experts(std::span<const ExpertSource> experts, DType weight) = 0;
  // Bytes of the scratch memory that experts() takes for up to `rows` rows.
  virtual std::size_t experts_scratch_bytes(const ExpertsShape& shape, std::int64_t rows) const = 0;

  // Once, before the first step: makes what steps need (nothing is allocated in a step), measures which kernel
  // candidate of a GEMM is fastest, captures the steps that will be replayed. `linears` are all weights that steps
  // multiply with; `issue` is what every run_step() will be called with; it may be called with any StepShape within the
  // limits. Also before that, a device takes steps, with the rows that they have: the limits then grow with what comes.
  virtual void prepare(const StepLimits&, std::span<const Linear* const> linears, const Issue& issue) {
    (void)linears, (void)issue;
  }

  // Throws Error(internal) when an id, a position, a table or a row is out of its range.
  virtual void begin_step(const StepInput& input) = 0;
  virtual void run_step(const Issue& issue) = 0;
  // The samples of the oldest step not yet collected, in the order of its sample rows; waits for them. A row that
  // cannot be sampled says so in its error; the others are sampled. Throws Error(internal) when the device failed: the
  // message names the step and the operation, where that is known.
  virtual std::vector<Sampled> collect() = 0;

  // Copies whole blocks of the cache (all layers), in the order of the pairs (from, to). After begin_step() and before
  // run_step(); never part of a graph.
  virtual void copy_blocks(KvCache& cache, std::span<const std::pair<std::int32_t, std::int32_t>> pairs) = 0;

  // out [rows, hidden] residual type <- table rows of the step's ids, times `scale`.
  virtual void embed(const Tensor& out, const Embedding& table, float scale) = 0;

  // norm(x, w) = x / sqrt(mean(x^2) + eps) * w. residual += delta (when delta has data), or residual +=
  // norm(delta, delta_weight) where that is not null; out = norm(residual, weight).
  // residual [rows, hidden] residual type; delta [rows, hidden] GEMM type; weight, delta_weight [hidden] f32; out
  // [rows, hidden] activation type.
  virtual void rms_norm(const Tensor& out, const Tensor& residual, const Tensor& delta, const float* weight, float eps,
                        const float* delta_weight = nullptr) = 0;

  // out [rows, n] GEMM type or f32 = in [rows, k] activation type * weight^T + bias.
  virtual void linear(const Tensor& out, const Tensor& in, const Linear& weight) = 0;

  // qkv [rows, (heads + 2 * kv_heads) * head_dim] GEMM type: q heads, then k heads, then v heads. Normalises, rotates
  // and scales q and k in place as `how` says. Stores k and v of every row of the step into the cache of `layer`.
  virtual void rotary_store(const Tensor& qkv, const RotaryParams& how, KvCache& cache, int layer, int heads) = 0;

  // out [rows, heads * head_dim] activation type = the values, weighted by the softmax of what AttentionParams says,
  // over the cache; q as rotary_store left it. All layers of a model have the same heads; their AttentionParams may
  // differ.
  virtual void attention(const Tensor& out, const Tensor& qkv, const KvCache& cache, int layer, int heads,
                         const AttentionParams& how) = 0;

  // out [rows, inter] activation type = activation(gate_up[:, :inter]) * gate_up[:, inter:]; gate_up GEMM type.
  // gelu_tanh(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))).
  virtual void gated_activation(const Tensor& out, const Tensor& gate_up, Activation activation) = 0;

  // linear(gate_up, in, weight) and gated_activation(out, gate_up, activation), with their bits. A device that does
  // both at once leaves gate_up as it is.
  virtual void gated_linear(const Tensor& out, const Tensor& gate_up, const Tensor& in, const Linear& weight,
                            Activation activation) {
    linear(gate_up, in, weight);
    gated_activation(out, gate_up, activation);
  }

  // out [rows, hidden] GEMM type = the sum over the experts e that the router chooses for a row, in the order of e, of
  // w_e * down_e(activation(gate_e(in)) * up_e(in)). in [rows, hidden] activation type; router [rows, experts] f32
  // logits; scratch: experts_scratch_bytes() of the device's memory.
  virtual void experts(const Tensor& out, const Tensor& in, const Tensor& router, const Experts& weights,
                       const RouterParams& how, Activation activation, void* scratch) = 0;

  // logits [rows, cols] f32 = cap * tanh(logits / cap).
  virtual void soft_cap(const Tensor& logits, float cap) = 0;

  // out [logits rows, cols] = in[the step's logits_rows, :], same element type.
  virtual void gather_rows(const Tensor& out, const Tensor& in) = 0;

  // logits [logits rows, vocab] f32, by the step's SampleRows. Overwrites logits. May wait for the rows' masks.
  virtual void sample(const Tensor& logits) = 0;

  // Tensor parallel ranks. All ranks issue the same operations in the same order, each on its own thread: a rank waits
  // in a collective until the others have come.
  virtual int ranks() const { return 1; }
  virtual int rank() const { return 0; }
  // tensor [rows, cols] = the sum of all ranks' tensors, added in the order of the ranks.
  virtual void all_reduce(const Tensor& tensor) { (void)tensor; }
  // out [rows, ranks * cols] = the ranks' in [rows, cols] side by side.
  virtual void all_gather(const Tensor& out, const Tensor& in) { (void)out, (void)in; }
  // This rank's step has failed and it will not come to the next collective: the ranks that wait for it get an
  // Error(internal) with `why`, as do all that come before resume_collectives(). That is called on every rank once all
  // of them are out of the step, and throws Error(device_failed) where collectives cannot be resumed.
  virtual void abort_collectives(std::string_view why) noexcept { (void)why; }
  virtual void resume_collectives() {}
};

// Collectives between the ranks of one process, for devices whose memory is the host's. Calls block until all ranks
// came.
class ProcessGroup;
std::shared_ptr<ProcessGroup> make_process_group(int ranks);

// threads: 0 means as many as there are processors. Env CHARONIA_ISA=portable|avx2|avx512|avx512_bf16|amx forces an
// instruction set (one that the processor lacks is refused). group: of which this is rank `rank`; null: alone.
std::unique_ptr<Ops> make_cpu_ops(int threads, std::shared_ptr<ProcessGroup> group = nullptr, int rank = 0);

}  // namespace charonia::ops
