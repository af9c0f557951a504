// The tensors of a `weights` folder as its manifest describes them.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/safetensors.h"
#include "model/manifest.h"
#include "ops/tensor.h"

namespace charonia::model {

// By canonical name, memory-mapped. Views stay valid as long as this object.
class WeightFiles {
 public:
  // Throws Error(invalid_argument) as Manifest does, when a file is missing or has another size, and, with the name of
  // the tensor, when a part is not what the manifest says of it: not in its file, of another type or outside of what is
  // there. The message says which command mends it.
  WeightFiles(const std::filesystem::path& weights_dir, int ranks) : WeightFiles(Manifest(weights_dir, ranks)) {}
  explicit WeightFiles(Manifest manifest);

  const Manifest& manifest() const { return manifest_; }
  // The parts of a canonical tensor, in the order in which they are stacked, with the manifest's shapes: tensors of the
  // files or ranges of them, whose rows may be further apart than they are long. One-dimensional tensors have cols = 1.
  // Throws Error(invalid_argument), naming both shapes, when the tensor's is not [rows, cols], which is what the
  // model's attributes and the rank's share make of it.
  std::vector<ops::HostMatrix> get(std::string_view name, std::int64_t rows, std::int64_t cols) const;
  // Whether a tensor is quantised; get() refuses such ones by name.
  bool quantised(std::string_view name) const { return manifest_.tensor(name).quantization.has_value(); }
  // The same of a quantised tensor. Throws what QuantPart::open() does as well.
  std::vector<std::unique_ptr<QuantPart>> get_quantised(std::string_view name, std::int64_t rows,
                                                        std::int64_t cols) const;
  // A vector [n], or a matrix [1, n], as float.
  std::vector<float> get_vector(std::string_view name, std::int64_t n) const;
  // Gives back the memory that what was read so far takes in this process; what was returned stays valid.
  void drop_pages() const;

 private:
  struct Part {
    const SafetensorsFile* file;
    std::string_view name;               // in the file; the manifest's text
    ops::HostMatrix values;              // of a dense tensor
    std::optional<QuantPart> quantised;  // not opened
  };

  void open_files();
  std::vector<Part> find_parts(const std::string& name, const Manifest::Tensor& tensor) const;
  TensorView find_tensor(const std::string& name, std::size_t file, const std::string& in_file, DType dtype) const;
  ops::HostMatrix find_matrix(const std::string& name, const Manifest::Part& part) const;
  QuantPart find_quantised(const std::string& name, const Quantization& how, const Manifest::Part& part) const;
  void check_shape(std::string_view name, std::int64_t rows, std::int64_t cols) const;
  static std::unique_ptr<QuantPart> opened(const Part& part);  // which will be read now
  static const ops::HostMatrix& view(const Part& part);  // which will be read now

  Manifest manifest_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;  // by the manifest's indices
  std::map<std::string_view, std::vector<Part>> tensors_;
};

}  // namespace charonia::model
