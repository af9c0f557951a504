// Quantised weights as files have them: the layouts of manifest.json (docs/contracts.md), read as ops::QuantSource.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "base/safetensors.h"
#include "ops/quant_weight.h"

namespace charonia::model {

enum class QuantLayout : std::uint8_t { rows, packed_rows, awq, gptq, mxfp4 };

std::string_view to_string(QuantLayout layout);  // as the manifest has it

// How the parts of a quantised tensor are stored, as the manifest says it.
struct Quantization {
  QuantLayout layout = QuantLayout::rows;
  ops::Code code = ops::Code::i8;
  std::int64_t group_size = 0;  // columns of the file's tensor that share a scale; 0: all. Layout rows: at most so many
  std::int64_t group_rows = 1;  // rows that share one; 1 but in layout rows
  bool zeros = false;
  int zero_offset = 1;  // of layout gptq: what is added to a stored zero, 0 or 1
  ops::Activations activations = ops::Activations::as_is;

  DType codes_dtype() const;  // the type of the file's codes
  bool has_input_scale() const;
};

// A tensor of a file.
struct QuantTensor {
  std::string name;
  TensorView view;
};

// The tensors that one part of a weight is stored in.
struct QuantTensors {
  std::string path;  // of the codes' file
  QuantTensor codes, scales;
  std::optional<QuantTensor> zeros;        // there exactly where the quantisation has them
  std::optional<QuantTensor> order;        // of layouts gptq and packed-rows: the group of each column
  std::optional<QuantTensor> input_scale;  // there exactly where activations have one
};

// A part of a quantised weight: the whole of what its tensors hold, or a range of its rows and columns. Reading is
// fastest by 64 rows or more: layouts awq and gptq have the columns of 8 rows next to each other.
class QuantPart final : public ops::QuantSource {
 public:
  using Range = std::optional<std::pair<std::int64_t, std::int64_t>>;  // [begin, end) of a dimension; none: all of it

  // row_step n: of `rows` the first and every n-th after it. Looks at types and shapes, at no values. Throws
  // Error(invalid_argument) with what does not fit and what was expected; the caller says of which tensor. The views
  // are read as long as the part lives.
  QuantPart(const Quantization& how, QuantTensors tensors, const Range& rows, const Range& cols,
            std::int64_t row_step = 1);

  // Before the first use: reads the order of the columns, the input's scale, and whether the zeros are all those of
  // symmetric codes; then the format has none. Throws Error(invalid_argument), naming the tensor, for values that do
  // not fit; Error(unsupported) for a range of columns of a weight whose columns are quantised in an order of their
  // own.
  void open();

  // Gives parts, opened, the same form of zeros and scales, so that formats differ only in what devices cannot join;
  // and the largest of their input's scales, for they have one input, or are the experts of a layer.
  static void unify(std::span<QuantPart* const> parts);

  void read(std::int64_t first, std::int64_t n, std::uint8_t* codes, float* scales, std::int8_t* zeros) const override;
  std::span<const std::int32_t> order() const override { return order_; }
  float input_scale() const override { return input_scale_; }
  std::string name() const override { return tensors_.codes.name; }

  // All bytes that are read for its codes, for reading them ahead.
  std::span<const std::byte> codes_bytes() const;

 private:
  // Where a value of a row and a group is: number (row / rows) * row + group * group of its tensor.
  struct Steps {
    std::int64_t rows = 1, row = 0, group = 0;
  };

  // Columns of a group of the whole tensor; of the last one in layout rows at most.
  std::int64_t group_size() const { return how_.group_size == 0 ? file_cols_ : how_.group_size; }

  // Calls fn(row, n, first) for rows of the part, [first, first + n) of its own and [row, row + n) of the whole tensor:
  // all at once where they lie together there.
  template <class Fn>
  void for_rows(std::int64_t first, std::int64_t n, Fn fn) const;
  void find_shape();
  void find_groups();
  Steps find_scales() const;
  Steps find_zeros() const;
  void find_order();
  bool zeros_are_symmetric() const;
  void decode(std::int64_t row, std::int64_t n, std::int64_t begin, std::int64_t end, std::uint8_t* out,
              std::int64_t stride) const;
  void read_codes(std::int64_t row, std::int64_t n, std::uint8_t* out) const;
  void read_scales(std::int64_t row, std::int64_t n, float* out) const;
  void read_zeros(std::int64_t row, std::int64_t n, std::int8_t* out) const;
  [[noreturn]] void fail(const std::string& what) const;

  Quantization how_;
  QuantTensors tensors_;
  std::int64_t file_rows_ = 0, file_cols_ = 0;  // of the whole tensor
  std::int64_t file_groups_ = 0;                // in a row of it
  std::int64_t first_row_ = 0, first_col_ = 0;  // where the part begins in it
  std::int64_t row_step_ = 1;                   // from row to row of the part
  std::int64_t first_group_ = 0;
  Steps scale_steps_, zero_steps_;
  std::vector<std::int32_t> order_;
  float input_scale_ = 0;
};

}  // namespace charonia::model
