#include "ops/cpu/cpu_ops.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/text.h"
#include "charonia/error.h"
#include "ops/cpu/cpu_kv_cache.h"
#include "ops/cpu/free_memory.h"
#include "ops/cpu/packed_linear.h"

namespace charonia::ops {
namespace cpu {
namespace {

// Elementwise work of fewer elements than this, and products of fewer multiplications, take less time than waking a
// thread.
constexpr std::int64_t kSmallElements = 16384;
constexpr std::int64_t kSmallProduct = 65536;

void require(bool holds, std::string_view op, std::string_view what) {
  if (!holds) throw Error(ErrorCode::internal, cat("ops::", op, ": ", what));
}

template <class T>
T* row_of(const Tensor& tensor, std::int64_t row) {
  return static_cast<T*>(tensor.data) + row * tensor.stride;
}

std::byte* bytes_of(const Tensor& tensor, std::int64_t row) {
  return static_cast<std::byte*>(tensor.data) + static_cast<std::size_t>(row * tensor.stride) * size_of(tensor.dtype);
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
  CpuEmbedding(const HostMatrix& table, DType weight, ThreadPool& pool, HugeArena& arena)
      : type_(weight), rows_(table.rows), cols_(table.cols) {
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

  DType type() const { return type_; }
  std::int64_t rows() const { return rows_; }
  std::int64_t cols() const { return cols_; }
  std::byte* row(std::int64_t index) const {
    return data_.get() + static_cast<std::size_t>(index * cols_) * size_of(type_);
  }

 private:
  DType type_;
  std::int64_t rows_, cols_;
  HugePiece data_;
};

}  // namespace

CpuOps::CpuOps(int threads, const InstructionSet& isa, std::shared_ptr<LocalGroup> group, int rank)
    : isa_(isa), kernels_(*isa.kernels), pool_(threads), group_(std::move(group)), rank_(rank) {
  if (rank < 0 || rank >= ranks()) {
    throw Error(ErrorCode::invalid_argument, cat("rank ", rank, " of a group of ", ranks()));
  }
}

Precision CpuOps::precision(DType weight) const {
  return {.weight = weight,
          .residual = DType::f32,
          .product = DType::f32,
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

std::unique_ptr<Embedding> CpuOps::make_embedding(const HostMatrix& table, DType weight) {
  return std::make_unique<CpuEmbedding>(table, weight, pool_, weights_);
}

std::size_t CpuOps::kv_block_bytes(const KvLayout& layout) const {
  return kv_block_layer_bytes(layout) * static_cast<std::size_t>(layout.num_layers);
}

std::unique_ptr<KvCache> CpuOps::make_kv_cache(const KvLayout& layout, int num_blocks) {
  if (layout.num_layers < 1 || layout.kv_heads < 1 || layout.head_dim < 2 || layout.head_dim % 2 != 0 ||
      layout.block_len < 1 || num_blocks < 1) {
    throw Error(
        ErrorCode::invalid_argument,
        cat("a k/v cache of ", num_blocks, " blocks of ", layout.block_len, " tokens, ", layout.num_layers, " layers, ",
            layout.kv_heads, " heads of ", layout.head_dim, ": all must be at least 1, and the head size even"));
  }
  return std::make_unique<CpuKvCache>(layout, num_blocks);
}

template <class Fn>
void CpuOps::for_rows(std::int64_t rows, std::int64_t elements, Fn fn) {
  const auto grain = std::max<std::int64_t>(1, kSmallElements / std::max<std::int64_t>(1, elements));
  pool_.parallel_for(rows, grain, [&](std::int64_t begin, std::int64_t end) {
    for (auto row = begin; row < end; ++row) fn(row);
  });
}

void CpuOps::embed(const Tensor& out, const Embedding& table) {
  const auto& t = static_cast<const CpuEmbedding&>(table);
  require(out.dtype == DType::f32 && out.cols == t.cols() && out.rows >= static_cast<std::int64_t>(ids_.size()),
          "embed", "out must be f32 [ids, hidden]");
  for (const auto id : ids_) require(id < t.rows(), "embed", cat("token id ", id, " is not in the table"));
  for_rows(static_cast<std::int64_t>(ids_.size()), out.cols, [&](std::int64_t row) {
    auto* const to = row_of<float>(out, row);
    const auto* const from = t.row(ids_[static_cast<std::size_t>(row)]);
    switch (t.type()) {
      case DType::bf16:
        return kernels_.f32_from_bf16(to, reinterpret_cast<const Bf16*>(from), out.cols);
      case DType::f16:
        return kernels_.f32_from_f16(to, reinterpret_cast<const F16*>(from), out.cols);
      default:
        std::memcpy(to, from, static_cast<std::size_t>(out.cols) * sizeof(float));
    }
  });
}

void CpuOps::rms_norm(const Tensor& out, const Tensor& residual, const Tensor& delta, const float* weight, float eps) {
  require(residual.dtype == DType::f32 && out.rows == residual.rows && out.cols == residual.cols, "rms_norm",
          "residual must be f32 and of the shape of out");
  require(delta.data == nullptr ||
              (delta.dtype == DType::f32 && delta.rows == residual.rows && delta.cols == residual.cols),
          "rms_norm", "delta must be f32 and of the shape of residual");
  for_rows(out.rows, out.cols, [&](std::int64_t row) {
    auto* const r = row_of<float>(residual, row);
    const float* const d = delta.data == nullptr ? nullptr : row_of<float>(delta, row);
    if (out.dtype == DType::bf16) {
      kernels_.rms_norm_bf16(row_of<Bf16>(out, row), r, d, weight, eps, out.cols);
    } else {
      kernels_.rms_norm_f32(row_of<float>(out, row), r, d, weight, eps, out.cols);
    }
  });
}

void CpuOps::linear(const Tensor& out, const Tensor& in, const Linear& weight) {
  const auto& w = static_cast<const PackedLinear&>(weight);
  require(in.dtype == precision(w.type()).activation && out.dtype == DType::f32, "linear",
          "in must be of the weight's activation type, out f32");
  require(in.cols == w.in_features() && out.cols == w.out_features() && in.rows == out.rows, "linear",
          cat("in [", in.rows, ", ", in.cols, "], out [", out.rows, ", ", out.cols, "] and weight [", w.out_features(),
              ", ", w.in_features(), "] do not fit together"));
  if (in.rows == 0) return;
  const auto kernel = w.type() == DType::bf16  ? kernels_.linear_bf16
                      : w.type() == DType::f16 ? kernels_.linear_f16
                                               : kernels_.linear_f32;
  // Row blocks of equal size, and all of a panel's one after the other, while it is in the cache.
  const std::int64_t row_blocks = (in.rows + kRowBlock - 1) / kRowBlock;
  const std::int64_t block = (in.rows + row_blocks - 1) / row_blocks;
  const std::int64_t pieces = w.panels() * row_blocks;
  const std::int64_t work_of_piece = block * in.cols * kPanel;
  std::int64_t grain = std::max<std::int64_t>(1, kSmallProduct / work_of_piece);
  if (pieces >= 8 * row_blocks * pool_.size()) grain = std::max(grain, row_blocks);
  pool_.parallel_for(pieces, grain, [&](std::int64_t begin, std::int64_t end) {
    for (auto piece = begin; piece < end; ++piece) {
      const auto panel = piece / row_blocks;
      const auto row = piece % row_blocks * block;
      kernel({.a = bytes_of(in, row),
              .a_stride = in.stride,
              .rows = static_cast<int>(std::min(block, in.rows - row)),
              .k = in.cols,
              .panel = w.panel(panel),
              .out = row_of<float>(out, row) + panel * kPanel,
              .out_stride = out.stride,
              .columns = static_cast<int>(std::min<std::int64_t>(kPanel, out.cols - panel * kPanel)),
              .bias = w.bias() == nullptr ? nullptr : w.bias() + panel * kPanel});
    }
  });
}

void CpuOps::silu_mul(const Tensor& out, const Tensor& gate_up) {
  require(gate_up.dtype == DType::f32 && gate_up.cols == 2 * out.cols && gate_up.rows == out.rows, "silu_mul",
          "gate_up must be f32 [rows, 2 * inter]");
  for_rows(out.rows, 2 * out.cols, [&](std::int64_t row) {
    const float* const gate = row_of<float>(gate_up, row);
    if (out.dtype == DType::bf16) {
      kernels_.silu_mul_bf16(row_of<Bf16>(out, row), gate, gate + out.cols, out.cols);
    } else {
      kernels_.silu_mul_f32(row_of<float>(out, row), gate, gate + out.cols, out.cols);
    }
  });
}

void CpuOps::gather_rows(const Tensor& out, const Tensor& in) {
  const auto rows = input_.logits_rows;
  require(out.dtype == in.dtype && out.cols == in.cols && out.rows >= static_cast<std::int64_t>(rows.size()),
          "gather_rows", "out must be of the type and width of in");
  for (std::size_t i = 0; i < rows.size(); ++i) {
    require(rows[i] < in.rows, "gather_rows", cat("row ", rows[i], " of ", in.rows));
    std::memcpy(bytes_of(out, static_cast<std::int64_t>(i)), bytes_of(in, rows[i]),
                static_cast<std::size_t>(out.cols) * size_of(out.dtype));
  }
}

void CpuOps::sample(const Tensor& logits) {
  const auto rows = input_.sample;
  require(logits.dtype == DType::f32 && logits.rows == static_cast<std::int64_t>(rows.size()) && logits.cols >= 1,
          "sample", "logits must be f32 [rows, vocab], one SampleRow each");
  sampled_.resize(rows.size());
  for_rows(logits.rows, logits.cols, [&](std::int64_t index) {
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
  });
}

void CpuOps::all_reduce(const Tensor& tensor) {
  if (group_) group_->all_reduce(rank_, tensor, pool_);
}

void CpuOps::all_gather(const Tensor& out, const Tensor& in) {
  require(group_ != nullptr, "all_gather", "there is one rank");
  group_->all_gather(rank_, out, in, pool_);
}

void CpuOps::abort_exchange(std::string_view why) noexcept {
  if (group_) group_->abort(rank_, why);
}

void CpuOps::resume_exchange() {
  if (group_) group_->resume();
}

}  // namespace cpu

std::shared_ptr<LocalGroup> make_local_group(int ranks) { return std::make_shared<LocalGroup>(ranks); }

std::unique_ptr<Ops> make_cpu_ops(int threads, std::shared_ptr<LocalGroup> group, int rank) {
  const char* const forced = std::getenv("CHARONIA_ISA");
  return std::make_unique<cpu::CpuOps>(threads, cpu::instruction_set(forced == nullptr ? "" : forced), std::move(group),
                                       rank);
}

}  // namespace charonia::ops
