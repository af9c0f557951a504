#include "ops/cuda/cuda_weights.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>

#include "base/text.h"
#include "charonia/error.h"
#include "ops/cpu/packed_linear.h"
#include "ops/cuda/cuda_quant_weights.h"
#include "ops/cuda/device/host_device.h"
#include "ops/cuda/kernels/gemm.h"

namespace charonia::cuda {
namespace {

constexpr std::size_t kChunkBytes = std::size_t{16} << 20;
constexpr std::int64_t kStrideMultiple = 8;  // elements, so that rows are aligned to 16 bytes in any type

[[noreturn]] void refuse(const std::string& what) { throw Error(ErrorCode::invalid_argument, "a weight: " + what); }

}  // namespace

MatrixUpload::MatrixUpload(Stream& stream) : stream_(stream) {
  for (auto& chunk : chunks_) chunk.memory = PinnedMemory(kChunkBytes);
}

MatrixUpload::~MatrixUpload() = default;

void MatrixUpload::in_chunks(std::byte* to, std::size_t row_bytes, std::int64_t rows,
                             const std::function<void(std::byte* chunk, std::int64_t first, std::int64_t n)>& write) {
  if (row_bytes > kChunkBytes) {
    throw Error(ErrorCode::unsupported,
                cat("a weight has rows of ", row_bytes, " bytes; the maximum is ", kChunkBytes));
  }
  const auto most = static_cast<std::int64_t>(kChunkBytes / row_bytes);
  for (std::int64_t row = 0; row < rows; row += most) {
    const auto n = std::min(most, rows - row);
    auto& chunk = chunks_[next_];
    next_ = (next_ + 1) % chunks_.size();
    chunk.copied.wait("upload of weights");  // waits for the copy of its earlier contents
    write(chunk.memory.data(), row, n);
    stream_.upload(to + static_cast<std::size_t>(row) * row_bytes, chunk.memory.data(),
                   static_cast<std::size_t>(n) * row_bytes, "upload of weights");
    chunk.copied.record(stream_);
  }
}

void MatrixUpload::copy(std::byte* to, DType type, std::int64_t stride, const ops::HostMatrix& from) {
  if (from.row_stride() != from.cols || stride != from.cols) {
    copy_rows(to, type, stride, from.rows, from.cols,
              [&](std::int64_t row) -> SourceRow { return {from.row(row), from.dtype}; });
    return;
  }
  in_chunks(to, static_cast<std::size_t>(stride) * size_of(type), from.rows,
            [&](std::byte* chunk, std::int64_t first, std::int64_t n) {
              ops::cpu::convert_to(chunk, type, from.row(first), from.dtype, n * from.cols);
            });
}

void MatrixUpload::copy_rows(std::byte* to, DType type, std::int64_t stride, std::int64_t rows, std::int64_t cols,
                             const std::function<SourceRow(std::int64_t row)>& row_of) {
  const auto row_bytes = static_cast<std::size_t>(stride) * size_of(type);
  in_chunks(to, row_bytes, rows, [&](std::byte* chunk, std::int64_t first, std::int64_t n) {
    for (std::int64_t r = 0; r < n; ++r, chunk += row_bytes) {
      const auto row = row_of(first + r);
      const auto used = row.data == nullptr ? 0 : static_cast<std::size_t>(cols) * size_of(type);
      if (row.data != nullptr) ops::cpu::convert_to(chunk, type, row.data, row.dtype, cols);
      std::memset(chunk + used, 0, row_bytes - used);
    }
  });
}

void MatrixUpload::pack_rows(std::byte* to, DType type, std::int64_t stride, std::int64_t rows, std::int64_t cols,
                             const std::function<SourceRow(std::int64_t row)>& row_of) {
  const auto element = size_of(type), row_bytes = static_cast<std::size_t>(stride) * element;
  constexpr auto kPieces = static_cast<std::size_t>(kPackedK);
  std::vector<std::byte> whole(row_bytes);
  in_chunks(to, kPackedRows * row_bytes, divide_up(rows, kPackedRows),
            [&](std::byte* chunk, std::int64_t first, std::int64_t groups) {
              for (std::int64_t r = 0; r < groups * kPackedRows; ++r) {
                const auto row = first * kPackedRows + r;
                const auto source = row < rows ? row_of(row) : SourceRow{};
                const auto used = source.data == nullptr ? 0 : static_cast<std::size_t>(cols) * element;
                if (source.data != nullptr) ops::cpu::convert_to(whole.data(), type, source.data, source.dtype, cols);
                std::fill(whole.begin() + static_cast<std::ptrdiff_t>(used), whole.end(), std::byte{0});
                for (std::int64_t k = 0; k < stride; k += kPackedK) {
                  std::memcpy(chunk + static_cast<std::size_t>(packed_at(r, k, stride)) * element,
                              whole.data() + static_cast<std::size_t>(k) * element, kPieces * element);
                }
              }
            });
}

void MatrixUpload::finish() { stream_.wait("upload of weights"); }

ThreadPool& MatrixUpload::pool() {
  if (!pool_) pool_ = std::make_unique<ThreadPool>(0);
  return *pool_;
}

void CudaGemmWeight::make_bias(std::span<const ops::HostMatrix> bias, std::span<const std::int64_t> rows,
                               MatrixUpload& upload) {
  if (bias.empty()) return;
  if (bias.size() != rows.size()) {
    refuse(cat(bias.size(), " biases for ", rows.size(), " parts; each part must have one, or none"));
  }
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (bias[i].data != nullptr && bias[i].rows * bias[i].cols != rows[i]) {
      refuse(cat("part ", i, " has ", rows[i], " rows, but its bias has ", bias[i].rows * bias[i].cols));
    }
  }
  bias_ = DeviceMemory(static_cast<std::size_t>(n_) * sizeof(float), "a bias");
  auto* to = bias_.as<float>();
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (bias[i].data != nullptr) {
      const auto& from = bias[i];
      upload.copy_rows(reinterpret_cast<std::byte*>(to), DType::f32, from.cols, from.rows, from.cols,
                       [&](std::int64_t row) { return MatrixUpload::SourceRow{from.row(row), from.dtype}; });
    }
    to += rows[i];
  }
}

