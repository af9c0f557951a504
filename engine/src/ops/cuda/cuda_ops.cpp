#include "ops/cuda/cuda_ops.h"

#include <cstring>
#include <utility>

#include "base/text.h"
#include "charonia/error.h"
#include "ops/check_step.h"
#include "ops/cuda/collectives/nccl.h"
#include "ops/cuda/cuda_quant_weights.h"
#include "ops/cuda/kernels/collective.h"
#include "ops/cuda/kernels/delta_net.h"
#include "ops/cuda/kernels/latent.h"
#include "ops/cuda/kernels/prefetch.h"
#include "ops/cuda/kernels/rows.h"
#include "ops/cuda/kernels/short_conv.h"
#include "ops/cuda/kernels/w8a8_gemm.h"

namespace charonia::cuda {

using ops::Tensor;

namespace {

// Calls `what` only for an error: steps without a captured graph make this check hundreds of times.
template <class Text>
void require(bool holds, std::string_view op, Text what) {
  if (!holds) [[unlikely]]
    throw Error(ErrorCode::internal, cat("ops::", op, ": ", what()));
}

std::string shape_of(const Tensor& tensor) {
  return cat(to_string(tensor.dtype), " [", tensor.rows, ", ", tensor.cols, "]");
}

const CacheLayer& layer_of(const CudaKvCache& cache, int layer, std::string_view op, bool latent = false) {
  const auto& layers = cache.layout().layers;
  require(layer >= 0 && layer < std::ssize(layers), op,
          [&] { return cat("there is no layer ", layer, " of ", layers.size()); });
  const auto& how = layers[static_cast<std::size_t>(layer)];
  require(latent ? how.v_dim == 0 : how.k_dim == how.v_dim, op,
          [&] { return cat("heads of k have ", how.k_dim, " elements, heads of v ", how.v_dim); });
  return cache.layer(layer);
}

// The slots of a layer of kind `state`, which has at least this many numbers.
StateLayer state_of(const CudaKvCache& cache, int layer, std::int64_t floats, std::string_view op) {
  const auto& layout = cache.layout();
  require(layer >= 0 && layer < std::ssize(layout.layers) &&
              layout.layers[static_cast<std::size_t>(layer)].state_floats >= floats,
          op, [&] { return cat("layer ", layer, " has no state of ", floats, " numbers"); });
  const auto slot = layout.layer_bytes(layout.layers[static_cast<std::size_t>(layer)]) / sizeof(float);
  return {static_cast<float*>(cache.layer(layer).data), static_cast<std::int64_t>(slot)};
}

bool is_float(DType type) { return type == DType::f32 || type == DType::f16 || type == DType::bf16; }

std::size_t tensor_bytes(const Tensor& tensor) {
  return static_cast<std::size_t>(tensor.rows * tensor.cols) * size_of(tensor.dtype);
}

}  // namespace

CudaOps::CudaOps(const ops::CudaOptions& options, std::shared_ptr<ops::NcclGroup> group, int rank)
    : options_(options),
      device_(device_info(options.device)),
      instruction_set_(cat("sm_", device_.major, device_.minor)),
      group_(std::move(group)),
      rank_(rank),
      gemms_(device_, options.reproducible),
      prompts_(device_, {{.asked = options.wgmma_prompts, .memory = autotune_cache_path()}}),
      decodes_(device_, {{.memory = autotune_cache_path()}}),
      experts_(device_, {{.asked = options.wgmma_experts, .memory = autotune_cache_path()}, options.reproducible}) {}

CudaOps::~CudaOps() {
  const OnDevice on(device_.index);
  try {
    stream_.wait("the end of the device");  // issued operations use the members
  } catch (const Error&) {
  }
}

ops::Precision CudaOps::precision(DType weight) const { return ops::cuda_precision(weight); }

std::size_t CudaOps::free_memory() const {
  const OnDevice on(device_.index);
  return free_device_bytes() / static_cast<std::size_t>(group_ ? group_->ranks_per_device() : 1);
}

std::unique_ptr<ops::Buffer> CudaOps::allocate(std::size_t bytes) {
  const OnDevice on(device_.index);
  return std::make_unique<CudaBuffer>(bytes);
}

void CudaOps::upload(void* device, const void* host, std::size_t bytes) {
  const OnDevice on(device_.index);
  stream_.upload(device, host, bytes, "upload");
  stream_.wait("upload");
}

void CudaOps::download(void* host, const void* device, std::size_t bytes) {
  const OnDevice on(device_.index);
  stream_.download(host, device, bytes, "download");
  stream_.wait("download");
}

// Page-locked memory, so that the copies of all parts need one wait. Null if the machine has too little.
std::byte* CudaOps::memory_for(std::span<const ops::DevicePart> parts) {
  std::size_t bytes = 0;
  for (const auto& part : parts) bytes += part.bytes;
  try {
    if (parts_.bytes() < bytes) parts_ = PinnedMemory(bytes);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::resource_exhausted) throw;
    return nullptr;
  }
  return parts_.data();
}

