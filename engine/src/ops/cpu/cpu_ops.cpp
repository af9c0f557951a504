#include "ops/cpu/cpu_ops.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/text.h"
#include "charonia/error.h"
#include "ops/cpu/cpu_kv_cache.h"
#include "ops/cpu/free_memory.h"
#include "ops/cpu/make_cpu_ops.h"
#include "ops/cpu/packed_linear.h"
#include "ops/cpu/quant_linear.h"

namespace charonia::ops {
namespace cpu {
namespace {

template <class T>
T* row_of(const Tensor& tensor, std::int64_t row) {
  return static_cast<T*>(tensor.data) + row * tensor.stride;
}

class CpuBuffer : public Buffer {
 public:
  explicit CpuBuffer(std::size_t bytes) : memory_(bytes) {
    data_ = memory_.data();
    bytes_ = bytes;
  }

 private:
  HugeMemory memory_;
};

class CpuEmbedding : public Embedding {
 public:
  CpuEmbedding(std::int64_t rows, std::int64_t cols) : rows_(rows), cols_(cols) {}
  std::int64_t rows() const { return rows_; }
  std::int64_t cols() const { return cols_; }
  virtual void read_row(const Kernels& kernels, std::int64_t row, float* out) const = 0;  // [cols]

 protected:
  std::int64_t rows_, cols_;
};

class EmbeddingTable : public CpuEmbedding {
 public:
  EmbeddingTable(const HostMatrix& table, DType weight, ThreadPool& pool, HugeArena& arena)
      : CpuEmbedding(table.rows, table.cols), type_(weight) {
    if (table.data == nullptr || rows_ < 1 || cols_ < 1) {
      throw Error(ErrorCode::invalid_argument, cat("an embedding [", rows_, ", ", cols_, "] must not be empty"));
    }
    bytes_ = static_cast<std::size_t>(rows_ * cols_) * size_of(weight);
    data_ = arena.allocate(bytes_);
    pool.parallel_for(rows_, 64, [&](std::int64_t begin, std::int64_t end) {
      const auto from = static_cast<std::size_t>(begin * cols_) * size_of(table.dtype);
      convert_to(row(begin), type_, static_cast<const std::byte*>(table.data) + from, table.dtype,
                 (end - begin) * cols_);
    });
  }

  void read_row(const Kernels& kernels, std::int64_t index, float* out) const override {
    const auto* const from = row(index);
    switch (type_) {
      case DType::bf16:
        kernels.f32_from_bf16(out, reinterpret_cast<const Bf16*>(from), cols_);
        break;
      case DType::f16:
        kernels.f32_from_f16(out, reinterpret_cast<const F16*>(from), cols_);
        break;
      default:
        std::memcpy(out, from, static_cast<std::size_t>(cols_) * sizeof(float));
    }
  }

 private:
  std::byte* row(std::int64_t index) const {
    return data_.get() + static_cast<std::size_t>(index * cols_) * size_of(type_);
  }

  DType type_;
  HugeChunk data_;
};

class SharedEmbedding : public CpuEmbedding {
 public:
  explicit SharedEmbedding(const CpuLinear& weight)
      : CpuEmbedding(weight.out_features(), weight.in_features()), weight_(weight) {}
  void read_row(const Kernels& /*kernels*/, std::int64_t row, float* out) const override {
    weight_.read_row(row, out);
  }

