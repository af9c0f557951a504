// Reads quantised weights from files: the layouts of manifest.json (docs/contracts.md), as an ops::QuantSource.
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
#include "model/gguf_blocks.h"
#include "model/rounded_rows.h"
#include "ops/quant_weight.h"

namespace charonia::model {

// rounded: the file has the 16-bit or fp32 weight, which is rounded while it is read (rounded_rows.h).
enum class QuantLayout : std::uint8_t { rows, packed_rows, awq, gptq, mxfp4, gguf, rounded };

std::string_view to_string(QuantLayout layout);  // the name in the manifest, which never has `rounded`

// How the parts of a quantised tensor are stored, according to the manifest.
struct Quantization {
  QuantLayout layout = QuantLayout::rows;
  ops::Code code = ops::Code::i8;
  // Columns of the file's tensor that share a scale; 0: all columns. In layout rows the last group may be shorter.
  std::int64_t group_size = 0;
  std::int64_t group_rows = 1;  // rows that share a scale; 1 except in layout rows
  bool zeros = false;
  int zero_offset = 1;  // for layout gptq: added to a stored zero, 0 or 1
  ops::Activations activations = ops::Activations::as_is;
  bool minimums = false;             // only in layout gguf
  const BlockType* block = nullptr;  // of a part in layout gguf. It is read as `code`, in groups of group_size

  DType codes_dtype() const;  // the type of the codes in the file
  bool has_input_scale() const;
};

// A tensor of a file.
struct QuantTensor {
  std::string name;
  TensorView view;
};

// The tensors that store one part of a weight.
struct QuantTensors {
  std::string path;  // path of the file with the codes
  QuantTensor codes, scales;               // layout gguf has no scales: they are between the codes
  std::optional<QuantTensor> zeros;        // set if and only if the quantisation has zeros
  std::optional<QuantTensor> order;        // for layouts gptq and packed-rows: the group of each column
  std::optional<QuantTensor> input_scale;  // set if and only if the activations have a static scale
};

// A part of a quantised weight: all of its tensors, or a range of rows and columns. Reads of 64 rows or more are
// fastest, because layouts awq and gptq store the columns of 8 rows next to each other.
class QuantPart final : public ops::QuantSource {
 public:
  using Range = std::optional<std::pair<std::int64_t, std::int64_t>>;  // [begin, end) of a dimension; empty: all of it

  // row_step n: reads the first of `rows` and every n-th row after it. Checks types and shapes, not values. Throws
  // Error(invalid_argument) with the fault and the expected value; the caller adds the tensor's name. Reads the views
  // as long as the part exists.
  QuantPart(const Quantization& how, QuantTensors tensors, const Range& rows, const Range& cols,
            std::int64_t row_step = 1);
  // A part of a weight in layout rounded. path and name: of the 16-bit weight in its file.
  QuantPart(const Quantization& how, std::string path, std::string name, RoundedRows rows);

  // Call before the first use. Reads the order of the columns and the input's scale. If all zeros are those of
  // symmetric codes, the format gets no zeros. Throws Error(invalid_argument) with the tensor's name for invalid
  // values, and Error(unsupported) for a range of columns if the columns have their own order.
  void open();

  // Converts opened parts to the same form of zeros and scales, so that their formats differ only if devices cannot
  // combine them. Sets all input scales to the largest one, because the parts share one input or are the experts of a
  // layer.
  static void unify(std::span<QuantPart* const> parts);

  void read(std::int64_t first, std::int64_t n, std::uint8_t* codes, float* scales, std::int8_t* zeros) const override;
  void read_minimums(std::int64_t first, std::int64_t n, float* minimums) const override;
  std::span<const std::int32_t> order() const override { return order_; }
  float input_scale() const override { return input_scale_; }
  std::string name() const override { return tensors_.codes.name; }

  // All bytes that hold the part's codes, or the weight that is rounded, for reading ahead.
  std::span<const std::byte> codes_bytes() const;

 private:
  // The index of the value for a row and a group in its tensor: (row / rows) * row + group * group.
  struct Steps {
    std::int64_t rows = 1, row = 0, group = 0;
  };

  // Columns of a group of the whole tensor; in layout rows the last group may have fewer.
  std::int64_t group_size() const { return how_.group_size == 0 ? file_cols_ : how_.group_size; }

  // Calls fn(row, n, first) for ranges of rows: [first, first + n) of the part, which are [row, row + n) of the whole
  // tensor. One call if the rows are contiguous there.
  template <class Fn>
  void for_rows(std::int64_t first, std::int64_t n, Fn fn) const;
  void find_shape();
  void check_blocks() const;
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
  // Layout gguf: reads codes and scales, or minimums; the others are null.
  void read_blocks(std::int64_t row, std::int64_t n, std::uint8_t* codes, float* scales, float* minimums) const;
  [[noreturn]] void fail(const std::string& what) const;

  Quantization how_;
  QuantTensors tensors_;
  std::int64_t file_rows_ = 0, file_cols_ = 0;  // of the whole tensor
  std::int64_t file_groups_ = 0;                // groups in a row of the whole tensor
  std::int64_t first_row_ = 0, first_col_ = 0;  // start of the part in the whole tensor
  std::int64_t row_step_ = 1;                   // distance between rows of the part
  std::int64_t first_group_ = 0;
  Steps scale_steps_, zero_steps_;
  std::vector<std::int32_t> order_;
  float input_scale_ = 0;
  std::optional<RoundedRows> rounded_;  // in layout rounded
};

}  // namespace charonia::model