void CudaOps::upload_parts(std::span<const ops::DevicePart> parts, const std::byte* host) {
  const OnDevice on(device_.index);
  auto* memory = memory_for(parts);
  if (memory == nullptr) return Ops::upload_parts(parts, host);
  for (const auto& [data, bytes] : parts) {
    std::memcpy(memory, std::exchange(host, host + bytes), bytes);
    stream_.upload(data, std::exchange(memory, memory + bytes), bytes, "upload of parts");
  }
  stream_.wait("upload of parts");
}

void CudaOps::download_parts(std::byte* host, std::span<const ops::DevicePart> parts) {
  const OnDevice on(device_.index);
  auto* const begin = memory_for(parts);
  if (begin == nullptr) return Ops::download_parts(host, parts);
  auto* memory = begin;
  for (const auto& [data, bytes] : parts) {
    stream_.download(std::exchange(memory, memory + bytes), data, bytes, "download of parts");
  }
  stream_.wait("download of parts");
  std::memcpy(host, begin, static_cast<std::size_t>(memory - begin));
}

std::unique_ptr<ops::Linear> CudaOps::make_linear(std::span<const ops::HostMatrix> parts,
                                                  std::span<const ops::HostMatrix> bias, DType weight) {
  const OnDevice on(device_.index);
  return std::make_unique<CudaLinear>(parts, bias, weight, gemms_.packs(weight), weights_upload());
}

std::unique_ptr<ops::Linear> CudaOps::make_quantised_linear(std::span<const ops::QuantSource* const> parts,
                                                            std::span<const ops::HostMatrix> bias, DType data) {
  const OnDevice on(device_.index);
  if (!parts.empty() && ops::cuda_dequantises(parts[0]->format())) {
    return std::make_unique<CudaLinear>(QuantParts(parts), bias, data, gemms_.packs(data), weights_upload());
  }
  std::unique_ptr<CudaGemmWeight> linear;
  if (!parts.empty() && is_w8a8(parts[0]->format(), data, parts[0]->cols(), device_)) {
    linear = std::make_unique<CudaW8a8Linear>(parts, bias, data, gemms_.packs(data), weights_upload());
  } else {
    linear = std::make_unique<CudaQuantLinear>(parts, bias, data, weights_upload());
  }
  gemms_.reserve(linear->gemm());
  return linear;
}

void CudaOps::share_linear(const ops::Linear& weight) {
  const OnDevice on(device_.index);
  if (const auto gemm = static_cast<const CudaGemmWeight&>(weight).gemm(); gemm.quant) gemms_.reserve(gemm);
}

std::unique_ptr<ops::Embedding> CudaOps::make_embedding(const ops::HostMatrix& table, DType weight,
                                                        bool in_host_memory) {
  const OnDevice on(device_.index);
  return std::make_unique<CudaEmbedding>(table, weight, weights_upload(), in_host_memory);
}

std::unique_ptr<ops::Embedding> CudaOps::make_embedding(const ops::Linear& weight) {
  return std::make_unique<CudaEmbedding>(static_cast<const CudaLinear&>(weight));
}

std::unique_ptr<ops::KvCache> CudaOps::make_kv_cache(const ops::KvLayout& layout, const PerKind<int>& num_blocks,
                                                     const std::optional<PerKind<int>>& committed) {
  const OnDevice on(device_.index);
  return std::make_unique<CudaKvCache>(layout, num_blocks, committed.value_or(num_blocks), device_.fp8);
}

