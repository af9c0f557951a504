// A device: what it is, its memory, and what is kept there (weights, KV blocks).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "ops/kv_quant.h"
#include "ops/quant_weight.h"
#include "ops/tensor.h"

namespace charonia::ops {

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

  // Bytes of one block: of k and v of one head in one layer, of one layer, of all layers.
  std::size_t head_bytes() const {
    if (quant_bits != 0) return kv_quant_head_bytes(head_dim, block_len, quant_bits);
    return std::size_t{2} * static_cast<std::size_t>(head_dim) * static_cast<std::size_t>(block_len) * size_of(dtype);
  }
  std::size_t layer_bytes() const { return head_bytes() * static_cast<std::size_t>(kv_heads); }
  std::size_t block_bytes() const { return layer_bytes() * static_cast<std::size_t>(num_layers); }
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

class Device {
 public:
  virtual ~Device() = default;

  virtual std::string_view device() const = 0;           // "cpu" | "cuda" | "null"
  virtual std::string_view instruction_set() const = 0;  // "avx512", "sm_90", ...
  // Why the device is slower than it could be, and the remedy, for the user; empty: it is not. After Steps::prepare().
  virtual std::string warning() const = 0;
  // Which kernels operations go to, a line each, for people to read; empty where there is no choice. After
  // Steps::prepare(), between steps.
  virtual std::vector<std::string> report() const { return {}; }
  // How often a library rejected a GEMM that it had been chosen for, so that an own kernel took it. From any thread.
  virtual std::int64_t gemms_rejected() const { return 0; }
  virtual Precision precision(DType weight) const = 0;
  virtual std::size_t free_memory() const = 0;  // bytes that may still be allocated, by each of the ranks

  // Copies are complete on return, after all that was issued before them. Only tests download: what the engine needs
  // of a step comes with Steps::collect().
  virtual std::unique_ptr<Buffer> allocate(std::size_t bytes) = 0;
  virtual void upload(void* device, const void* host, std::size_t bytes) = 0;
  virtual void download(void* host, const void* device, std::size_t bytes) = 0;

  // `parts` are stacked along the rows (out_features); each may have its own element type and is converted to `weight`.
  // bias: empty or one entry per part (an entry without data is zeros).
  virtual std::unique_ptr<Linear> make_linear(std::span<const HostMatrix> parts, std::span<const HostMatrix> bias,
                                              DType weight) = 0;
  virtual std::unique_ptr<Embedding> make_embedding(const HostMatrix& table, DType weight) = 0;
  virtual std::unique_ptr<Experts> make_experts(std::span<const ExpertSource> experts, DType weight) = 0;
  // The same of quantised weights, which stay quantised. Parts are of one format, and of one order() where they have
  // one; where their input scales differ the largest holds for all. `data`: the weight type that precision() is asked
  // for elsewhere: inputs and outputs have its types. Sources are read and not kept. Throws Error(unsupported), naming
  // the weight and what would work, for a format that the device does not have.
  virtual std::unique_ptr<Linear> make_quantised_linear(std::span<const QuantSource* const> parts,
                                                        std::span<const HostMatrix> bias, DType data) = 0;
  virtual std::unique_ptr<Experts> make_quantised_experts(std::span<const QuantExpertSource> experts, DType data) = 0;
  // Bytes of the scratch memory that Operations::experts() takes for up to `rows` rows.
  virtual std::size_t experts_scratch_bytes(const ExpertsShape& shape, std::int64_t rows) const = 0;

  // The first `committed` blocks have memory; -1: all have.
  virtual std::unique_ptr<KvCache> make_kv_cache(const KvLayout& layout, int num_blocks, int committed = -1) = 0;
  // Provides memory for the first `num_blocks` blocks of a cache; those that have it stay as they are. Throws
  // Error(resource_exhausted), changing nothing. Between steps.
  virtual void commit_blocks(KvCache& cache, int num_blocks) = 0;
};

}  // namespace charonia::ops