CudaLinear::CudaLinear(std::span<const ops::HostMatrix> parts, std::span<const ops::HostMatrix> bias, DType weight,
                       bool packed, MatrixUpload& upload)
    : CudaGemmWeight(weight), packed_(packed) {
  if (parts.empty()) refuse("it has no part");
  std::vector<std::int64_t> rows;
  k_ = parts.front().cols;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].rows < 1 || parts[i].cols != k_ || k_ < 1 || parts[i].data == nullptr) {
      refuse(
          cat("part ", i, " is [", parts[i].rows, ", ", parts[i].cols, "], but the first part has ", k_, " columns"));
    }
    rows.push_back(parts[i].rows);
  }
  const auto row_of = [&](std::size_t part, std::int64_t row) -> MatrixUpload::SourceRow {
    return {parts[part].row(row), parts[part].dtype};
  };
  load(rows, bias, row_of, upload);
}

CudaLinear::CudaLinear(const QuantParts& parts, std::span<const ops::HostMatrix> bias, DType weight, bool packed,
                       MatrixUpload& upload)
    : CudaGemmWeight(weight), packed_(packed) {
  k_ = parts.k;
  std::vector<DequantisedReader> readers;
  for (const auto* const part : parts.parts) readers.emplace_back(*part, weight, upload.pool());
  const auto row_of = [&](std::size_t part, std::int64_t row) { return readers[part].at(row); };
  load(parts.rows, bias, row_of, upload);
}

void CudaLinear::load(std::span<const std::int64_t> rows, std::span<const ops::HostMatrix> bias,
                      const std::function<MatrixUpload::SourceRow(std::size_t part, std::int64_t row)>& row_of,
                      MatrixUpload& upload) {
  n_ = std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
  stride_ = round_up(k_, packed_ ? kPackedK : kStrideMultiple);
  bytes_ = static_cast<std::size_t>((packed_ ? round_up(n_, kPackedRows) : n_) * stride_) * size_of(type());
  weight_ = DeviceMemory(bytes_, cat("a weight [", n_, ", ", k_, "]"));
  std::size_t part = 0;
  std::int64_t first = 0;  // row of the part
  const auto of_stack = [&](std::int64_t row) {
    for (; row - first >= rows[part]; ++part) first += rows[part];
    return row_of(part, row - first);
  };
  const auto upload_rows = packed_ ? &MatrixUpload::pack_rows : &MatrixUpload::copy_rows;
  (upload.*upload_rows)(weight_.as<std::byte>(), type(), stride_, n_, k_, of_stack);
  make_bias(bias, rows, upload);
  upload.finish();
}

Gemm CudaLinear::gemm() const {
  return {.weight = weight_.data(),
          .type = type(),
          .weight_stride = stride_,
          .packed = packed_,
          .ordered = ordered(),
          .bias = bias(),
          .n = n_,
          .k = k_};
}