void CudaOps::commit_blocks(ops::KvCache& cache, const PerKind<int>& num_blocks) {
  cache.check_commit(num_blocks);
  const OnDevice on(device_.index);
  static_cast<CudaKvCache&>(cache).commit(num_blocks);
}

// Issues one launch per pair on the stream, because a pair may copy a block that the previous pair has written. (A pair
// of equal blocks copies nothing.)
void CudaOps::copy_blocks(ops::KvCache& cache, std::span<const BlockCopy> copies) {
  const OnDevice on(device_.index);
  const auto& kv = static_cast<const CudaKvCache&>(cache);
  for (const auto& [from, to, kind] : copies) {
    const int num_blocks = kv.num_blocks()[kind];
    if (num_blocks == 0) continue;
    require(from >= 0 && from < num_blocks && to >= 0 && to < num_blocks, "copy_blocks", [&] {
      return cat("cannot copy block ", from, " to ", to, ": the cache has ", num_blocks, " blocks");
    });
  }
  for (const auto& [from, to, kind] : copies) {
    if (from != to) kv.copy_block(stream_, kind, from, to);
  }
}

void CudaOps::embed(const Tensor& out, const ops::Embedding& table, float scale) {
  const auto& t = static_cast<const CudaEmbedding&>(table);
  require(out.cols == t.cols() && is_float(out.dtype), "embed",
          [&] { return cat("out ", shape_of(out), " and a table of ", t.cols(), " columns do not fit together"); });
  if (tracing_) {
    needs_.facts.vocab = t.rows();
    return;
  }
  require(needs_.facts.vocab == t.rows(), "embed",
          [&] { return "the table is not the one that prepare() was called with"; });
  require_step("embed", out.rows, begun_.capacity.rows);
  // Without a sampler no id refers to a sample.
  cuda::embed(stream_, out, t.table(), uploaded<std::int32_t>(begun_.layout.ids),
              sampler_ ? sampler_->sampled() : nullptr, scale);
}

void CudaOps::add_embedding(const Tensor& x, const ops::Embedding& table, const ops::EmbeddingSum& how) {
  const auto& t = static_cast<const CudaEmbedding&>(table);
  require(x.cols == t.cols() && x.dtype == t.table().type && how.size > 0 && x.cols % how.size == 0 &&
              how.weight != nullptr,
          "add_embedding", [&] {
            return cat("x ", shape_of(x), ", groups of ", how.size, " and a table of ", t.cols(), " columns of type ",
                       to_string(t.table().type), " do not fit together");
          });
  if (tracing_) return;
  require(needs_.facts.vocab <= t.rows(), "add_embedding",
          [&] { return cat("the table has ", t.rows(), " rows for ", needs_.facts.vocab, " token ids"); });
  require_step("add_embedding", x.rows, begun_.capacity.rows);
  cuda::add_embedding(stream_, x, t.table().data, uploaded<std::int32_t>(begun_.layout.ids),
                      sampler_ ? sampler_->sampled() : nullptr, how);
}

// If the next operation is the input of a weight that takes codes, calls `write` to write codes instead of `out`.
// Returns false if not.
template <class Write>
bool CudaOps::write_codes(const Tensor& out, Write write) {
  const auto* const weight = std::exchange(announced_linear_, nullptr);
  written_codes_ = {};
  if (weight == nullptr || out.rows == 0) return false;
  auto gemm = static_cast<const CudaGemmWeight&>(*weight).gemm();
  gemm.rows = out.rows;
  if (gemm.k != out.cols || gemm.type != out.dtype) return false;
  const auto codes = gemms_.room_for_codes(gemm);
  if (!codes || !write(*codes)) return false;
  written_codes_ = {weight, out.data, *codes};
  return true;
}

void CudaOps::rms_norm(const Tensor& out, const Tensor& residual, const Tensor& delta, const ops::NormParams& how) {
  require(out.rows == residual.rows && out.cols == residual.cols, "rms_norm",
          [&] { return cat("residual ", shape_of(residual), " must have the shape of out ", shape_of(out)); });
  require(delta.data == nullptr || (delta.rows == residual.rows && delta.cols == residual.cols), "rms_norm",
          [&] { return cat("delta ", shape_of(delta), " must have the shape of residual ", shape_of(residual)); });
  if (tracing_) return;
  const bool written = write_codes(out, [&](const RowCodes& codes) {
    return how.delta_weight == nullptr && rms_norm_codes(stream_, codes, out, residual, delta, how);
  });
  if (!written) cuda::rms_norm(stream_, out, residual, delta, how);
}

