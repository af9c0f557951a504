#include "ops/cuda/cuda_quant_weights.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "base/text.h"
#include "charonia/error.h"
#include "ops/cpu/packed_linear.h"
#include "ops/cuda/kernels/quant_gemm.h"
#include "ops/cuda/kernels/quant_layout.h"

namespace charonia::cuda {
namespace {

constexpr std::int64_t kReadRows = 256;   // rows of a source per read
constexpr std::int64_t kThreadRows = 64;  // rows that a thread dequantises, as many as DequantisedRows reads together

// Packs eight codes into the words of quant_layout.h.
void pack_eight(const std::uint8_t* codes, int bits, std::uint32_t* words) {
  const auto code = [&](int i) { return static_cast<std::uint32_t>(codes[i]); };
  if (bits == 4) {
    std::uint32_t word = 0;
    for (int i = 0; i < 4; ++i) word |= (code(2 * i) & 15U) << 4 * i | (code(2 * i + 1) & 15U) << (16 + 4 * i);
    words[0] = word;
    return;
  }
  for (int i = 0; i < 2; ++i) {
    words[i] = code(4 * i) << 8 | code(4 * i + 1) << 24 | code(4 * i + 2) | code(4 * i + 3) << 16;
  }
}

void convert_scale(float scale, DType type, std::byte* to) {
  if (type == DType::f32) {
    std::memcpy(to, &scale, sizeof scale);
    return;
  }
  const std::uint16_t bits = type == DType::f16 ? float_to_f16(scale) : float_to_bf16(scale);
  std::memcpy(to, &bits, sizeof bits);
}

}  // namespace

QuantRow QuantReader::at(std::int64_t row) {
  const auto cols = source_->cols(), groups = source_->groups();
  if (row < first_ || row >= first_ + count_) {
    first_ = any_order_ ? 0 : row;
    count_ = any_order_ ? source_->rows() : std::min(kReadRows, source_->rows() - row);
    codes_.resize(static_cast<std::size_t>(count_ * cols));
    scales_.resize(static_cast<std::size_t>(count_ * groups));
    if (source_->format().zeros) zeros_.resize(scales_.size());
    source_->read(first_, count_, codes_.data(), scales_.data(), zeros_.data());
  }
  const auto at = row - first_;
  return {codes_.data() + at * cols, scales_.data() + at * groups,
          zeros_.empty() ? nullptr : zeros_.data() + at * groups};
}

DequantisedReader::DequantisedReader(const ops::QuantSource& source, DType type, ThreadPool& pool, std::size_t bytes)
    : source_(&source), type_(type), pool_(&pool) {
  const auto rows = static_cast<std::int64_t>(bytes / (static_cast<std::size_t>(source.cols()) * size_of(type)));
  most_ = std::max(rows / kThreadRows, std::int64_t{1}) * kThreadRows;
}

MatrixUpload::SourceRow DequantisedReader::at(std::int64_t row) {
  const auto cols = source_->cols();
  const auto row_bytes = static_cast<std::size_t>(cols) * size_of(type_);
  if (row < first_ || row >= first_ + count_) {
    first_ = row;
    count_ = std::min(most_, source_->rows() - row);
    rows_.resize(static_cast<std::size_t>(count_) * row_bytes);
    pool_->parallel_for(count_, kThreadRows, [&](std::int64_t begin, std::int64_t end) {
      ops::DequantisedRows rows(*source_);
      for (auto r = begin; r < end; ++r) {
        ops::cpu::convert_to(rows_.data() + static_cast<std::size_t>(r) * row_bytes, type_, rows.at(row + r).data(),
                             DType::f32, cols);
      }
    });
  }
  return {rows_.data() + static_cast<std::size_t>(row - first_) * row_bytes, type_};
}

QuantMatrices::QuantMatrices(const ops::QuantFormat& format, std::int64_t count, std::int64_t n, std::int64_t k,
                             std::int64_t cols, const std::string& name)
    : format_(format), n_(n), k_(k), cols_(cols), source_groups_(cols / format.group) {
  const bool integers = format.code == ops::Code::u4 || format.code == ops::Code::i8;
  if (format.zeros && !integers) {
    throw Error(ErrorCode::unsupported, cat(name, ": ", ops::to_string(format),
                                            ": the CUDA device supports zeros only with int4 and int8; quantise it "
                                            "symmetrically"));
  }
  if (format.group == cols) format_.group = k;
  if (format.scale_type == DType::f8_e8m0) format_.scale_type = DType::bf16;  // represents all powers of two
  const auto groups = quant_groups(format_, k);
  code_bytes_ = quant_code_bytes(format_, n, k);
  scale_elements_ = static_cast<std::size_t>(round_up(n, kQuantRows) * groups);
  const auto all = static_cast<std::size_t>(count);
  if (all * scale_elements_ > std::size_t{std::numeric_limits<int>::max()}) {
    throw Error(ErrorCode::unsupported, cat(name, ": ", count, " x ", scale_elements_,
                                            " scales: the CUDA device supports fewer than 2^31; quantise it in larger "
                                            "groups"));
  }
  const auto what = cat("a weight of ", ops::to_string(format), " [", n, ", ", cols, "]");
  codes_ = DeviceMemory(all * code_bytes_, what);
  scales_ = DeviceMemory(all * scale_elements_ * size_of(format_.scale_type), what);
  if (format_.zeros) zeros_ = DeviceMemory(all * scale_elements_, what);
}

QuantWeight QuantMatrices::weight() const {
  return {.format = format_, .scales = scales_.data(), .zeros = zeros_.data()};
}

void QuantMatrices::fill(std::int64_t index, const std::function<QuantRow(std::int64_t row)>& row_of,
                         MatrixUpload& upload) {
  const int bits = ops::bits_of(format_.code);
  const auto steps = divide_up(k_, kQuantK), units = divide_up(n_, kQuantRows), groups = quant_groups(format_, k_);
  const auto unit_bytes = code_bytes_ / static_cast<std::size_t>(units), scale_bytes = size_of(format_.scale_type);
  std::vector<std::byte> scales(scale_elements_ * scale_bytes);
  std::vector<std::int8_t> zeros(format_.zeros ? scale_elements_ : 0);
  const auto add_row = [&](std::byte* unit, std::int64_t row) {
    const auto source = row < n_ ? row_of(row) : QuantRow{};
    if (source.codes == nullptr) return;
    const auto of_unit = row % kQuantRows;
    for (std::int64_t c = 0; c < cols_; c += 8) {
      std::array<std::uint8_t, 8> last{};
      const auto* eight = source.codes + c;
      if (cols_ - c < 8) {
        std::copy_n(eight, cols_ - c, last.begin());
        eight = last.data();
      }
      std::uint32_t words[2];
      pack_eight(eight, bits, words);
      std::memcpy(unit + code_place(of_unit, c, bits, steps).word * 4, words, static_cast<std::size_t>(bits));
    }
    for (std::int64_t g = 0; g < source_groups_; ++g) {
      const auto at = static_cast<std::size_t>(scale_place(row, g, groups));
      convert_scale(source.scales[g], format_.scale_type, scales.data() + at * scale_bytes);
      if (format_.zeros) zeros[at] = source.zeros[g];
    }
  };
  const auto at = static_cast<std::size_t>(index);
  upload.in_chunks(codes_.as<std::byte>() + at * code_bytes_, unit_bytes, units,
                   [&](std::byte* chunk, std::int64_t first, std::int64_t n) {
                     std::memset(chunk, 0, static_cast<std::size_t>(n) * unit_bytes);
                     for (std::int64_t r = 0; r < n * kQuantRows; ++r) {
                       add_row(chunk + static_cast<std::size_t>(r / kQuantRows) * unit_bytes, first * kQuantRows + r);
                     }
                   });
  const auto send = [&](std::byte* to, const void* from, std::size_t element) {
    const auto row_bytes = static_cast<std::size_t>(groups * kQuantRows) * element;
    upload.in_chunks(to, row_bytes, units, [&](std::byte* chunk, std::int64_t first, std::int64_t n) {
      std::memcpy(chunk, static_cast<const std::byte*>(from) + static_cast<std::size_t>(first) * row_bytes,
                  static_cast<std::size_t>(n) * row_bytes);
    });
  };
  send(scales_.as<std::byte>() + at * scale_elements_ * scale_bytes, scales.data(), scale_bytes);
  if (format_.zeros) {
    send(zeros_.as<std::byte>() + at * scale_elements_, zeros.data(), sizeof(std::int8_t));
  }
}

QuantParts::QuantParts(std::span<const ops::QuantSource* const> all) : parts(all) {
  if (parts.empty()) throw Error(ErrorCode::invalid_argument, "a quantised weight has no part");
  const auto& format = first().format();
  k = first().cols();
  const auto order = first().order();
  for (const auto* const part : parts) {
    const auto refuse = [&](const std::string& what) {
      throw Error(ErrorCode::invalid_argument, cat(part->name(), ": ", what));
    };
    if (part->rows() < 1 || part->cols() != k || k < 1 || format.group < 1 || k % format.group != 0) {
      refuse(cat("[", part->rows(), ", ", part->cols(), "] has groups of ", format.group, ", and ", first().name(),
                 " has ", k, " columns: both must have the same number of columns, a multiple of the group"));
    }
    if (part->format() != format || !std::ranges::equal(part->order(), order)) {
      refuse(cat("its format or the order of its columns differs from ", first().name(), ", which is stacked with it"));
    }
    n += part->rows();
    rows.push_back(part->rows());
    input_scale = std::max(input_scale, part->input_scale());
  }
  if (!order.empty() && (std::ssize(order) != k || std::ranges::any_of(order, [&](std::int32_t feature) {
                           return feature < 0 || feature >= k;
                         }))) {
    throw Error(ErrorCode::invalid_argument,
                cat(first().name(), ": the order of its columns must have ", k, " entries below ", k));
  }
}

DeviceMemory QuantParts::upload_order(MatrixUpload& upload) const {
  const auto order = first().order();
  if (order.empty()) return {};
  DeviceMemory out(order.size_bytes(), "the order of a weight's columns");
  upload.in_chunks(out.as<std::byte>(), order.size_bytes(), 1, [&](std::byte* chunk, std::int64_t, std::int64_t) {
    std::memcpy(chunk, order.data(), order.size_bytes());
  });
  return out;
}

QuantRow QuantStack::at(std::int64_t row) {
  for (; row - begin_ >= parts_->rows[part_]; ++part_) begin_ += parts_->rows[part_];
  return readers_[part_].at(row - begin_);
}

CudaQuantLinear::CudaQuantLinear(std::span<const ops::QuantSource* const> parts, std::span<const ops::HostMatrix> bias,
                                 DType data, MatrixUpload& upload)
    : CudaGemmWeight(data) {
  const QuantParts checked(parts);
  n_ = checked.n;
  k_ = checked.k;
  input_scale_ = checked.input_scale;
  matrix_ = QuantMatrices(checked.first().format(), 1, n_, k_, k_, checked.first().name());
  QuantStack rows(checked);
  matrix_.fill(0, [&](std::int64_t row) { return rows.at(row); }, upload);
  order_ = checked.upload_order(upload);
  make_bias(bias, checked.rows, upload);
  upload.finish();
  bytes_ = matrix_.bytes();
}

Gemm CudaQuantLinear::gemm() const {
  auto quant = matrix_.weight();
  quant.order = order_.as<std::int32_t>();
  quant.input_scale = input_scale_;
  return {.weight = matrix_.codes(),
          .type = type(),
          .weight_stride = round_up(k_, kQuantK),
          .bias = bias(),
          .n = n_,
          .k = k_,
          .quant = quant};
}

CudaW8a8Linear::CudaW8a8Linear(std::span<const ops::QuantSource* const> parts, std::span<const ops::HostMatrix> bias,
                               DType data, bool packed, MatrixUpload& upload)
    : CudaGemmWeight(data), packed_(packed) {
  constexpr std::int64_t kPair = 2;  // codes per element
  const QuantParts checked(parts);
  format_ = checked.first().format();
  n_ = checked.n;
  k_ = checked.k;
  input_scale_ = checked.input_scale;
  stride_ = packed_ ? round_up(k_, kPair * kPackedK) : k_;
  const auto what = cat("a weight of ", ops::to_string(format_), " [", n_, ", ", k_, "]");
  codes_ = DeviceMemory(static_cast<std::size_t>((packed_ ? round_up(n_, kPackedRows) : n_) * stride_), what);
  scales_ = DeviceMemory(static_cast<std::size_t>(n_) * sizeof(float), what);
  std::vector<float> scales;
  QuantStack rows(checked);
  const auto row_of = [&](std::int64_t row) -> MatrixUpload::SourceRow {
    const auto from = rows.at(row);
    scales.push_back(*from.scales);
    return {reinterpret_cast<const std::byte*>(from.codes), DType::bf16};
  };
  const auto upload_rows = packed_ ? &MatrixUpload::pack_rows : &MatrixUpload::copy_rows;
  (upload.*upload_rows)(codes_.as<std::byte>(), DType::bf16, stride_ / kPair, n_, k_ / kPair, row_of);
  upload.copy(scales_.as<std::byte>(), DType::f32, n_,
              {reinterpret_cast<const std::byte*>(scales.data()), DType::f32, 1, n_});
  order_ = checked.upload_order(upload);
  make_bias(bias, checked.rows, upload);
  upload.finish();
  bytes_ = codes_.bytes() + scales_.bytes();
}

Gemm CudaW8a8Linear::gemm() const {
  return {.weight = codes_.data(),
          .type = type(),
          .weight_stride = stride_,
          .packed = packed_,
          .bias = bias(),
          .n = n_,
          .k = k_,
          .quant = QuantWeight{.format = format_,
                               .column_scales = scales_.as<float>(),
                               .order = order_.as<std::int32_t>(),
                               .input_scale = input_scale_}};
}

}  // namespace charonia::cuda
