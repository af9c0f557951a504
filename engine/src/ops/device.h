// A device: its properties, its memory, and the data that it stores (weights, KV blocks).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/cache_kind.h"
#include "base/dtype.h"
#include "ops/kv_quant.h"
#include "ops/low_rank.h"
#include "ops/quant_weight.h"
#include "ops/tensor.h"

namespace charonia::ops {

// A weight [out_features, in_features] in the device's layout, and its optional bias [out_features].
class Linear {
 public:
  virtual ~Linear() = default;
  std::int64_t out_features() const { return n_; }
  std::int64_t in_features() const { return k_; }
  std::size_t bytes() const { return bytes_; }  // bytes that one GEMM reads
  // Ranks that each compute the whole GEMM get the same bits, as the choice of experts needs. Otherwise each rank of a GPU
  // chooses its kernel by its own measurements. Call it before the weight is used.
  void keep_order() { ordered_ = true; }
  bool ordered() const { return ordered_; }

 protected:
  std::int64_t n_ = 0, k_ = 0;
  std::size_t bytes_ = 0;

 private:
  bool ordered_ = false;
};

// The weights of one expert: gate and up [inter, hidden], down [hidden, inter]. Either all experts of a layer have a
// bias of a matrix, or none has it.
struct ExpertSource {
  HostMatrix gate, up, down;
  ExpertBiases bias{};
};

// The experts of a layer in the device's layout.
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

// A table [vocab, hidden] of rows to gather, in the weight type.
class Embedding {
 public:
  virtual ~Embedding() = default;
  std::size_t bytes() const { return bytes_; }  // of its own memory

 protected:
  std::size_t bytes_ = 0;
};

// The element types of the device's computations, for a weight type.
struct Precision {
  DType weight;
  DType residual;    // the residual stream
  DType gemm_out;    // outputs of linear() (except logits, which are always f32)
  DType activation;  // inputs of linear(), and outputs of norms, activations and attention
  DType kv;          // elements of KV blocks
};

// The cache of one layer. Attention needs k_dim = v_dim; or v_dim = 0 and one head, for latent attention
// (Operations::latent_store()).
struct KvLayer {
  CacheKind kind = CacheKind::full;
  int kv_heads = 0, k_dim = 0, v_dim = 0;
  int storage = -1;  // the earlier layer whose k and v this layer reads; -1: its own
  // Of kind `state`, which has no heads: the f32 numbers of a slot, on this rank. The layer's block defines their
  // order: first the columns of its short convolution [kernel - 1, channels] (ShortConvParams), then the other numbers.
  std::int64_t state_floats = 0;

  bool operator==(const KvLayer&) const = default;
};

struct KvLayout {
  std::vector<KvLayer> layers;
  int block_len = 0;         // tokens per block, in all kinds of kTableKinds
  DType dtype = DType::f32;  // the type of k and v in computations and, if quant_bits is 0, in the cache
  int quant_bits = 0;        // 8 or 4: the cache stores integers; kKvFp8: FP8 (kv_quant.h); 0: elements of `dtype`
  int window = 0;            // the widest window of the layers of kind `window`

  // Throws Error(invalid_argument) if a number is out of its range or a layer cannot share its storage.
  void check() const;

  // The layer whose memory `layer` uses.
  std::size_t storage_of(std::size_t layer) const {
    return layers[layer].storage < 0 ? layer : static_cast<std::size_t>(layers[layer].storage);
  }
  // Bytes of one block or slot: of k and v of one head in one layer, of one layer, of all layers of a kind. A layer
  // that shares its storage adds none. Slots of a layer begin at multiples of 64 bytes.
  std::size_t head_bytes(const KvLayer& layer) const;
  std::size_t layer_bytes(const KvLayer& layer) const;
  std::size_t block_bytes(CacheKind kind) const;
  // Bytes of the first blocks of each kind.
  std::size_t bytes(const PerKind<int>& num_blocks) const;
};

// The KV blocks of all layers. All values in memory are finite at all times.
class KvCache {
 public:
  virtual ~KvCache() = default;
  const KvLayout& layout() const { return layout_; }
  const PerKind<int>& num_blocks() const { return num_blocks_; }  // 0 for a kind without layers
  // The device's address of a block or slot in a layer with its own storage: KvLayout::layer_bytes(). Null if the
  // device has no memory for it.
  virtual std::byte* block(std::size_t /*layer*/, int /*block*/) const { return nullptr; }
  // Bytes of the blocks that the system allocates only when they are written. Any thread.
  virtual std::size_t untouched_bytes() const { return 0; }
  // Throws Error(internal) if the cache does not have these numbers of blocks.
  void check_commit(const PerKind<int>& num_blocks) const;

 protected:
  // Throws Error(invalid_argument) if the layout is invalid or a kind with layers has no blocks.
  KvCache(const KvLayout& layout, const PerKind<int>& num_blocks);

  KvLayout layout_;
  PerKind<int> num_blocks_;
};

// A range of the device's memory.
struct DevicePart {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};

class Device {
 public:
  virtual ~Device() = default;