void CudaOps::qk_squares(const Tensor& sums, const Tensor& qkv, std::int64_t q_size, std::int64_t k_size) {
  require(sums.dtype == DType::f32 && sums.cols == 2 && sums.stride == 2 && sums.rows == qkv.rows && q_size >= 1 &&
              k_size >= 1 && q_size + k_size <= qkv.cols,
          "qk_squares", [&] {
            return cat("sums ", shape_of(sums), " must be fp32 [rows, 2], and qkv ", shape_of(qkv),
                       " must have at least ", q_size, " + ", k_size, " columns");
          });
  if (!tracing_) cuda::qk_squares(stream_, static_cast<float*>(sums.data), qkv, q_size, k_size);
}

// Checks the arguments of linear() and returns its GEMM.
Gemm CudaOps::gemm_of(const Tensor& out, const Tensor& in, const ops::Linear& weight) {
  const auto& w = static_cast<const CudaGemmWeight&>(weight);
  require(in.dtype == w.type() && (out.dtype == w.type() || out.dtype == DType::f32), "linear", [&] {
    return cat("in ", shape_of(in), " must have the weight's type ", to_string(w.type()), ", and out ", shape_of(out),
               " that type or fp32");
  });
  require(in.cols == w.in_features() && out.cols == w.out_features() && in.rows == out.rows, "linear", [&] {
    return cat("in ", shape_of(in), ", out ", shape_of(out), " and a weight [", w.out_features(), ", ", w.in_features(),
               "] do not fit together");
  });
  auto gemm = w.gemm();
  gemm.out = out.data;
  gemm.out_type = out.dtype;
  gemm.out_stride = out.stride;
  gemm.in = in.data;
  gemm.in_stride = in.stride;
  gemm.rows = in.rows;
  return gemm;
}

// In the largest step, all rows of the tensors are used.
void CudaOps::trace_gemm(Gemm gemm) {
  const auto [at, added] = trace_.row_capacity.try_emplace({gemm.in, gemm.out}, gemm.rows);
  at->second = std::min(at->second, gemm.rows);
  gemm.row_capacity = gemm.rows;
  trace_.gemms.push_back(gemm);
}

void CudaOps::linear(const Tensor& out, const Tensor& in, const ops::Linear& weight) {
  auto gemm = gemm_of(out, in, weight);
  if (in.rows == 0) return;
  if (tracing_) {
    trace_gemm(gemm);
    return;
  }
  if (const auto found = trace_.row_capacity.find({gemm.in, gemm.out}); found != trace_.row_capacity.end()) {
    gemm.row_capacity = found->second;
  }
  const auto written = std::exchange(written_codes_, {});
  const bool given = written.weight == &weight && written.instead_of == in.data;
  gemms_.run(stream_, given ? GemmRunner::codes_given(gemm, written.codes) : gemm);
}

void CudaOps::rotary_store(const Tensor& qkv, const ops::RotaryParams& how, ops::KvCache& cache, int layer, int heads) {
  const auto& kv = static_cast<const CudaKvCache&>(cache);
  const auto& of_layer = layer_of(kv, layer, "rotary_store");
  const int dim = of_layer.head_dim, kv_heads = of_layer.stores ? of_layer.kv_heads : 0;
  require(is_float(qkv.dtype) && qkv.cols == std::int64_t{heads + 2 * kv_heads} * dim, "rotary_store", [&] {
    return cat("qkv ", shape_of(qkv), ", ", heads, " heads and ", kv_heads, " KV heads of ", dim,
               " do not fit together");
  });
  ops::check_rotation(how, dim);
  need_cache(kv);
  if (tracing_) return;
  require_step("rotary_store", qkv.rows, begun_.capacity.rows);
  require(begun_.attention, "rotary_store", [&] { return "the step has no positions"; });
  const auto& at = begun_.layout;
  const auto kind = kv.layout().layers[static_cast<std::size_t>(layer)].kind;
  cuda::rotary_store(stream_, qkv, how, of_layer, heads, uploaded<std::int32_t>(at.positions),
                     uploaded<std::int32_t>(at.rotary_rows), uploaded<std::int32_t>(at.kv_slots[kind]));
}

