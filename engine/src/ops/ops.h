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
  T* as() const { return static_cast<T*>(data_); }

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
  std::size_t bytes() const { return bytes_; }   // read from memory by one product
 protected:
  std::int64_t n_ = 0, k_ = 0;
  std::size_t bytes_ = 0;
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
  DType product;     // the outputs of linear (but logits are always f32)
  DType activation;  // the inputs of linear and the outputs of norms, activations and attention
  DType kv;          // what k/v blocks hold
};

struct KvLayout {
  int num_layers = 0, kv_heads = 0, head_dim = 0;
  int block_len = 0;   // tokens per block
  DType dtype = DType::f32;
};

// The k/v blocks of all layers. Contents are finite at all times.
class KvCache {
 public:
  virtual ~KvCache() = default;
  const KvLayout& layout() const { return layout_; }
  int num_blocks() const { return num_blocks_; }
 protected:
  KvLayout layout_;
  int num_blocks_ = 0;
};

// A step as attention sees it. Sequence s has query rows [query_start[s], query_start[s+1]) of the step; row r stands at
// position positions[r] and sees the positions 0 .. positions[r] of its own sequence. Position p of sequence s lives in
// block block_tables[s * table_stride + p / block_len], slot p % block_len.
struct AttentionBatch {
  std::span<const std::int32_t> query_start;   // [sequences + 1]
  std::span<const std::int32_t> positions;     // [rows], ascending by one within a sequence
  std::span<const std::int32_t> block_tables;  // [sequences, table_stride]
  std::int64_t table_stride = 0;
};

// One row to sample from.
struct SampleRow {
  float temperature = 1;         // 0: greedy (ties: the lowest id)
  int top_k = 0;                 // 0: all
  float top_p = 1, min_p = 0;
  float repetition_penalty = 1, presence_penalty = 0, frequency_penalty = 0;
  std::uint64_t seed = 0;
  std::int64_t position = 0;     // of the token to sample; the random number is a function of (seed, position) alone
  std::uint64_t sequence = 0;    // whose row it is: the same in all steps of a sequence, never given to another
  std::span<const std::int32_t> prompt;   // token ids, for the penalties
  std::span<const std::int32_t> output;   // token ids sampled so far, as far as the host knows them
  std::int32_t pending = -1;     // >= 0: the one after `output` is what row `pending` of the step before sampled
  std::span<const std::pair<std::int32_t, float>> bias;  // added to logits first; -infinity bans a token
  std::span<const std::int32_t> banned;   // token ids that must not be sampled (min_tokens' end ids, bad words)
  int logprobs = -1;             // -1: none; n: sampled token's and the n likeliest, of the unmodified logits
};

struct Sampled {
  std::int32_t token = 0;
  float logprob = 0;             // log softmax of the unmodified logits
  std::vector<std::pair<std::int32_t, float>> top;  // likeliest first, ties by lowest id
  std::string error;             // why this row could not be sampled (NaN, nothing left to sample); else empty
};

// The arrays of one step. They need not live longer than begin_step() on a device that copies them; on the CPU they
// must live until collect().
struct StepInput {
  std::span<const std::int32_t> ids;          // [rows] token ids; -1 - i: what sample row i of the step before sampled
  AttentionBatch attention;                   // without positions: the step issues no attention
  std::span<const std::int32_t> logits_rows;  // the rows whose logits are wanted, ascending
  std::span<const SampleRow> sample;          // [logits_rows]: one each
};

// The numbers of rows that a step's operations work on. A device that replays recorded steps rounds them up to those of
// a record; rows beyond the input's hold anything and give nothing.
struct StepShape {
  std::int64_t rows = 0, logits_rows = 0;
};

// What the steps of an engine are bounded by.
struct StepLimits {
  int max_rows = 0;        // token budget
  int max_sequences = 0;   // in a step, and rows of logits
  int max_positions = 0;   // of a sequence: session_len
  int vocab = 0;
  int block_len = 0;
};

inline constexpr int kMaxStepsInFlight = 2;
inline constexpr int kMaxTopLogprobs = 20;

class Ops {
 public:
  using Issue = std::function<void(const StepShape&)>;

  virtual ~Ops() = default;

