// The tensors of a `weights` folder, as its manifest describes them.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/safetensors.h"
#include "charonia/config.h"
#include "model/manifest.h"
#include "ops/tensor.h"

namespace charonia::model {

// Finds tensors by canonical name. The files are memory-mapped. Views stay valid as long as this object.
class WeightFiles {
 public:
  // Throws Error(invalid_argument) like Manifest; if a file is missing or has another size; and, with the tensor's
  // name, if a part does not match the manifest: it is not in its file, has another type, or lies outside of its
  // tensor. The message has the command that fixes it.
  WeightFiles(const std::filesystem::path& weights_dir, int ranks) : WeightFiles(Manifest(weights_dir, ranks)) {}
  explicit WeightFiles(Manifest manifest);

  const Manifest& manifest() const { return manifest_; }
  // The parts of a canonical tensor, in stacking order, with the manifest's shapes: tensors of the files or ranges of
  // them. Rows may have a stride that is larger than their length. One-dimensional tensors have cols = 1. Throws
  // Error(invalid_argument) with both shapes if the tensor's shape is not [rows, cols], the shape that follows from the
  // model's attributes and the rank's share.
  std::vector<ops::HostMatrix> get(std::string_view name, std::int64_t rows, std::int64_t cols) const;
  bool has(std::string_view name) const { return tensors_.contains(name); }
  // Whether a tensor is quantised. get() rejects quantised tensors.
  bool quantised(std::string_view name) const { return manifest_.tensor(name).quantization.has_value(); }
  // Like get(), for a quantised tensor. Also throws the errors of QuantPart::open().
  std::vector<std::unique_ptr<QuantPart>> get_quantised(std::string_view name, std::int64_t rows,
                                                        std::int64_t cols) const;
  // A vector [n] or a matrix [1, n], as float.
  std::vector<float> get_vector(std::string_view name, std::int64_t n) const;
  // Frees the memory of this process that holds file pages. Returned views stay valid.
  void drop_pages() const;

 private:
  struct Part {
    const SafetensorsFile* file;
    std::string_view name;               // name in the file, in the manifest's text
    ops::HostMatrix values;              // for a dense tensor
    std::optional<QuantPart> quantised;  // not opened
  };

  void open_files();
  std::vector<Part> find_parts(const std::string& name, const Manifest::Tensor& tensor) const;
  TensorView find_tensor(const std::string& name, std::size_t file, const std::string& in_file, DType dtype) const;
  ops::HostMatrix find_matrix(const std::string& name, const Manifest::Part& part, bool vector) const;
  QuantPart find_quantised(const std::string& name, const Quantization& how, const Manifest::Part& part) const;
  // The part with this index of a tensor in layout rounded.
  QuantPart find_rounded(const std::string& name, const Manifest::Tensor& tensor, std::size_t index) const;
  void check_shape(std::string_view name, std::int64_t rows, std::int64_t cols) const;
  static std::unique_ptr<QuantPart> opened(const Part& part);  // opens the part and starts to read ahead
  static const ops::HostMatrix& view(const Part& part);  // starts to read ahead

  Manifest manifest_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;  // by file index of the manifest
  std::map<std::string_view, std::vector<Part>> tensors_;
};

// Whether the output layer is the embedding's table, so that it is stored once. It is not with several ranks: each has
// the whole embedding, and its rows of the output layer. A GPU cannot read rows of a quantised weight.
bool shares_embedding(const ModelConfig& config, const Manifest& manifest, std::string_view device);

}  // namespace charonia::model