void CudaOps::latent_store(const Tensor& queries, const Tensor& plain, const Tensor& q, const Tensor& latent,
                           const ops::LatentParams& how, ops::KvCache& cache, int layer, int heads) {
  const auto& kv = static_cast<const CudaKvCache&>(cache);
  const auto& of_layer = layer_of(kv, layer, "latent_store", true);
  const auto dim = latent_row(of_layer);
  const auto fits = [&](const Tensor& tensor, std::int64_t cols) {
    return tensor.dtype == of_layer.dtype && tensor.rows == latent.rows && tensor.cols == cols;
  };
  require(fits(latent, dim) && fits(queries, std::int64_t{heads} * dim) && fits(plain, plain.cols) &&
              fits(q, plain.cols + std::int64_t{heads} * how.rotary_dim) && plain.cols % heads == 0,
          "latent_store", [&] {
            return cat("latent ", shape_of(latent), ", queries ", shape_of(queries), ", q ", shape_of(q), ", plain ",
                       shape_of(plain), " and ", heads, " heads do not fit together");
          });
  require(how.norm != nullptr && how.cos_sin != nullptr && how.rotary_dim >= 2 && how.rotary_dim % 2 == 0 &&
              how.rotary_dim < dim,
          "latent_store", [&] { return cat("needs a norm, a table, and an even rotary_dim below ", dim); });
  need_cache(kv);
  if (tracing_) return;
  require_step("latent_store", latent.rows, begun_.capacity.rows);
  require(begun_.attention, "latent_store", [&] { return "the step has no positions"; });
  const auto& at = begun_.layout;
  const auto kind = kv.layout().layers[static_cast<std::size_t>(layer)].kind;
  cuda::latent_store(stream_, queries, plain, q, latent, how, of_layer, heads, uploaded<std::int32_t>(at.positions),
                     uploaded<std::int32_t>(at.rotary_rows), uploaded<std::int32_t>(at.kv_slots[kind]));
}

// In a capture: prefetches the weights of the GEMMs after this attention, while memory is idle.
void CudaOps::prefetch_weights() {
  if (!prefetches_ || attentions_ >= trace_.weights.size()) return;
  for (const auto weight : trace_.weights[attentions_++]) {
    prefetch(prefetches_->fork(stream_), weight.data(), weight.size());
  }
}

