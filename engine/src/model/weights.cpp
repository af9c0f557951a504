#include "model/weights.h"

#include <algorithm>
#include <span>
#include <system_error>
#include <tuple>
#include <utility>

#include "base/text.h"
#include "charonia/error.h"
#include "model/rounding.h"

namespace charonia::model {
namespace {

bool intersect(const Manifest::Range& a, const Manifest::Range& b) {
  return !a || !b || (a->first < b->second && b->first < a->second);
}

// Finds two parts that have common elements; nulls if there are none.
std::pair<const Manifest::Part*, const Manifest::Part*> overlap(const std::vector<Manifest::Part>& parts) {
  std::vector<const Manifest::Part*> sorted;
  for (const auto& part : parts) sorted.push_back(&part);
  std::ranges::sort(sorted, {}, [](const auto* part) { return std::tie(part->file, part->name, part->rows); });
  for (std::size_t i = 1; i < sorted.size(); ++i) {
    const auto &a = *sorted[i - 1], &b = *sorted[i];
    if (a.file == b.file && a.name == b.name && intersect(a.rows, b.rows) && intersect(a.cols, b.cols)) return {&a, &b};
  }
  return {};
}

// Whether two tensors are the same range of a file. True in a manifest without files.
bool same_range(const Manifest::Tensor& a, const Manifest::Tensor& b) {
  if (a.parts.size() != b.parts.size() || a.parts.size() > 1) return false;
  if (a.parts.empty()) return true;
  const auto range = [](const Manifest::Tensor& tensor) {
    const auto& part = tensor.parts.front();
    return std::tuple(part.file, part.name, part.rows.value_or(std::pair{std::int64_t{0}, tensor.rows}),
                      part.cols.value_or(std::pair{std::int64_t{0}, tensor.cols}), part.row_step);
  };
  return range(a) == range(b);
}

}  // namespace

bool shares_embedding(const ModelConfig& config, const Manifest& manifest, std::string_view device) {
  if (manifest.ranks() > 1 || !config.tie_word_embeddings || config.normalize_output) return false;
  const auto &table = manifest.tensor("tok_embeddings.weight"), &output = manifest.tensor("output.0.weight");
  const bool readable = !output.quantization || device != "cuda" || ops::cuda_dequantises(output.format());
  return readable && table.quantization.has_value() == output.quantization.has_value() && table.rows == output.rows &&
         table.cols == output.cols && same_range(table, output);
}

WeightFiles::WeightFiles(Manifest manifest) : manifest_(std::move(manifest)) {
  open_files();
  for (const auto& [name, tensor] : manifest_.tensors()) tensors_.emplace(name, find_parts(name, tensor));
}

void WeightFiles::open_files() {
  for (const auto& file : manifest_.files()) {
    const std::filesystem::path path = manifest_.dir() / file.path;  // an absolute path replaces the folder's
    std::error_code error;
    const auto bytes = std::filesystem::file_size(path, error);
    if (error) manifest_.refuse(cat("its file ", path.string(), " is missing"));
    if (bytes != file.bytes) {
      manifest_.refuse(cat("its file ", path.string(), " has ", bytes, " bytes, expected ", file.bytes));
    }
    files_.push_back(std::make_unique<SafetensorsFile>(SafetensorsFile::open(path, file.tensors)));
  }
}

std::vector<WeightFiles::Part> WeightFiles::find_parts(const std::string& name, const Manifest::Tensor& tensor) const {
  std::vector<Part> out;
  std::int64_t stacked = 0;
  for (std::size_t i = 0; i < tensor.parts.size(); ++i) {
    const auto& part = tensor.parts[i];
    auto& added = out.emplace_back(Part{files_[part.file].get(), part.name, {}, {}});
    if (tensor.quantization && tensor.quantization->layout == QuantLayout::rounded) {
      added.quantised = find_rounded(name, tensor, i);
    } else if (tensor.quantization) {
      added.quantised = find_quantised(name, *tensor.quantization, part);
    } else {
      added.values = find_matrix(name, part, tensor.vector);
    }
    const auto rows = added.quantised ? added.quantised->rows() : added.values.rows;
    const auto cols = added.quantised ? added.quantised->cols() : added.values.cols;
    stacked += rows;  // cannot overflow: the counted bytes exist, and the list of parts fits into memory
    if (cols != tensor.cols) {
      manifest_.refuse(
          cat("tensor ", name, " has shape ", tensor.shape(), ", but its part ", part.name, " has ", cols, " columns"));
    }
  }
  if (stacked != tensor.rows) {
    manifest_.refuse(cat("tensor ", name, " has shape ", tensor.shape(), ", but its ", out.size(), " parts have ",
                         stacked, " rows"));
  }
  if (const auto [first, second] = overlap(tensor.parts); first != nullptr) {
    manifest_.refuse(cat("tensor ", name, " has elements of ", first->name, " in two parts"));
  }
  return out;
}

TensorView WeightFiles::find_tensor(const std::string& name, std::size_t file, const std::string& in_file,
                                    DType dtype) const {
  const auto& from = *files_[file];
  if (!from.has(in_file)) {
    manifest_.refuse(
        cat("tensor ", name, " should be ", in_file, " of ", from.path().string(), ", which has no such tensor"));
  }
  auto tensor = from.tensor(in_file);
  if (tensor.dtype != dtype) {
    manifest_.refuse(cat("tensor ", name, " (", in_file, ") has type ", to_string(tensor.dtype), " in ",
                         from.path().string(), ", expected ", to_string(dtype)));
  }
  return tensor;
}

QuantPart WeightFiles::find_quantised(const std::string& name, const Quantization& how,
                                      const Manifest::Part& part) const {
  const auto side = [&](const std::optional<Manifest::SideTensor>& one) -> std::optional<QuantTensor> {
    if (!one) return {};
    return QuantTensor{one->name, find_tensor(name, one->file, one->name, one->dtype)};
  };
  QuantTensors tensors{.path = files_[part.file]->path().string(),
                       .codes = {part.name, find_tensor(name, part.file, part.name, part.dtype)},
                       .scales = side(part.scales).value_or(QuantTensor{}),  // without them only in layout gguf
                       .zeros = side(part.zeros),
                       .order = side(part.order),
                       .input_scale = side(part.input_scale)};
  auto of_part = how;
  of_part.block = part.block;
  try {
    return {of_part, std::move(tensors), part.rows, part.cols, part.row_step};
  } catch (const Error& error) {
    manifest_.refuse(cat("tensor ", name, " (", part.name, ") ", error.what()));
  }
}

QuantPart WeightFiles::find_rounded(const std::string& name, const Manifest::Tensor& tensor, std::size_t index) const {
  const auto& part = tensor.parts[index];
  const auto& how = *tensor.quantization;
  const auto own = find_matrix(name, part, false);
  std::vector<ops::HostMatrix> rest;
  for (const auto& other : other_columns(name, how.group_size == 0 ? manifest_.ranks() : 1)) {
    const auto& parts = manifest_.tensor(other).parts;
    if (parts.size() <= index) manifest_.refuse(cat("tensor ", other, " has other parts than ", name));
    const auto& matrix = rest.emplace_back(find_matrix(other, parts[index], false));
    if (matrix.rows != own.rows) manifest_.refuse(cat("tensor ", other, " has other rows than ", name));
  }
  return {how, files_[part.file]->path().string(), part.name,
          RoundedRows(own, std::move(rest), how.code, how.group_size)};
}

ops::HostMatrix WeightFiles::find_matrix(const std::string& name, const Manifest::Part& part, bool vector) const {
  const auto tensor = find_tensor(name, part.file, part.name, part.dtype);
  const auto dimensions = tensor.shape.size();
  if (dimensions > 3 || (dimensions < 1 && !vector)) {
    manifest_.refuse(cat("tensor ", name, " (", part.name, ") has shape ", shape_text(tensor.shape)));
  }
  // The rows of a vector are all elements, which may be in several vectors, one after the other.
  std::int64_t rows = 1;
  for (const auto size : tensor.shape) rows *= size;
  const std::int64_t cols = dimensions == 1 || vector ? 1 : tensor.shape.back();
  rows /= std::max<std::int64_t>(1, cols);
  const auto [first_row, last_row] = part.rows.value_or(std::pair{std::int64_t{0}, rows});
  const auto [first_col, last_col] = part.cols.value_or(std::pair{std::int64_t{0}, cols});
  const auto within = [](std::int64_t begin, std::int64_t end, std::int64_t size) {
    return 0 <= begin && begin < end && end <= size;
  };
  if (!within(first_row, last_row, rows) || !within(first_col, last_col, cols)) {
    manifest_.refuse(cat("tensor ", name, " is rows [", first_row, ", ", last_row, ") and columns [", first_col, ", ",
                         last_col, ") of ", part.name, ", which has shape ", shape_text(tensor.shape)));
  }
  const auto first = static_cast<std::size_t>(first_row * cols + first_col) * size_of(tensor.dtype);
  const auto step = std::min(part.row_step, last_row - first_row);
  return {tensor.data.data() + first, tensor.dtype, (last_row - first_row + step - 1) / step, last_col - first_col,
          cols * step};
}

void WeightFiles::check_shape(std::string_view name, std::int64_t rows, std::int64_t cols) const {
  const auto& tensor = manifest_.tensor(name);
  if (tensor.rows != rows || tensor.cols != cols) {
    manifest_.refuse(cat("tensor ", name, " has shape ", tensor.shape(), ", expected ",
                         tensor.vector ? cat("[", rows, "]") : cat("[", rows, ", ", cols, "]"),
                         " by the model's attributes in config.ini"));
  }
}

std::vector<ops::HostMatrix> WeightFiles::get(std::string_view name, std::int64_t rows, std::int64_t cols) const {
  check_shape(name, rows, cols);
  if (const auto& how = manifest_.tensor(name).quantization) {
    throw Error(ErrorCode::unsupported,
                cat("tensor ", name, " is quantised (", ops::to_string(how->code),
                    "), but must be fp32, fp16 or bf16: use a checkpoint that does not quantise it"));
  }
  std::vector<ops::HostMatrix> out;
  for (const auto& part : tensors_.find(name)->second) out.push_back(view(part));
  return out;
}

std::vector<std::unique_ptr<QuantPart>> WeightFiles::get_quantised(std::string_view name, std::int64_t rows,
                                                                   std::int64_t cols) const {
  check_shape(name, rows, cols);
  std::vector<std::unique_ptr<QuantPart>> out;
  for (const auto& part : tensors_.find(name)->second) out.push_back(opened(part));
  return out;
}

std::unique_ptr<QuantPart> WeightFiles::opened(const Part& part) {
  part.file->prefetch(part.quantised->codes_bytes());
  auto out = std::make_unique<QuantPart>(*part.quantised);
  out->open();
  return out;
}

const ops::HostMatrix& WeightFiles::view(const Part& part) {
  part.file->prefetch(bytes_of(part.values));
  return part.values;
}

void WeightFiles::drop_pages() const {
  for (const auto& file : files_) {
    if (file) file->drop_pages();
  }
}

std::vector<float> WeightFiles::get_vector(std::string_view name, std::int64_t n) const {
  const auto& tensor = manifest_.tensor(name);
  const bool row = !tensor.vector && tensor.rows == 1;
  std::vector<float> out;
  out.reserve(static_cast<std::size_t>(n));
  for (const auto& part : get(name, row ? 1 : n, row ? n : 1)) {
    for (std::int64_t i = 0; i < part.rows * part.cols; ++i) {
      out.push_back(float_at(part.row(i / part.cols), static_cast<std::size_t>(i % part.cols), part.dtype));
    }
  }
  return out;
}

}  // namespace charonia::model
