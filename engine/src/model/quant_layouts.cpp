#include "model/quant_layouts.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "base/text.h"
#include "charonia/error.h"

namespace charonia::model {
namespace {

constexpr std::int64_t kWordBits = 32, kWordBytes = 4;
constexpr int kByteOffset = 128;                      // from codes 0 .. 255 to i8 codes
constexpr std::int64_t kMxGroup = 32, kMxBlock = 16;  // columns that share an exponent, and their bytes
// In layout awq, bits [4 i, 4 i + 4) of a word belong to this row of a group of eight.
constexpr std::array<int, 8> kAwqRows{0, 2, 4, 6, 1, 3, 5, 7};

// Throws an error that the caller completes.
template <class... What>
[[noreturn]] void refuse(const What&... what) {
  throw Error(ErrorCode::invalid_argument, cat(what...));
}

std::int64_t round_up_quotient(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Unaligned, because a file's data may begin anywhere.
template <class T>
T load(const std::byte* data, std::int64_t index) {
  T out;
  std::memcpy(&out, data + static_cast<std::size_t>(index) * sizeof(T), sizeof out);
  return out;
}

// Converts a biased exponent, as in a float, to a power of 2; 255 means NaN.
float power_of_two(std::uint8_t exponent) {
  constexpr std::uint32_t kLeast = 0x00400000U;  // 2^-127, which is a subnormal float
  constexpr int kMantissaBits = 23;
  if (exponent == 255) return std::numeric_limits<float>::quiet_NaN();
  return std::bit_cast<float>(exponent == 0 ? kLeast : std::uint32_t{exponent} << kMantissaBits);
}

// Calls fn with a function that maps an index to a float.
template <class Fn>
void with_values(const TensorView& view, Fn fn) {
  const auto* const data = view.data.data();
  switch (view.dtype) {
    case DType::f32:
      return fn([data](std::int64_t i) { return load<float>(data, i); });
    case DType::f16:
      return fn([data](std::int64_t i) { return f16_to_float(load<std::uint16_t>(data, i)); });
    case DType::bf16:
      return fn([data](std::int64_t i) { return bf16_to_float(load<std::uint16_t>(data, i)); });
    default:  // exponents; scales have no other types
      return fn([data](std::int64_t i) { return power_of_two(load<std::uint8_t>(data, i)); });
  }
}

// Unpacks the codes of a word, lowest bits first, into one byte each.
template <int kBits>
void spread(std::uint32_t word, std::uint8_t* out) {
  if constexpr (kBits == 4) {
    std::uint64_t wide = word;
    wide = (wide | wide << 16U) & 0x0000FFFF0000FFFFU;
    wide = (wide | wide << 8U) & 0x00FF00FF00FF00FFU;
    wide = (wide | wide << 4U) & 0x0F0F0F0F0F0F0F0FU;
    std::memcpy(out, &wide, sizeof wide);
  } else {
    word ^= 0x80808080U;  // subtracts 128 from each code
    std::memcpy(out, &word, sizeof word);
  }
}

// Decodes words [begin, end) of n rows. Rows are `row_step` words apart, columns `word_step`.
template <int kBits>
void decode_rows(const std::byte* data, std::int64_t row_step, std::int64_t word_step, std::int64_t n,
                 std::int64_t begin, std::int64_t end, std::uint8_t* out, std::int64_t stride) {
  constexpr std::int64_t kCodes = kWordBits / kBits;
  constexpr std::int64_t kTile = 16;  // words of a row; each may be in another cache line
  for (auto first = begin; first < end; first += kTile) {
    const auto last = std::min(end, first + kTile);
    for (std::int64_t r = 0; r < n; ++r) {
      auto* to = out + r * stride + (first - begin) * kCodes;
      for (auto word = first; word < last; ++word, to += kCodes) {
        spread<kBits>(load<std::uint32_t>(data, r * row_step + word * word_step), to);
      }
    }
  }
}

// Decodes columns [begin, end) of rows [row, row + n) of layout awq, with `words` words for each column.
void decode_awq(const std::byte* data, std::int64_t words, std::int64_t row, std::int64_t n, std::int64_t begin,
                std::int64_t end, std::uint8_t* out, std::int64_t stride) {
  constexpr std::int64_t kRows = 8;
  // The stride between columns is often a power of two, so only a few columns fit into the cache together. Therefore
  // the loop uses all needed words of a cache line together.
  constexpr std::int64_t kColumns = 64, kWords = 16;
  std::array<std::array<std::uint32_t, kColumns>, kWords> tile;
  const auto end_word = round_up_quotient(row + n, kRows);
  for (auto first_word = row / kRows; first_word < end_word; first_word += kWords) {
    const auto some = std::min(kWords, end_word - first_word);
    for (auto first = begin; first < end; first += kColumns) {
      const auto count = std::min(kColumns, end - first);
      for (std::int64_t j = 0; j < count; ++j) {
        for (std::int64_t w = 0; w < some; ++w) {
          tile[static_cast<std::size_t>(w)][static_cast<std::size_t>(j)] =
              load<std::uint32_t>(data, (first + j) * words + first_word + w);
        }
      }
      for (std::int64_t w = 0; w < some; ++w) {
        const auto* const numbers = tile[static_cast<std::size_t>(w)].data();
        for (std::size_t i = 0; i < kAwqRows.size(); ++i) {
          const auto r = (first_word + w) * kRows + kAwqRows[i] - row;
          if (r < 0 || r >= n) continue;
          auto* const to = out + r * stride + (first - begin);
          const auto shift = static_cast<unsigned>(4 * i);
          for (std::int64_t j = 0; j < count; ++j) to[j] = static_cast<std::uint8_t>(numbers[j] >> shift & 15U);
        }
      }
    }
  }
}

bool any_nan_f8(const std::uint8_t* codes, std::int64_t n) {
  std::uint8_t greatest = 0;
  for (std::int64_t i = 0; i < n; ++i) greatest = std::max(greatest, static_cast<std::uint8_t>(codes[i] & 0x7fU));
  return greatest == 0x7f;
}

}  // namespace

std::string_view to_string(QuantLayout layout) {
  constexpr std::array<std::string_view, 7> kNames = {"rows", "packed-rows", "awq",  "gptq",
                                                      "mxfp4", "gguf",      "rounded"};
  return kNames.at(static_cast<std::size_t>(layout));
}

DType Quantization::codes_dtype() const {
  switch (layout) {
    case QuantLayout::rows:
      return code == ops::Code::f8_e4m3 ? DType::f8_e4m3 : DType::i8;
    case QuantLayout::mxfp4:
    case QuantLayout::gguf:
      return DType::u8;
    default:
      return DType::i32;
  }
}

bool Quantization::has_input_scale() const {
  return activations == ops::Activations::i8_tensor || activations == ops::Activations::f8_tensor;
}

QuantPart::QuantPart(const Quantization& how, QuantTensors tensors, const Range& rows, const Range& cols,
                     std::int64_t row_step)
    : how_(how), tensors_(std::move(tensors)), row_step_(row_step) {
  find_shape();
  const auto [first_row, last_row] = rows.value_or(std::pair{std::int64_t{0}, file_rows_});
  const auto [first_col, last_col] = cols.value_or(std::pair{std::int64_t{0}, file_cols_});
  const auto within = [](std::int64_t begin, std::int64_t end, std::int64_t size) {
    return 0 <= begin && begin < end && end <= size;
  };
  if (!within(first_row, last_row, file_rows_) || !within(first_col, last_col, file_cols_)) {
    refuse("is rows [", first_row, ", ", last_row, ") and columns [", first_col, ", ", last_col, ") of ",
           tensors_.codes.name, ", which has shape [", file_rows_, ", ", file_cols_, "]");
  }
  first_row_ = first_row, first_col_ = first_col;
  rows_ = round_up_quotient(last_row - first_row, row_step), cols_ = last_col - first_col;
  find_groups();
  format_.code = how_.code;
  format_.zeros = how_.zeros;
  format_.activations = how_.activations;
  format_.minimums = how_.minimums;
  if (how_.layout == QuantLayout::gguf) {
    check_blocks();
    format_.scale_type = how_.block->scale_type;
    return;
  }
  scale_steps_ = find_scales();
  if (tensors_.zeros) zero_steps_ = find_zeros();
  if (tensors_.order && tensors_.order->view.shape != std::vector{file_cols_}) {
    refuse("has the groups of its columns in ", tensors_.order->name, " of shape ",
           shape_text(tensors_.order->view.shape), ", expected [", file_cols_, "]");
  }
  if (tensors_.input_scale && tensors_.input_scale->view.data.size() != size_of(tensors_.input_scale->view.dtype)) {
    refuse("has the input's scale in ", tensors_.input_scale->name, " of shape ",
           shape_text(tensors_.input_scale->view.shape), ", expected one value");
  }
  const auto type = tensors_.scales.view.dtype;
  format_.scale_type = how_.layout == QuantLayout::mxfp4 ? DType::f8_e8m0 : type;  // files may store it as u8
}

QuantPart::QuantPart(const Quantization& how, std::string path, std::string name, RoundedRows rows)
    : how_(how), rounded_(std::move(rows)) {
  tensors_.path = std::move(path);
  tensors_.codes.name = std::move(name);
  const auto& own = rounded_->own();
  rows_ = own.rows, cols_ = own.cols;
  format_ = {.code = how.code,
             .group = rounded_->group(),
             .zeros = false,
             .scale_type = own.dtype,
             .activations = how.activations};
}

template <class Fn>
void QuantPart::for_rows(std::int64_t first, std::int64_t n, Fn fn) const {
  const auto together = row_step_ == 1 ? n : 1;
  for (auto row = first; row < first + n; row += together) fn(first_row_ + row * row_step_, together, row);
}

void QuantPart::find_shape() {
  const auto& shape = tensors_.codes.view.shape;
  const auto codes = kWordBits / ops::bits_of(how_.code);  // codes per word
  const bool by_column = how_.layout == QuantLayout::awq || how_.layout == QuantLayout::gptq;
  const bool blocks = how_.layout == QuantLayout::mxfp4 && shape.size() == 4 && shape[3] == kMxBlock;
  if (!blocks && shape.size() != 2 && (shape.size() != 3 || by_column)) {
    refuse("has shape ", shape_text(shape), ", which is not valid in layout ", to_string(how_.layout));
  }
  // Checked before any product: a tensor without values may have sizes of any magnitude next to the 0.
  if (std::ranges::any_of(shape, [](auto size) { return size <= 0; })) {
    refuse("has shape ", shape_text(shape), ": sizes must be at least 1");
  }
  if (by_column) {
    file_rows_ = shape[1] * (how_.layout == QuantLayout::awq ? codes : 1);
    file_cols_ = shape[0] * (how_.layout == QuantLayout::gptq ? codes : 1);
  } else if (how_.layout == QuantLayout::gguf) {
    const auto& block = *how_.block;
    if (shape.back() % block.bytes != 0) {
      refuse("has rows of ", shape.back(), " bytes, expected a multiple of ", block.bytes, ", a block of ", block.name);
    }
    file_rows_ = shape[0] * (shape.size() > 2 ? shape[1] : 1);
    file_cols_ = shape.back() / block.bytes * block.columns;
  } else {
    file_rows_ = shape[0] * (shape.size() > 2 ? shape[1] : 1);
    file_cols_ = blocks                                    ? shape[2] * kMxGroup
                 : how_.layout == QuantLayout::rows        ? shape.back()
                 : how_.layout == QuantLayout::packed_rows ? shape.back() * codes
                                                           : shape.back() * 2;
  }
}

void QuantPart::check_blocks() const {
  const auto& block = *how_.block;
  for (const auto bound : {first_col_, first_col_ + cols_}) {
    if (bound % block.columns == 0) continue;
    refuse("ends at column ", bound, " of ", tensors_.codes.name, ", expected a multiple of ", block.columns,
           ", the columns of a block of ", block.name, ": choose fewer ranks (tensor_para_size)");
  }
  const bool widened = how_.code == ops::Code::i8 && block.code == ops::Code::u4;
  if ((how_.code != block.code && !widened) || block.group % how_.group_size != 0 ||
      (block.minimums && !how_.minimums)) {
    refuse("is ", ops::to_string(how_.code), " in groups of ", how_.group_size, how_.minimums ? " with" : " without",
           " minimums, which cannot hold the numbers of ", block.name);
  }
}

void QuantPart::find_groups() {
  if (how_.layout == QuantLayout::gguf) {
    format_.group = how_.group_size;
    return;
  }
  const auto size = group_size();
  const bool may_be_short = how_.layout == QuantLayout::rows;  // the last group
  if (file_cols_ % size != 0 && !may_be_short) {
    refuse("has ", file_cols_, " columns in ", tensors_.codes.name, ", expected a multiple of its group_size = ", size);
  }
  file_groups_ = round_up_quotient(file_cols_, size);
  if (file_groups_ == 1) {
    format_.group = cols_;
    return;
  }
  const auto last_col = first_col_ + cols_;
  if (first_col_ % size != 0 || (last_col % size != 0 && last_col != file_cols_)) {
    refuse("is columns [", first_col_, ", ", last_col, ") of ", tensors_.codes.name,
           ", expected a range that begins and ends at groups of ", size,
           " columns: choose fewer ranks (tensor_para_size)");
  }
  // A device needs groups of equal size. If the last group is short, all groups become smaller, and some share a
  // scale.
  format_.group = std::gcd(size, cols_);
  first_group_ = first_col_ / size;
}

QuantPart::Steps QuantPart::find_scales() const {
  const auto& shape = tensors_.scales.view.shape;
  if (how_.layout == QuantLayout::awq || how_.layout == QuantLayout::gptq) {
    if (shape == std::vector{file_groups_, file_rows_}) return {.row = 1, .group = file_rows_};
    refuse("has scales ", tensors_.scales.name, " of shape ", shape_text(shape), ", expected [", file_groups_, ", ",
           file_rows_, "]: groups of ", file_cols_ / file_groups_, " of its ", file_cols_, " columns, and its rows");
  }
  // In a tensor with three dimensions, a block of rows must not reach into the next matrix.
  const auto& codes = tensors_.codes.view.shape;
  const auto matrix_rows = codes.size() > 2 ? codes[1] : file_rows_;
  const auto matrix_blocks = round_up_quotient(matrix_rows, how_.group_rows);
  const bool whole = matrix_rows == file_rows_ || matrix_rows % how_.group_rows == 0;
  const auto blocks = file_rows_ / matrix_rows * matrix_blocks;
  const bool flat = shape == std::vector{blocks, file_groups_};
  const bool matrices = codes.size() > 2 && shape == std::vector{codes[0], matrix_blocks, file_groups_};
  if (whole && (flat || matrices)) return {.rows = how_.group_rows, .row = file_groups_, .group = 1};
  const bool one_group = file_groups_ == 1 && how_.group_rows == 1 && how_.layout != QuantLayout::mxfp4;
  if (one_group && shape == std::vector{file_rows_}) return {.row = 1};
  const bool one = shape.size() <= 2 && std::ranges::all_of(shape, [](auto size) { return size == 1; });
  if (one_group && one) return {};
  refuse("has scales ", tensors_.scales.name, " of shape ", shape_text(shape), ", expected [", blocks, ", ",
         file_groups_, "]",
         codes.size() > 2 ? cat(" or [", codes[0], ", ", matrix_blocks, ", ", file_groups_, "]") : "", ": ",
         how_.group_rows > 1 ? cat("blocks of ", how_.group_rows, " of ") : "", "its ", file_rows_,
         " rows, and groups of ", group_size(), " of its ", file_cols_, " columns",
         one_group ? cat("; or [", file_rows_, "], or one for all") : "");
}

QuantPart::Steps QuantPart::find_zeros() const {
  const auto codes = kWordBits / ops::bits_of(how_.code);
  const auto& shape = tensors_.zeros->view.shape;
  const auto words = round_up_quotient(file_rows_, codes);
  const bool by_row = how_.layout == QuantLayout::packed_rows;
  const auto expected = by_row ? std::vector{words, file_groups_} : std::vector{file_groups_, words};
  if (shape != expected) {
    refuse("has zeros ", tensors_.zeros->name, " of shape ", shape_text(shape), ", expected ", shape_text(expected),
           ": ", codes, " of ", file_rows_, " rows in a number, and ", file_groups_, " groups");
  }
  return by_row ? Steps{.rows = codes, .row = file_groups_, .group = 1}
                : Steps{.rows = codes, .row = 1, .group = words};
}

void QuantPart::fail(const std::string& what) const {
  throw Error(ErrorCode::invalid_argument,
              cat("tensor ", tensors_.codes.name, " of ", tensors_.path, " ", what, ": download the model again"));
}

void QuantPart::open() {
  find_order();
  if (tensors_.input_scale) {
    with_values(tensors_.input_scale->view, [&](const auto& value) { input_scale_ = value(0); });
    if (!std::isfinite(input_scale_) || input_scale_ <= 0) {
      fail(cat("has the input's scale ", tensors_.input_scale->name, " = ", input_scale_,
               ", expected a finite number greater than 0"));
    }
  }
  if (format_.zeros && zeros_are_symmetric()) format_.zeros = false;
}

void QuantPart::find_order() {
  order_.clear();
  if (!tensors_.order) return;
  const auto* const data = tensors_.order->view.data.data();
  const auto group_size = this->group_size();
  // The position of the next column of each group.
  std::vector<std::int64_t> ends(static_cast<std::size_t>(file_groups_));
  for (std::size_t g = 0; g < ends.size(); ++g) ends[g] = static_cast<std::int64_t>(g) * group_size;
  std::vector<std::int32_t> order(static_cast<std::size_t>(file_cols_));
  bool sorted = true;
  for (std::int64_t c = 0; c < file_cols_; ++c) {
    const auto group = load<std::int32_t>(data, c);
    if (group < 0 || group >= file_groups_) {
      fail(cat("has column ", c, " in group ", group, " by ", tensors_.order->name, ", expected 0 to ",
               file_groups_ - 1));
    }
    auto& end = ends[static_cast<std::size_t>(group)];
    if (end == (group + 1) * group_size) {
      fail(cat("has more columns in group ", group, " by ", tensors_.order->name,
               " than its group_size = ", group_size));
    }
    sorted = sorted && end == c;
    order[static_cast<std::size_t>(end++)] = static_cast<std::int32_t>(c);
  }
  if (sorted) return;
  if (cols_ != file_cols_) {
    throw Error(
        ErrorCode::unsupported,
        cat("tensor ", tensors_.codes.name, " of ", tensors_.path, " cannot be split into columns [", first_col_, ", ",
            first_col_ + cols_, ") for a rank: its groups have columns from the whole tensor (desc_act), ",
            "and the rank would have only parts of them. Use tensor_para_size = 1 (--tp 1), or a checkpoint that "
            "was quantised with desc_act = false or static_groups = true"));
  }
  order_ = std::move(order);
}

bool QuantPart::zeros_are_symmetric() const {
  constexpr std::int64_t kRows = 64;
  std::vector<std::int8_t> zeros(static_cast<std::size_t>(kRows * groups()));
  const std::int8_t symmetric = how_.code == ops::Code::u4 ? 8 : 0;
  bool all = true;
  for (std::int64_t r = 0; r < rows_; r += kRows) {
    for_rows(r, std::min(kRows, rows_ - r), [&](auto row, auto n, auto) {
      read_zeros(row, n, zeros.data());  // of all rows, so that this also checks their values
      all = all && std::all_of(zeros.begin(), zeros.begin() + n * groups(), [&](auto z) { return z == symmetric; });
    });
  }
  return all;
}

void QuantPart::unify(std::span<QuantPart* const> parts) {
  const bool zeros = std::ranges::any_of(parts, [](const auto* part) { return part->format_.zeros; });
  const auto type = parts.empty() ? DType::f32 : parts.front()->format_.scale_type;
  const bool one_type = std::ranges::all_of(parts, [&](const auto* part) { return part->format_.scale_type == type; });
  float input_scale = 0;
  for (const auto* part : parts) input_scale = std::max(input_scale, part->input_scale_);
  for (auto* part : parts) {
    part->format_.zeros = zeros;
    part->input_scale_ = input_scale;
    if (!one_type) part->format_.scale_type = DType::f32;
  }
}

void QuantPart::read(std::int64_t first, std::int64_t n, std::uint8_t* codes, float* scales, std::int8_t* zeros) const {
  if (rounded_) {
    if (!rounded_->read(first, n, codes, scales)) fail("has values that are not finite (NaN or infinity)");
    return;
  }
  for_rows(first, n, [&](auto row, auto count, auto own) {
    const auto at = own - first;
    if (how_.layout == QuantLayout::gguf) {
      return read_blocks(row, count, codes + at * cols_, scales + at * groups(), nullptr);
    }
    read_codes(row, count, codes + at * cols_);
    read_scales(row, count, scales + at * groups());
    if (format_.zeros) read_zeros(row, count, zeros + at * groups());
  });
}

void QuantPart::read_minimums(std::int64_t first, std::int64_t n, float* minimums) const {
  if (!format_.minimums) return;
  for_rows(first, n, [&](auto row, auto count, auto own) {
    read_blocks(row, count, nullptr, nullptr, minimums + (own - first) * groups());
  });
}

void QuantPart::read_blocks(std::int64_t row, std::int64_t n, std::uint8_t* codes, float* scales,
                            float* minimums) const {
  const auto& type = *how_.block;
  const auto in_block = type.columns / format_.group, shared = type.group / format_.group;
  const bool widened = format_.code != type.code;  // from u4 to i8: the code becomes its number
  const auto row_bytes = file_cols_ / type.columns * type.bytes;
  DecodedBlock block;
  const auto spread = [&](const float* from, float*& to) {
    for (std::int64_t g = 0; g < in_block; ++g) {
      const float value = from[g / shared];
      if (!std::isfinite(value)) fail(cat("has a block of ", type.name, " with a scale that is not finite"));
      *to++ = value;
    }
  };
  std::fill_n(block.minimums, kMaxGroups, 0.0F);
  for (std::int64_t r = row; r < row + n; ++r) {
    const auto* from = tensors_.codes.view.data.data() + r * row_bytes + first_col_ / type.columns * type.bytes;
    for (std::int64_t c = 0; c < cols_; c += type.columns, from += type.bytes) {
      type.decode(from, block);
      if (minimums != nullptr) spread(block.minimums, minimums);
      if (codes == nullptr) continue;
      spread(block.scales, scales);
      for (std::int64_t i = 0; i < type.columns; ++i) {
        codes[i] = widened ? static_cast<std::uint8_t>(block.codes[i] - 8) : block.codes[i];
      }
      codes += type.columns;
    }
  }
}

void QuantPart::decode(std::int64_t row, std::int64_t n, std::int64_t begin, std::int64_t end, std::uint8_t* out,
                       std::int64_t stride) const {
  const auto* const data = tensors_.codes.view.data.data();
  const auto codes = kWordBits / ops::bits_of(how_.code);
  const auto decode = [&](std::int64_t row_step, std::int64_t word_step) {
    const auto* const from = data + static_cast<std::size_t>(row * row_step * kWordBytes);
    if (codes == 8) {
      decode_rows<4>(from, row_step, word_step, n, begin, end, out, stride);
    } else {
      decode_rows<8>(from, row_step, word_step, n, begin, end, out, stride);
    }
  };
  if (how_.layout == QuantLayout::awq) {
    decode_awq(data, file_rows_ / codes, row, n, begin, end, out, stride);
  } else if (how_.layout == QuantLayout::gptq) {
    decode(1, file_rows_);
  } else {
    decode(file_cols_ / codes, 1);
  }
}

void QuantPart::read_codes(std::int64_t row, std::int64_t n, std::uint8_t* out) const {
  if (how_.layout == QuantLayout::rows) {
    const auto* from = tensors_.codes.view.data.data() + static_cast<std::size_t>(row * file_cols_ + first_col_);
    for (std::int64_t r = 0; r < n; ++r, from += file_cols_, out += cols_) {
      std::memcpy(out, from, static_cast<std::size_t>(cols_));
      if (how_.code == ops::Code::f8_e4m3 && any_nan_f8(out, cols_)) {
        fail(cat("has values that are not finite (NaN) in row ", row + r));
      }
    }
    return;
  }
  // Decodes whole words directly if the range has no partial words. Otherwise decodes the words that contain the range,
  // then picks columns.
  const auto per_number = how_.layout == QuantLayout::awq ? 1 : kWordBits / ops::bits_of(how_.code);
  const auto begin = first_col_ / per_number, end = round_up_quotient(first_col_ + cols_, per_number);
  if (order_.empty() && begin * per_number == first_col_ && (end - begin) * per_number == cols_) {
    decode(row, n, begin, end, out, cols_);
    return;
  }
  constexpr std::int64_t kRows = 32;
  const auto width = (end - begin) * per_number, skipped = first_col_ - begin * per_number;
  std::vector<std::uint8_t> decoded(static_cast<std::size_t>(std::min(n, kRows) * width));
  for (std::int64_t r = 0; r < n; r += kRows) {
    const auto rows = std::min(kRows, n - r);
    decode(row + r, rows, begin, end, decoded.data(), width);
    for (std::int64_t i = 0; i < rows; ++i, out += cols_) {
      const auto* const from = decoded.data() + i * width;
      if (order_.empty()) {
        std::memcpy(out, from + skipped, static_cast<std::size_t>(cols_));
      } else {
        for (std::int64_t c = 0; c < cols_; ++c) out[c] = from[order_[static_cast<std::size_t>(c)]];
      }
    }
  }
}

void QuantPart::read_scales(std::int64_t row, std::int64_t n, float* out) const {
  const auto size = group_size();
  with_values(tensors_.scales.view, [&](const auto& value) {
    for (std::int64_t r = row; r < row + n; ++r) {
      const auto first = r / scale_steps_.rows * scale_steps_.row + first_group_ * scale_steps_.group;
      bool finite = true;
      for (std::int64_t g = 0; g < groups(); ++g) {
        const float scale = value(first + g * format_.group / size * scale_steps_.group);
        finite = finite && std::isfinite(scale);
        *out++ = scale;
      }
      if (!finite) {
        fail(cat("has scales, ", tensors_.scales.name, ", that are not finite (NaN or infinity) in row ", r));
      }
    }
  });
}

void QuantPart::read_zeros(std::int64_t row, std::int64_t n, std::int8_t* out) const {
  if (!tensors_.zeros) {
    std::fill_n(out, n * groups(), static_cast<std::int8_t>(how_.code == ops::Code::u4 ? 8 : 0));
    return;
  }
  const int bits = ops::bits_of(how_.code);
  const auto* const data = tensors_.zeros->view.data.data();
  const int offset = (how_.layout == QuantLayout::gptq ? how_.zero_offset : 0) - (bits == 8 ? kByteOffset : 0);
  // The bit offset of each row in a word.
  std::array<unsigned, kWordBits> shifts{};
  for (int i = 0; i < kWordBits / bits; ++i) {
    const auto at = static_cast<std::size_t>(i);
    shifts[how_.layout == QuantLayout::awq ? static_cast<std::size_t>(kAwqRows[at]) : at] =
        static_cast<unsigned>(bits * i);
  }
  const auto mask = (std::uint32_t{1} << static_cast<unsigned>(bits)) - 1;
  for (std::int64_t r = row; r < row + n; ++r) {
    const auto first = r / zero_steps_.rows * zero_steps_.row + first_group_ * zero_steps_.group;
    const auto shift = shifts[static_cast<std::size_t>(r % zero_steps_.rows)];
    for (std::int64_t g = 0; g < groups(); ++g) {
      const auto stored = load<std::uint32_t>(data, first + g * zero_steps_.group) >> shift & mask;
      const int zero = static_cast<int>(stored) + offset;
      if (zero > std::numeric_limits<std::int8_t>::max()) {
        fail(cat("has zeros, ", tensors_.zeros->name, ": the zero of row ", r, " and group ", first_group_ + g, " is ",
                 zero + kByteOffset, ", expected 0 to 255"));
      }
      *out++ = static_cast<std::int8_t>(zero);
    }
  }
}

std::span<const std::byte> QuantPart::codes_bytes() const {
  if (rounded_) return bytes_of(rounded_->own());
  const auto all = tensors_.codes.view.data;
  if (how_.layout == QuantLayout::awq || how_.layout == QuantLayout::gptq) return all;
  const auto row = all.size() / static_cast<std::size_t>(file_rows_);
  const auto end = first_row_ + (rows_ - 1) * row_step_ + 1;
  return all.subspan(static_cast<std::size_t>(first_row_) * row, static_cast<std::size_t>(end - first_row_) * row);
}

}  // namespace charonia::model