void CudaOps::attention(const Tensor& out, const Tensor& qkv, const ops::KvCache& cache, int layer, int heads,
                        const ops::AttentionParams& how) {
  const auto& kv = static_cast<const CudaKvCache&>(cache);
  const auto& layers = kv.layout().layers;
  const bool latent = layer >= 0 && layer < std::ssize(layers) && layers[static_cast<std::size_t>(layer)].v_dim == 0;
  const auto& of_layer = layer_of(kv, layer, "attention", latent);
  const int dim = latent ? latent_row(of_layer) : of_layer.head_dim, kv_heads = of_layer.kv_heads;
  require(!latent || (qkv.dtype == of_layer.dtype && out.dtype == of_layer.dtype && out.rows == qkv.rows &&
                      out.cols % heads == 0 && out.cols <= qkv.cols && qkv.cols == std::int64_t{heads} * dim &&
                      how.window == 0 && how.soft_cap == 0 && how.alibi == nullptr && how.sinks == nullptr),
          "attention", [&] {
            return cat("out ", shape_of(out), ", queries ", shape_of(qkv), " and ", heads,
                       " heads do not fit latents of ", dim, " elements");
          });
  require(latent || (is_float(out.dtype) && out.rows == qkv.rows && out.cols == std::int64_t{heads} * dim &&
              qkv.cols == std::int64_t{heads + (of_layer.stores ? 2 * kv_heads : 0)} * dim && heads % kv_heads == 0),
          "attention", [&] {
            return cat("out ", shape_of(out), ", qkv ", shape_of(qkv), ", ", heads, " heads and ", kv_heads,
                       " KV heads of ", dim, " do not fit together");
          });
  require(how.scale > 0 && how.window >= 0 && how.soft_cap >= 0, "attention", [&] {
    return cat("scale ", how.scale, " must be above 0, window ", how.window, " and soft cap ", how.soft_cap,
               " at least 0");
  });
  const bool divides = !latent && attention_has_tiles(dim);  // otherwise one thread block takes all positions of a row
  const AttentionShape shape{.heads = heads,
                             .kv_heads = kv_heads,
                             .head_dim = dim,
                             .block_len = of_layer.block_len,
                             .kind = kv.layout().layers[static_cast<std::size_t>(layer)].kind,
                             .window = how.window,
                             .sms = divides ? device_.sms : 1,
                             .reproducible = options_.reproducible && divides,
                             .min_decode_split = decode_split_setting()};
  need_cache(kv);
  const auto index = need_attention(shape);
  if (tracing_) {
    trace_.attention.push_back(trace_.gemms.size());
    trace_.layers.resize(needs_.attention.size());
    trace_.layers[index].cache = of_layer;
    if (divides && qkv.dtype == of_layer.dtype && out.dtype == of_layer.dtype) add_scores(trace_.layers[index], how);
    return;
  }
  prefetch_weights();
  require_step("attention", out.rows, begun_.capacity.rows);
  require(begun_.attention, "attention", [&] { return "the step has no positions"; });
  const auto& at = begun_.layout;
  const auto& capacity = begun_.capacity.plans[index];
  const AttentionWork work{.decode = uploaded<AttentionItem>(at.plans[index].decode),
                           .prefill = uploaded<AttentionItem>(at.plans[index].prefill),
                           .counts = uploaded<std::int32_t>(at.counts) + counts_of_plan(index),
                           .max_decode = capacity.decode,
                           .max_prefill = capacity.prefill,
                           .block_tables = uploaded<std::int32_t>(at.tables),
                           .workspace = attention_[index].memory.data(),
                           .max_partials = attention_[index].bounds.partials,
                           .num_blocks = kv.num_blocks()[shape.kind],
                           .wide = wide_.data(),
                           .wide_at = plans_[index].wide_at,
                           .wide_blocks = plans_[index].wide_blocks};
  if (latent) return latent_attention(stream_, device_, out, qkv, of_layer, shape, how.scale, work);
  auto planned = needs_.attention[index];
  planned.wgmma = plans_[index].wgmma;
  planned.k_outside = decodes_.k_outside(index, out.rows);
  cuda::attention(stream_, device_, out, qkv, of_layer, planned, how, work);
}

StateRows CudaOps::state_rows() const {
  const auto* const rows = uploaded<std::int32_t>(begun_.layout.row_states);
  return {uploaded<StateItem>(begun_.layout.states), begun_.capacity.states,
          begun_.capacity.row_states > 0 ? rows : nullptr};
}

void CudaOps::short_conv(const Tensor& out, const Tensor& in, const ops::ShortConvParams& how, ops::KvCache& cache,
                         int layer) {
  const auto& kv = static_cast<const CudaKvCache&>(cache);
  require(is_float(in.dtype) && (out.dtype == in.dtype || out.dtype == DType::f32) && out.rows == in.rows &&
              in.cols == (how.gated ? 3 : 1) * out.cols,
          "short_conv", [&] { return cat("in ", shape_of(in), " and out ", shape_of(out), " do not fit together"); });
  require(how.kernel >= 2 && how.kernel <= 4 && !(how.silu && how.gated), "short_conv",
          [&] { return cat("kernel ", how.kernel, " must be 2 to 4, and silu not be gated"); });
  const auto state = state_of(kv, layer, (how.kernel - 1) * out.cols, "short_conv");
  need_cache(kv);
  if (tracing_) return;
  require_step("short_conv", out.rows, begun_.capacity.rows);
  // A captured step serves steps with other numbers of rows.
  cuda::short_conv(stream_, out, in, how, state, state_rows(), begun_.decode ? 0 : begun_.longest);
}