  virtual std::string_view device() const = 0;           // "cpu" | "cuda" | "null"
  virtual std::string_view instruction_set() const = 0;  // "avx512", "sm_90", ...
  // A warning for the user if the device is slower than it could be, with the remedy; empty if it is not. Valid after
  // Steps::prepare().
  virtual std::string warning() const = 0;
  // The kernel that each operation uses, one line each, for people to read; empty if there is no choice. Call after
  // Steps::prepare(), between steps.
  virtual std::vector<std::string> report() const { return {}; }
  // How many GEMMs a library rejected although it was chosen for them; a built-in kernel computed these. Callable from
  // any thread.
  virtual std::int64_t gemms_rejected() const { return 0; }
  virtual Precision precision(DType weight) const = 0;
  virtual std::size_t free_memory() const = 0;  // bytes that each rank may still allocate

  // Copies are complete on return, and are ordered after all earlier work. The engine uses them between steps, for
  // blocks of the KV cache (KvCache::block()).
  virtual std::unique_ptr<Buffer> allocate(std::size_t bytes) = 0;
  virtual void upload(void* device, const void* host, std::size_t bytes) = 0;
  virtual void download(void* host, const void* device, std::size_t bytes) = 0;
  template <class T>
  std::unique_ptr<Buffer> copy_of(std::span<T> values) {
    auto out = allocate(values.size_bytes());
    upload(out->data(), values.data(), values.size_bytes());
    return out;
  }
  // Like upload() and download(), for several parts. In host memory, one part follows another.
  virtual void upload_parts(std::span<const DevicePart> parts, const std::byte* host) {
    for (const auto& part : parts) upload(part.data, std::exchange(host, host + part.bytes), part.bytes);
  }
  virtual void download_parts(std::byte* host, std::span<const DevicePart> parts) {
    for (const auto& part : parts) download(std::exchange(host, host + part.bytes), part.data, part.bytes);
  }

  // Adapter slots (low_rank.h), on a device that has them. The images of adapters are in host memory.
  virtual bool has_adapter_slots() const { return false; }
  // Call once, before Steps::prepare(). Throws Error(resource_exhausted).
  virtual void make_adapter_slots(const AdapterSlots& slots);
  // Host memory that the device copies from without a wait of the caller, if the system has enough of it. On a device
  // whose memory is host memory, the same as allocate().
  virtual std::unique_ptr<Buffer> allocate_host(std::size_t bytes) { return allocate(bytes); }
  // Copies an image to a slot. Ordered after the steps that were run before, and before the next step. The image must
  // live until the next step is collected.
  virtual void fill_adapter_slot(int slot, const Buffer& image);

  // Stacks `parts` along the rows (out_features). Each part may have its own element type and is converted to `weight`.
  // bias: empty, or one entry per part (an entry without data means zeros).
  virtual std::unique_ptr<Linear> make_linear(std::span<const HostMatrix> parts, std::span<const HostMatrix> bias,
                                              DType weight) = 0;
  // Call it for a weight that another Ops of the same device has made, before linear() reads it in a step here.
  virtual void share_linear(const Linear& /*weight*/) {}
  // in_host_memory: a GPU does not copy the table. Its kernels read the rows from memory of the host.
  virtual std::unique_ptr<Embedding> make_embedding(const HostMatrix& table, DType weight,
                                                    bool in_host_memory = false) = 0;
  // The table is `weight` [vocab, hidden], which make_linear() made and which must outlive it. Its bytes() are 0. Also
  // a weight of make_quantised_linear(): on a GPU one that it dequantises, elsewhere one whose activations are not
  // converted.
  virtual std::unique_ptr<Embedding> make_embedding(const Linear& weight) = 0;
  virtual std::unique_ptr<Experts> make_experts(std::span<const ExpertSource> experts, DType weight) = 0;
  // Like make_linear() and make_experts(), for weights that stay quantised. All parts have one format and the same
  // order(). If their input scales differ, the largest is used for all. `data`: the weight type for precision(), which
  // gives the types of inputs and outputs. Sources are read and not kept. The CUDA device stores weights that it
  // dequantises (cuda_dequantises()) like those of make_linear() and make_experts(). Throws Error(unsupported), with the
  // weight's name and a working alternative, if the device does not support the format.
  virtual std::unique_ptr<Linear> make_quantised_linear(std::span<const QuantSource* const> parts,
                                                        std::span<const HostMatrix> bias, DType data) = 0;
  virtual std::unique_ptr<Experts> make_quantised_experts(std::span<const QuantExpertSource> experts, DType data) = 0;
  // Size of the scratch memory of Operations::experts() for up to `rows` rows, in bytes.
  virtual std::size_t experts_scratch_bytes(const ExpertsShape& shape, std::int64_t rows) const = 0;

  // The first `committed` blocks of each kind have memory; empty: all blocks.
  virtual std::unique_ptr<KvCache> make_kv_cache(const KvLayout& layout, const PerKind<int>& num_blocks,
                                                 const std::optional<PerKind<int>>& committed = {}) = 0;
  // Provides memory for the first `num_blocks` blocks of each kind. Blocks that have memory keep their contents. Throws
  // Error(resource_exhausted) if memory runs out: then some layers may have the memory, which does no harm. Call
  // between steps.
  virtual void commit_blocks(KvCache& cache, const PerKind<int>& num_blocks) = 0;
};

}  // namespace charonia::ops