  virtual std::string_view device() const = 0;           // "cpu" | "cuda"
  virtual std::string_view instruction_set() const = 0;  // "avx512", "sm_90", ...
  virtual bool asynchronous() const { return false; }    // run_step returns before the step is computed
  virtual Precision precision(DType weight) const = 0;
  virtual std::size_t free_memory() const = 0;           // bytes that may still be allocated, by each of the ranks

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
  virtual std::unique_ptr<KvCache> make_kv_cache(const KvLayout& layout, int num_blocks) = 0;

  // Once, before the first step: makes what steps need (nothing is allocated in a step), measures which way of a
  // product is fastest, records the steps that will be replayed. `linears` are all weights that steps multiply with;
  // `issue` is what every run_step() will be called with; it may be called with any StepShape within the limits.
  // Also before that, a device takes steps, with the rows that they have: the limits then grow with what comes.
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

  // out [rows, hidden] residual type <- table rows of the step's ids.
  virtual void embed(const Tensor& out, const Embedding& table) = 0;

  // residual += delta (when delta has data); out = residual / sqrt(mean(residual^2) + eps) * weight.
  // residual [rows, hidden] residual type; delta [rows, hidden] product type; weight [hidden] f32; out [rows, hidden]
  // activation type.
  virtual void rms_norm(const Tensor& out, const Tensor& residual, const Tensor& delta, const float* weight,
                        float eps) = 0;

  // out [rows, n] product type or f32 = in [rows, k] activation type * weight^T + bias.
  virtual void linear(const Tensor& out, const Tensor& in, const Linear& weight) = 0;

  // qkv [rows, (heads + 2 * kv_heads) * head_dim] product type: q heads, then k heads, then v heads. Rotates q in place
  // and k, half-split pairs (d, d + head_dim / 2) as Hugging Face has it, with cos_sin [positions, head_dim] on the
  // device: cosines in the first half of a row, sines in the second. Stores k and v of every row of the step into the
  // cache of `layer`.
  virtual void rotary_store(const Tensor& qkv, const float* cos_sin, KvCache& cache, int layer, int heads) = 0;

  // out [rows, heads * head_dim] activation type = softmax(q k^T * scale) v, over the cache; q as rotary_store left it.
  virtual void attention(const Tensor& out, const Tensor& qkv, const KvCache& cache, int layer, int heads,
                         float scale) = 0;

  // out [rows, inter] activation type = silu(gate_up[:, :inter]) * gate_up[:, inter:]; gate_up product type.
  virtual void silu_mul(const Tensor& out, const Tensor& gate_up) = 0;

  // out [logits rows, cols] = in[the step's logits_rows, :], same element type.
  virtual void gather_rows(const Tensor& out, const Tensor& in) = 0;

  // logits [logits rows, vocab] f32, by the step's SampleRows. Overwrites logits.
  virtual void sample(const Tensor& logits) = 0;

  // Tensor parallel ranks. All ranks issue the same operations in the same order, each on its own thread: a rank waits
  // in an exchange until the others have come.
  virtual int ranks() const { return 1; }
  virtual int rank() const { return 0; }
  // tensor [rows, cols] = the sum of all ranks' tensors, added in the order of the ranks.
  virtual void all_reduce(const Tensor& tensor) { (void)tensor; }
  // out [rows, ranks * cols] = the ranks' in [rows, cols] side by side.
  virtual void all_gather(const Tensor& out, const Tensor& in) { (void)out, (void)in; }
  // This rank's step has failed and it will not come to the next exchange: the ranks that wait for it get an
  // Error(internal) with `why`, as do all that come before resume_exchange(). That is called on every rank once all of
  // them are out of the step.
  virtual void abort_exchange(std::string_view why) noexcept { (void)why; }
  virtual void resume_exchange() {}
};

// Exchange between the ranks of one process, for devices whose memory is the host's. Calls block until all ranks came.
class LocalGroup;
std::shared_ptr<LocalGroup> make_local_group(int ranks);

// threads: 0 means as many as there are processors. Env CHARONIA_ISA=portable|avx2|avx512|avx512_bf16 forces an
// instruction set (one that the processor lacks is refused). group: of which this is rank `rank`; null: alone.
std::unique_ptr<Ops> make_cpu_ops(int threads, std::shared_ptr<LocalGroup> group = nullptr, int rank = 0);

}  // namespace charonia::ops