void CudaOps::delta_net(const Tensor& qkv, const Tensor& gates, const ops::DeltaNetParams& how, ops::KvCache& cache,
                        int layer) {
  const auto& kv = static_cast<const CudaKvCache&>(cache);
  require(how.fits() && is_float(qkv.dtype) && qkv.cols == how.columns() && gates.dtype == DType::f32 &&
              gates.rows == qkv.rows && gates.cols == std::int64_t{2} * how.v_heads,
          "delta_net", [&] {
            return cat("qkv ", shape_of(qkv), " and gates ", shape_of(gates), " do not fit ", how.k_heads, " and ",
                       how.v_heads, " heads of ", how.k_dim, " and ", how.v_dim, " elements");
          });
  const auto state = state_of(kv, layer, how.state + how.state_floats(), "delta_net");
  need_cache(kv);
  if (tracing_) return;
  require_step("delta_net", qkv.rows, begun_.capacity.rows);
  cuda::delta_net(stream_, qkv, gates, how, state, state_rows());
}

void CudaOps::gated_linear(const Tensor& out, const Tensor& gate_up, const Tensor& in, const ops::Linear& weight,
                           ops::Activation activation) {
  if (in.rows > 0 && out.dtype == gate_up.dtype && gate_up.cols == 2 * out.cols && gate_up.rows == out.rows &&
      activation.kind != ops::Activation::clamped_swiglu) {
    auto gemm = gemm_of(gate_up, in, weight);
    gemm.gate = activation.kind == ops::Activation::silu ? Gate::silu : Gate::gelu_tanh;
    if (tracing_) {
      trace_gemm(gemm);
      return;
    }
    gemm.out = out.data;
    gemm.out_stride = out.stride;
    if (gemms_.run_gated(stream_, gemm)) {
      announced_linear_ = nullptr;
      return;
    }
  }
  Ops::gated_linear(out, gate_up, in, weight, activation);
}

void CudaOps::gated_activation(const Tensor& out, const Tensor& gate_up, ops::Activation activation) {
  require(gate_up.cols == 2 * out.cols && gate_up.rows == out.rows, "gated_activation",
          [&] { return cat("gate_up ", shape_of(gate_up), " must be twice as wide as out ", shape_of(out)); });
  if (tracing_) return;
  const bool written = write_codes(
      out, [&](const RowCodes& codes) { return gated_activation_codes(stream_, codes, out, gate_up, activation); });
  if (!written) cuda::gated_activation(stream_, out, gate_up, activation);
}

void CudaOps::sigmoid_gate(const Tensor& x, const Tensor& gate) {
  require(gate.rows == x.rows && gate.cols == x.cols, "sigmoid_gate",
          [&] { return cat("gate ", shape_of(gate), " must have the shape of x ", shape_of(x)); });
  if (!tracing_) cuda::sigmoid_gate(stream_, x, gate);
}

void CudaOps::gated_norm(const Tensor& out, const Tensor& x, const Tensor& gate, const float* weight, float eps,
                         int head_dim) {
  require(x.rows == out.rows && gate.rows == out.rows && x.cols == out.cols && gate.cols == out.cols && head_dim > 0 &&
              out.cols % head_dim == 0,
          "gated_norm", [&] {
            return cat("x ", shape_of(x), " and gate ", shape_of(gate), " must have the shape of out ", shape_of(out),
                       ": heads of ", head_dim);
          });
  if (!tracing_) cuda::gated_norm(stream_, out, x, gate, weight, eps, head_dim);
}

void CudaOps::scale_logits(const Tensor& logits, float scale, float cap) {
  require(logits.dtype == DType::f32 && scale > 0 && cap >= 0, "scale_logits", [&] {
    return cat("logits ", shape_of(logits), " must be fp32, scale ", scale, " above 0, and cap ", cap, " at least 0");
  });
  if (!tracing_) cuda::scale_logits(stream_, logits, scale, cap);
}

void CudaOps::gather_rows(const Tensor& out, const Tensor& in) {
  require(out.dtype == in.dtype && out.cols == in.cols, "gather_rows",
          [&] { return cat("out ", shape_of(out), " must have the type and width of in ", shape_of(in)); });
  if (tracing_) return;
  require_step("gather_rows", out.rows, begun_.capacity.logits_rows);
  require_step("gather_rows", in.rows, begun_.capacity.rows);
  cuda::gather_rows(stream_, out, in, uploaded<std::int32_t>(begun_.layout.logits_rows));
}