 private:
  const CpuLinear& weight_;
};

}  // namespace

CpuOps::CpuOps(int threads, const InstructionSet& isa, std::shared_ptr<ProcessGroup> group, int rank)
    : isa_(isa), kernels_(*isa.kernels), pool_(threads), group_(std::move(group)), rank_(rank) {
  if (rank < 0 || rank >= ranks()) {
    throw Error(ErrorCode::invalid_argument, cat("rank ", rank, " of a group of ", ranks()));
  }
}

Precision CpuOps::precision(DType weight) const {
  return {.weight = weight,
          .residual = DType::f32,
          .gemm_out = DType::f32,
          .activation = weight == DType::bf16 ? DType::bf16 : DType::f32,
          .kv = weight};
}

std::size_t CpuOps::free_memory() const {
  // All ranks share the machine's memory.
  return cpu::free_memory() / static_cast<std::size_t>(ranks());
}

std::unique_ptr<Buffer> CpuOps::allocate(std::size_t bytes) { return std::make_unique<CpuBuffer>(bytes); }

void CpuOps::upload(void* device, const void* host, std::size_t bytes) { std::memcpy(device, host, bytes); }

void CpuOps::download(void* host, const void* device, std::size_t bytes) { std::memcpy(host, device, bytes); }

std::unique_ptr<Linear> CpuOps::make_linear(std::span<const HostMatrix> parts, std::span<const HostMatrix> bias,
                                            DType weight) {
  return std::make_unique<PackedLinear>(parts, bias, weight, pool_, weights_);
}

std::unique_ptr<Linear> CpuOps::make_quantised_linear(std::span<const QuantSource* const> parts,
                                                      std::span<const HostMatrix> bias, DType data) {
  return make_quantised(parts, bias, data, pool_, weights_);
}

std::unique_ptr<Embedding> CpuOps::make_embedding(const HostMatrix& table, DType weight, bool) {
  return std::make_unique<EmbeddingTable>(table, weight, pool_, weights_);
}

std::unique_ptr<Embedding> CpuOps::make_embedding(const Linear& weight) {
  return std::make_unique<SharedEmbedding>(static_cast<const CpuLinear&>(weight));
}

std::unique_ptr<KvCache> CpuOps::make_kv_cache(const KvLayout& layout, const PerKind<int>& num_blocks,
                                               const std::optional<PerKind<int>>& committed) {
  auto cache = std::make_unique<CpuKvCache>(layout, num_blocks);
  commit_blocks(*cache, committed.value_or(num_blocks));
  return cache;
}

// The system allocates pages at the first write, when an error is no longer possible. So this checks that there is
// enough memory for all pages that these blocks do not have yet.
void CpuOps::commit_blocks(KvCache& cache, const PerKind<int>& num_blocks) {
  cache.check_commit(num_blocks);
  const auto wanted = cache.layout().bytes(num_blocks);
  const auto resident = static_cast<const CpuKvCache&>(cache).resident_bytes();
  const auto missing = wanted - std::min(wanted, resident), free = free_memory();
  if (missing <= free) return;
  throw Error(ErrorCode::resource_exhausted,
              cat(num_blocks.full + num_blocks.window + num_blocks.state, " blocks of KV cache need ", missing,
                  " more bytes, but only ", free,
                  " are free: lower cache_max_entry_count, session_len or max_batch_size, or free memory"));
}

void CpuOps::scale_logits(const Tensor& logits, float scale, float cap) {
  require(logits.dtype == DType::f32, "scale_logits", "logits must be f32");
  require(scale > 0 && cap >= 0, "scale_logits",
          [&] { return cat("scale ", scale, " must be above 0, and cap ", cap, " at least 0"); });
  for_rows(logits.rows, logits.cols, [&](std::int64_t row) {
    if (scale != 1) kernels_.scale(row_of<float>(logits, row), scale, logits.cols);
    if (cap > 0) kernels_.soft_cap(row_of<float>(logits, row), cap, logits.cols);
  });
}

void CpuOps::scatter_logits(const Tensor& out, const Tensor& in, const std::int32_t* columns) {
  require(out.dtype == DType::f32 && in.dtype == DType::f32 && in.rows == out.rows, "scatter_logits",
          "out and in must be f32, with the same rows");
  for_rows(out.rows, out.cols, [&](std::int64_t row) {
    auto* const to = row_of<float>(out, row);
    const auto* const from = row_of<float>(in, row);
    for (std::int64_t t = 0; t < out.cols; ++t) to[t] = columns[t] < 0 ? kNeverSampled : from[columns[t]];
  });
}

void CpuOps::copy_rows(const Tensor& out, const Tensor& in, bool stores) {
  const auto rows = input_.hidden_rows;
  const auto& other = stores ? out : in;
  require(out.dtype == in.dtype && out.cols == in.cols && (stores ? in : out).rows >= std::ssize(rows),
          stores ? "store_rows" : "load_rows", "out must have the type and width of in, and the step's rows");
  for (std::int64_t i = 0; i < std::ssize(rows); ++i) {
    const auto row = rows[static_cast<std::size_t>(i)];
    require(row < other.rows, stores ? "store_rows" : "load_rows",
            [&] { return cat("hidden row ", row, " does not exist: there are ", other.rows); });
    if (row < 0) continue;
    std::memcpy(row_at(out, stores ? row : i), row_at(in, stores ? i : row),
                static_cast<std::size_t>(out.cols) * size_of(out.dtype));
  }
}

void CpuOps::add_embedding(const Tensor& x, const Embedding& table, const EmbeddingSum& how) {
  const auto& t = static_cast<const CpuEmbedding&>(table);
  require(x.dtype == DType::f32 && x.cols == t.cols() && x.rows >= static_cast<std::int64_t>(ids_.size()) &&
              how.size > 0 && x.cols % how.size == 0 && how.weight != nullptr,
          "add_embedding", "x must be f32 [ids, columns of the table], in groups of one size");
  for (const auto id : ids_) {
    require(id < t.rows(), "add_embedding", [&] { return cat("token id ", id, " is not in the table"); });
  }
  for_rows(static_cast<std::int64_t>(ids_.size()), x.cols, [&](std::int64_t row) {
    thread_local std::vector<float> added;
    added.resize(static_cast<std::size_t>(x.cols));
    t.read_row(kernels_, ids_[static_cast<std::size_t>(row)], added.data());
    auto* const to = row_of<float>(x, row);
    for (std::int64_t at = 0; at < x.cols; at += how.size) {
      kernels_.rms_norm_f32(to + at, to + at, nullptr, {.weight = how.weight, .eps = how.eps}, how.size);
    }
    kernels_.rms_norm_f32(nullptr, to, added.data(),
                          {.delta_scale = how.table_scale, .residual_scale = how.scale}, x.cols);
  });
}

void CpuOps::embed(const Tensor& out, const Embedding& table, float scale) {
  const auto& t = static_cast<const CpuEmbedding&>(table);
  require(out.dtype == DType::f32 && out.cols == t.cols() && out.rows >= static_cast<std::int64_t>(ids_.size()),
          "embed", "out must be f32 [ids, hidden]");
  for (const auto id : ids_) {
    require(id < t.rows(), "embed", [&] { return cat("token id ", id, " is not in the table"); });
  }
  for_rows(static_cast<std::int64_t>(ids_.size()), out.cols, [&](std::int64_t row) {
    auto* const to = row_of<float>(out, row);
    t.read_row(kernels_, ids_[static_cast<std::size_t>(row)], to);
    if (scale != 1) kernels_.scale(to, scale, out.cols);
  });
}

void CpuOps::rms_norm(const Tensor& out, const Tensor& residual, const Tensor& delta, const NormParams& how) {
  require(residual.dtype == DType::f32 && out.rows == residual.rows && out.cols == residual.cols, "rms_norm",
          "residual must be f32 and have the shape of out");
  require(delta.data == nullptr ||
              (delta.dtype == DType::f32 && delta.rows == residual.rows && delta.cols == residual.cols),
          "rms_norm", "delta must be f32 and have the shape of residual");
  for_rows(out.rows, out.cols, [&](std::int64_t row) {
    auto* const r = row_of<float>(residual, row);
    const float* const d = delta.data == nullptr ? nullptr : row_of<float>(delta, row);
    if (out.data == nullptr) {
      kernels_.rms_norm_f32(nullptr, r, d, how, out.cols);
    } else if (out.dtype == DType::bf16) {
      kernels_.rms_norm_bf16(row_of<Bf16>(out, row), r, d, how, out.cols);
    } else {
      kernels_.rms_norm_f32(row_of<float>(out, row), r, d, how, out.cols);
    }
  });
}

void CpuOps::qk_squares(const Tensor& sums, const Tensor& qkv, std::int64_t q_size, std::int64_t k_size) {
  require(sums.dtype == DType::f32 && sums.cols == 2 && sums.rows == qkv.rows && qkv.dtype == DType::f32 &&
              q_size >= 1 && k_size >= 1 && q_size + k_size <= qkv.cols,
          "qk_squares", [&] {
            return cat("sums must be f32 [rows, 2], and qkv f32 with at least ", q_size, " + ", k_size, " columns");
          });
  for_rows(qkv.rows, q_size + k_size, [&](std::int64_t row) {
    const float* const q = row_of<float>(qkv, row);
    float* const to = row_of<float>(sums, row);
    to[0] = kernels_.sum_of_squares(q, q_size);
    to[1] = kernels_.sum_of_squares(q + q_size, k_size);
  });
}

void CpuOps::linear(const Tensor& out, const Tensor& in, const Linear& weight) {
  const auto& w = static_cast<const CpuLinear&>(weight);
  require(in.dtype == precision(w.type()).activation && out.dtype == DType::f32, "linear",
          "in must have the weight's activation type, out must be f32");
  require(in.cols == w.in_features() && out.cols == w.out_features() && in.rows == out.rows, "linear", [&] {
    return cat("in [", in.rows, ", ", in.cols, "], out [", out.rows, ", ", out.cols, "] and weight [",
               w.out_features(), ", ", w.in_features(), "] do not fit together");
  });
  if (in.rows == 0) return;
  const auto gemm = w.gemm(kernels_, in.rows);
  if (gemm.prepared_bytes == 0) return multiply(out, gemm_rows(in), w, gemm);
  // Activations are prepared once for all panels.
  reserve_prepared(std::min(in.rows, kPreparedRows), gemm);
  for (std::int64_t begin = 0; begin < in.rows; begin += kPreparedRows) {
    const auto rows = std::min(kPreparedRows, in.rows - begin);
    multiply(rows_of(out, begin, rows), prepare(rows_of(in, begin, rows), w, gemm, 0), w, gemm);
  }
}

void CpuOps::reserve_prepared(std::int64_t rows, const GemmKernel& gemm) {
  const auto bytes = static_cast<std::size_t>(rows * gemm.prepared_bytes);
  if (prepared_rows_ == nullptr || prepared_rows_->bytes() < bytes) {
    prepared_rows_ = std::make_unique<HugeMemory>(bytes);
  }
}

GemmRows CpuOps::prepare(const Tensor& in, const CpuLinear& w, const GemmKernel& gemm, std::int64_t first) {
  auto* const to = prepared_rows_->data() + first * gemm.prepared_bytes;
  for_rows(in.rows, in.cols,
           [&](std::int64_t row) { w.prepare_row(kernels_, gemm, row_at(in, row), to + row * gemm.prepared_bytes); });
  return {to, gemm.prepared_bytes, in.rows};
}

void CpuOps::multiply(const Tensor& out, const GemmRows& in, const CpuLinear& w, const GemmKernel& gemm) {
  // Computes all row blocks of a panel in sequence, while the panel is in the cache.
  const RowBlocks blocks(gemm, in.count);
  const std::int64_t chunks = (w.panels() + gemm.panels - 1) / gemm.panels * blocks.count;
  const std::int64_t work = gemm.panels * work_of_panel(blocks.size, w.in_features());
  std::int64_t grain = std::max<std::int64_t>(1, kSmallGemm / work);
  if (chunks >= 8 * blocks.count * pool_.size()) grain = std::max(grain, blocks.count);
  pool_.parallel_for(chunks, grain, [&](std::int64_t begin, std::int64_t end) {
    for (auto chunk = begin; chunk < end; ++chunk) {
      const auto row = chunk % blocks.count * blocks.size;
      w.multiply(gemm, chunk / blocks.count * gemm.panels, out, in, row, std::min(blocks.size, in.count - row));
    }
  });
}

void CpuOps::gated_activation(const Tensor& out, const Tensor& gate_up, Activation activation) {
  require(gate_up.dtype == DType::f32 && gate_up.cols == 2 * out.cols && gate_up.rows == out.rows, "gated_activation",
          "gate_up must be f32 [rows, 2 * inter]");
  const auto run = [&](auto* to, const float* gate, auto silu, auto gelu_tanh, auto clamped_swiglu) {
    const float* const up = gate + out.cols;
    switch (activation.kind) {
      case Activation::silu:
        return silu(to, gate, up, out.cols);
      case Activation::gelu_tanh:
        return gelu_tanh(to, gate, up, out.cols);
      case Activation::clamped_swiglu:
        return clamped_swiglu(to, gate, up, activation.limit, activation.alpha, out.cols);
    }
  };
  for_rows(out.rows, 2 * out.cols, [&](std::int64_t row) {
    const float* const gate = row_of<float>(gate_up, row);
    if (out.dtype == DType::bf16) {
      run(row_of<Bf16>(out, row), gate, kernels_.silu_mul_bf16, kernels_.gelu_tanh_mul_bf16,
          kernels_.clamped_swiglu_bf16);
    } else {
      run(row_of<float>(out, row), gate, kernels_.silu_mul_f32, kernels_.gelu_tanh_mul_f32,
          kernels_.clamped_swiglu_f32);
    }
  });
}

void CpuOps::sigmoid_gate(const Tensor& x, const Tensor& gate) {
  require(gate.dtype == DType::f32 && gate.rows == x.rows && gate.cols == x.cols, "sigmoid_gate",
          "gate must be f32 and have the shape of x");
  for_rows(x.rows, x.cols, [&](std::int64_t row) {
    const float* const of_row = row_of<float>(gate, row);
    if (x.dtype == DType::bf16) {
      kernels_.sigmoid_gate_bf16(row_of<Bf16>(x, row), of_row, x.cols);
    } else {
      kernels_.sigmoid_gate_f32(row_of<float>(x, row), of_row, x.cols);
    }
  });
}

void CpuOps::gated_norm(const Tensor& out, const Tensor& x, const Tensor& gate, const float* weight, float eps,
                        int head_dim) {
  require(x.dtype == DType::f32 && gate.dtype == DType::f32 && x.rows == out.rows && gate.rows == out.rows &&
              x.cols == out.cols && gate.cols == out.cols && head_dim > 0 && out.cols % head_dim == 0,
          "gated_norm", [&] { return cat("x and gate must be f32 and have the shape of out: heads of ", head_dim); });
  for_rows(out.rows, out.cols, [&](std::int64_t row) {
    for (std::int64_t at = 0; at < out.cols; at += head_dim) {
      const float *const from = row_of<float>(x, row) + at, *const gates = row_of<float>(gate, row) + at;
      if (out.dtype == DType::bf16) {
        kernels_.gated_norm_bf16(row_of<Bf16>(out, row) + at, from, gates, weight, eps, head_dim);
      } else {
        kernels_.gated_norm_f32(row_of<float>(out, row) + at, from, gates, weight, eps, head_dim);
      }
    }
  });
}

void CpuOps::gather_rows(const Tensor& out, const Tensor& in) {
  const auto rows = input_.logits_rows;
  require(out.dtype == in.dtype && out.cols == in.cols && out.rows >= static_cast<std::int64_t>(rows.size()),
          "gather_rows", "out must have the type and width of in");
  for (std::size_t i = 0; i < rows.size(); ++i) {
    require(rows[i] < in.rows, "gather_rows",
            [&] { return cat("row ", rows[i], " does not exist: in has ", in.rows, " rows"); });
    std::memcpy(row_at(out, static_cast<std::int64_t>(i)), row_at(in, rows[i]),
                static_cast<std::size_t>(out.cols) * size_of(out.dtype));
  }
}

void CpuOps::sample(const Tensor& logits) {
  const auto rows = input_.sample;
  require(logits.dtype == DType::f32 && logits.rows == static_cast<std::int64_t>(rows.size()) && logits.cols >= 1,
          "sample", "logits must be f32 [rows, vocab], one SampleRow each");
  sampled_.resize(rows.size());
  const auto sample_one = [&](std::int64_t index) {
    thread_local SampleScratch scratch;
    thread_local std::vector<std::int32_t> output;
    const auto i = static_cast<std::size_t>(index);
    auto row = rows[i];
    if (row.pending >= 0 && sampled_ids_[static_cast<std::size_t>(row.pending)] >= 0) {
      output.assign(row.output.begin(), row.output.end());
      output.push_back(sampled_ids_[static_cast<std::size_t>(row.pending)]);
      row.output = output;
    }
    try {
      sampled_[i] =
          sample_row({row_of<float>(logits, index), static_cast<std::size_t>(logits.cols)}, row, kernels_, scratch);
    } catch (const Error& error) {
      sampled_[i].error = error.what();
    }
  };
  // Rows that wait for a token mask come last.
  const auto waits = [&](std::int64_t row) { return rows[static_cast<std::size_t>(row)].mask != nullptr; };
  for_rows(logits.rows, logits.cols, [&](std::int64_t row) {
    if (!waits(row)) sample_one(row);
  });
  if (std::none_of(rows.begin(), rows.end(), [](const auto& row) { return row.mask != nullptr; })) return;
  for_rows(logits.rows, logits.cols, [&](std::int64_t row) {
    if (waits(row)) sample_one(row);
  });
}

void CpuOps::all_reduce(const Tensor& tensor) {
  if (group_) group_->all_reduce(rank_, tensor, pool_);
}

void CpuOps::all_gather(const Tensor& out, const Tensor& in) {
  require(group_ != nullptr, "all_gather", "needs more than one rank");
  group_->all_gather(rank_, out, in, pool_);
}

void CpuOps::abort_collectives(std::string_view why) noexcept {
  if (group_) group_->abort(rank_, why);
}

}  // namespace cpu

std::shared_ptr<ProcessGroup> make_process_group(int ranks) { return std::make_shared<ProcessGroup>(ranks); }

std::unique_ptr<Ops> make_cpu_ops(int threads, std::shared_ptr<ProcessGroup> group, int rank) {
  const char* const forced = std::getenv("CHARONIA_ISA");
  return std::make_unique<cpu::CpuOps>(threads, cpu::instruction_set(forced == nullptr ? "" : forced), std::move(group),
                                       rank);
}

}  // namespace charonia::ops