CudaEmbedding::CudaEmbedding(const ops::HostMatrix& table, DType weight, MatrixUpload& upload, bool in_host_memory)
    : rows_(table.rows), cols_(table.cols) {
  if (table.data == nullptr || rows_ < 1 || cols_ < 1) {
    throw Error(ErrorCode::invalid_argument, cat("an embedding [", rows_, ", ", cols_, "] must not be empty"));
  }
  bytes_ = static_cast<std::size_t>(rows_ * cols_) * size_of(weight);
  if (in_host_memory) {
    host_memory_ = PinnedMemory(bytes_);
    const auto row_bytes = static_cast<std::size_t>(cols_) * size_of(weight);
    for (std::int64_t row = 0; row < rows_; ++row) {
      ops::cpu::convert_to(host_memory_.data() + static_cast<std::size_t>(row) * row_bytes, weight, table.row(row),
                           table.dtype, cols_);
    }
    table_ = {host_memory_.data(), weight, cols_};
    return;
  }
  memory_ = DeviceMemory(bytes_, cat("an embedding [", rows_, ", ", cols_, "]"));
  table_ = {memory_.data(), weight, cols_};
  upload.copy(memory_.as<std::byte>(), weight, cols_, table);
  upload.finish();
}

CudaEmbedding::CudaEmbedding(const CudaLinear& weight)
    : rows_(weight.out_features()),
      cols_(weight.in_features()),
      table_{weight.weight(), weight.type(), weight.stride(), weight.packed()} {}

CudaKvCache::CudaKvCache(const ops::KvLayout& layout, const PerKind<int>& num_blocks, const PerKind<int>& committed,
                         bool fp8)
    : KvCache(layout, num_blocks), layers_(layout.layers.size()) {
  if (layout.quant_bits == ops::kKvFp8 && !fp8) throw Error(ErrorCode::unsupported, std::string(ops::kNoFp8Cache));
  for (std::size_t i = 0; i < layout.layers.size(); ++i) {
    const auto& one = layout.layers[i];
    if (one.storage >= 0) continue;
    const auto block = layout.layer_bytes(one);
    if (block > std::size_t{std::numeric_limits<int>::max()}) {
      throw Error(ErrorCode::unsupported,
                  cat("a KV cache with blocks of ", layout.block_len, " tokens has ", block,
                      " bytes per block and layer; the CUDA device supports fewer than 2^31: set a "
                      "smaller cache_block_seq_len"));
    }
    const auto fits = [&](const Group& group) { return group.kind == one.kind && group.block_bytes == block; };
    auto found = std::ranges::find_if(groups_, fits);
    if (found == groups_.end()) found = groups_.insert(found, {one.kind, block, {}, {}});
    found->layers.push_back(i);
  }
  for (auto& [kind, block, of_group, memory] : groups_) {
    const auto all = static_cast<std::size_t>(num_blocks[kind]), first = static_cast<std::size_t>(committed[kind]);
    memory = GrowingMemory(of_group.size(), block * all, block * first,
                           cat("the KV cache of ", all, " blocks (cache_max_entry_count)"));
    for (std::size_t i = 0; i < of_group.size(); ++i) {
      const auto& one = layout.layers[of_group[i]];
      const int head_dim = one.v_dim == 0 ? one.k_dim / 2 : one.k_dim;  // of a latent: kernels/latent.h
      layers_[of_group[i]] = {memory.data() + i * memory.distance(), layout.dtype,      one.kv_heads, head_dim,
                              layout.block_len,                      layout.quant_bits, true};
    }
  }
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    if (layout.layers[i].storage < 0) continue;
    layers_[i] = layers_[layout.storage_of(i)];
    layers_[i].stores = false;
  }
}

std::byte* CudaKvCache::block(std::size_t layer, int block) const {
  return static_cast<std::byte*>(layers_[layer].data) +
         layout_.layer_bytes(layout_.layers[layer]) * static_cast<std::size_t>(block);
}

void CudaKvCache::commit(const PerKind<int>& num_blocks) {
  for (auto& group : groups_) group.memory.commit(group.block_bytes * static_cast<std::size_t>(num_blocks[group.kind]));
}

void CudaKvCache::copy_block(Stream& stream, CacheKind kind, std::int32_t from, std::int32_t to) const {
  for (const auto& group : groups_) {
    if (group.kind != kind) continue;
    cuda::copy_block(stream, layers_[group.layers.front()], static_cast<int>(group.layers.size()),
                     group.memory.distance(), from, to);
  }
}

}  // namespace charonia::cuda