void CudaOps::scatter_logits(const Tensor& out, const Tensor& in, const std::int32_t* columns) {
  require(out.dtype == DType::f32 && in.dtype == DType::f32 && in.rows == out.rows, "scatter_logits", [&] {
    return cat("in ", shape_of(in), " and out ", shape_of(out), " must be fp32, with the same rows");
  });
  if (!tracing_) cuda::scatter_logits(stream_, out, in, columns);
}

const std::int32_t* CudaOps::hidden_rows(std::string_view op, const Tensor& out, const Tensor& in, const Tensor& of) {
  require(out.dtype == in.dtype && out.cols == in.cols, op,
          [&] { return cat("out ", shape_of(out), " must have the type and width of in ", shape_of(in)); });
  if (tracing_) {
    needs_.facts.hidden_rows = of.rows;
    return nullptr;
  }
  require_step(op, (&of == &out ? in : out).rows, begun_.capacity.rows);
  return uploaded<std::int32_t>(begun_.layout.hidden_rows);
}

void CudaOps::store_rows(const Tensor& out, const Tensor& in) {
  if (const auto* rows = hidden_rows("store_rows", out, in, out)) cuda::store_rows(stream_, out, in, rows);
}

void CudaOps::load_rows(const Tensor& out, const Tensor& in) {
  if (const auto* rows = hidden_rows("load_rows", out, in, in)) cuda::gather_rows(stream_, out, in, rows);
}

void CudaOps::sample(const Tensor& logits) {
  require(logits.dtype == DType::f32 && logits.cols >= 1, "sample",
          [&] { return cat("logits ", shape_of(logits), " must be fp32"); });
  need_sampler(static_cast<int>(logits.cols), logits.rows);
  if (tracing_ || logits.rows == 0) return;
  require_step("sample", logits.rows, begun_.capacity.logits_rows);
  begun_.logits = logits;
  sample_rows(logits);
}

int CudaOps::ranks() const { return group_ ? group_->ranks() : 1; }

void CudaOps::abort_collectives(std::string_view why) noexcept {
  if (group_) group_->abort(rank_, why);
}

const DeviceMemory& CudaOps::collective_memory(std::size_t bytes) {
  if (tracing_) {
    trace_.collective_bytes = std::max(trace_.collective_bytes, bytes);
  } else if (collective_.bytes() < bytes) {
    throw Error(ErrorCode::internal, cat("a collective needs ", bytes, " bytes for all ranks, but prepare() allocated ",
                                         collective_.bytes()));
  }
  return collective_;
}

// In the reproducible mode this gathers the ranks' tensors and adds them here, because NCCL's order of addition depends
// on the size.
void CudaOps::all_reduce(const Tensor& tensor) {
  if (ranks() == 1) return;
  require(tensor.stride == tensor.cols && is_float(tensor.dtype), "all_reduce",
          [&] { return "rows must be contiguous"; });
  if (!options_.reproducible) {
    if (!tracing_) group_->all_reduce(stream_, rank_, tensor.data, tensor.dtype, tensor.rows * tensor.cols);
    return;
  }
  const auto bytes = tensor_bytes(tensor);
  const auto& shards = collective_memory(bytes * static_cast<std::size_t>(ranks()));
  if (tracing_ || tensor.rows == 0) return;
  group_->all_gather(stream_, rank_, shards.data(), tensor.data, bytes);
  sum_shards(stream_, tensor, shards.data(), ranks());
}

void CudaOps::all_gather(const Tensor& out, const Tensor& in) {
  require(out.rows == in.rows && out.cols == in.cols * ranks() && out.dtype == in.dtype, "all_gather",
          [&] { return cat("out ", shape_of(out), " must be ", ranks(), " times as wide as in ", shape_of(in)); });
  require(in.stride == in.cols, "all_gather", [&] { return "rows must be contiguous"; });
  const auto bytes = tensor_bytes(in);
  if (ranks() == 1) {
    if (!tracing_) stream_.copy(out.data, in.data, bytes, "all_gather");
    return;
  }
  const auto& shards = collective_memory(bytes * static_cast<std::size_t>(ranks()));
  if (tracing_ || in.rows == 0) return;
  group_->all_gather(stream_, rank_, shards.data(), in.data, bytes);
  side_by_side(stream_, out, shards.data(), ranks());
}

}  // namespace charonia::cuda
