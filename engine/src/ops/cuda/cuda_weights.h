// Data in device memory that is used by all steps: weights, embedding, KV blocks.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "base/thread_pool.h"
#include "ops/cuda/device/growing_memory.h"
#include "ops/cuda/device/runtime.h"
#include "ops/cuda/kernels/gemm.h"
#include "ops/cuda/kernels/rows.h"
#include "ops/device.h"

namespace charonia::cuda {

// Uploads matrices through two chunks of page-locked memory, used alternately: while one is copied, rows are converted
// into the other.
class MatrixUpload {
 public:
  explicit MatrixUpload(Stream& stream);
  ~MatrixUpload();
  // Copies the rows of `from`, converted to `type`, to `to`, with rows `stride` elements apart. Elements beyond
  // from.cols are zeros.
  void copy(std::byte* to, DType type, std::int64_t stride, const ops::HostMatrix& from);
  // Copies `rows` rows of `cols` elements from the sources that row_of() returns. Rows without data are zeros.
  struct SourceRow {
    const std::byte* data = nullptr;
    DType dtype = DType::f32;
  };
  void copy_rows(std::byte* to, DType type, std::int64_t stride, std::int64_t rows, std::int64_t cols,
                 const std::function<SourceRow(std::int64_t row)>& row_of);
  // Like copy_rows(), packed (kernels/gemm.h): a 16-bit type, stride a multiple of 32. Fills the last group of rows
  // with zeros.
  void pack_rows(std::byte* to, DType type, std::int64_t stride, std::int64_t rows, std::int64_t cols,
                 const std::function<SourceRow(std::int64_t row)>& row_of);
  // Calls `write` for rows [first, first + n) of a chunk and copies the chunk, until `rows` rows are done.
  void in_chunks(std::byte* to, std::size_t row_bytes, std::int64_t rows,
                 const std::function<void(std::byte* chunk, std::int64_t first, std::int64_t n)>& write);
  void finish();       // waits until all copies are complete
  ThreadPool& pool();  // a thread per processor, made at the first call

 private:
  struct Chunk {
    PinnedMemory memory;
    Event copied;
  };
  Stream& stream_;
  std::array<Chunk, 2> chunks_;
  std::size_t next_ = 0;
  std::unique_ptr<ThreadPool> pool_;
};

class CudaBuffer : public ops::Buffer {
 public:
  explicit CudaBuffer(std::size_t bytes) : memory_(bytes, "a buffer") {
    data_ = memory_.data();
    bytes_ = bytes;
  }

 private:
  DeviceMemory memory_;
};

// A weight of a GEMM, and its bias [n] in float.
class CudaGemmWeight : public ops::Linear {
 public:
  virtual Gemm gemm() const = 0;                           // a GEMM with all fields that belong to the weight
  DType type() const { return type_; }                     // type of the inputs
  const float* bias() const { return bias_.as<float>(); }  // null if there is no bias

 protected:
  explicit CudaGemmWeight(DType type) : type_(type) {}
  // rows: of each part. Throws Error(invalid_argument) if the biases do not match.
  void make_bias(std::span<const ops::HostMatrix> bias, std::span<const std::int64_t> rows, MatrixUpload& upload);

 private:
  DType type_;
  DeviceMemory bias_;
};

struct QuantParts;

// [n, k], the stacked parts: row-major, with a row stride that is a multiple of 8 elements, and zeros beyond k; or
// packed (kernels/gemm.h).
class CudaLinear : public CudaGemmWeight {
 public:
  CudaLinear(std::span<const ops::HostMatrix> parts, std::span<const ops::HostMatrix> bias, DType weight, bool packed,
             MatrixUpload& upload);
  // Dequantises the parts.
  CudaLinear(const QuantParts& parts, std::span<const ops::HostMatrix> bias, DType weight, bool packed,
             MatrixUpload& upload);
  Gemm gemm() const override;
  bool packed() const { return packed_; }
  std::int64_t stride() const { return stride_; }
  const void* weight() const { return weight_.data(); }

 private:
  // rows: of each part. row_of() returns a row of a part; it is called in ascending order.
  void load(std::span<const std::int64_t> rows, std::span<const ops::HostMatrix> bias,
            const std::function<MatrixUpload::SourceRow(std::size_t part, std::int64_t row)>& row_of,
            MatrixUpload& upload);

  bool packed_;
  std::int64_t stride_ = 0;
  DeviceMemory weight_;
};

class CudaEmbedding : public ops::Embedding {
 public:
  CudaEmbedding(const ops::HostMatrix& table, DType weight, MatrixUpload& upload, bool in_host_memory);
  explicit CudaEmbedding(const CudaLinear& weight);  // its memory is the table
  std::int64_t rows() const { return rows_; }
  std::int64_t cols() const { return cols_; }
  const TableRows& table() const { return table_; }

 private:
  std::int64_t rows_, cols_;
  DeviceMemory memory_;       // empty if the table is a weight's, or in host memory
  PinnedMemory host_memory_;  // kernels can read it
  TableRows table_;
};

// Layers with their own storage, in groups of one kind and size. In a group, one layer follows another. If not all
// blocks have memory yet, each layer has addresses for all blocks, and memory for the first ones.
class CudaKvCache : public ops::KvCache {
 public:
  // fp8: DeviceInfo::fp8. Throws Error(unsupported) if the layout needs it, or if a block is too large.
  CudaKvCache(const ops::KvLayout& layout, const PerKind<int>& num_blocks, const PerKind<int>& committed, bool fp8);
  void commit(const PerKind<int>& num_blocks);
  const CacheLayer& layer(int index) const { return layers_[static_cast<std::size_t>(index)]; }
  std::byte* block(std::size_t layer, int block) const override;
  void copy_block(Stream& stream, CacheKind kind, std::int32_t from, std::int32_t to) const;

 private:
  struct Group {
    CacheKind kind;
    std::size_t block_bytes;
    std::vector<std::size_t> layers;  // indices in the layout
    GrowingMemory memory;
  };
  std::vector<Group> groups_;
  std::vector<CacheLayer> layers_;  // as in the layout
};

}  // namespace charonia::cuda
