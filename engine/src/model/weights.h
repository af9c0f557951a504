// A `weights` folder: config.ini, manifest.json and the tensors that the manifest names (docs/contracts.md).
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/safetensors.h"
#include "charonia/config.h"
#include "ops/tensor.h"

namespace charonia::model {

// The tensors of a workspace by canonical name, memory-mapped. Views stay valid as long as this object.
class WeightFiles {
 public:
  // Throws Error(invalid_argument) when the manifest is missing, of another format version, for another number of
  // ranks, or when a file is missing or has another size; the message says which command mends it.
  WeightFiles(const std::filesystem::path& weights_dir, int ranks)
      : WeightFiles(weights_dir, ranks, read_manifest(weights_dir), true) {}
  // With the text of a manifest that was read before. all_files: those without a tensor, as the token table, must be
  // there as well.
  WeightFiles(const std::filesystem::path& weights_dir, int ranks, const std::string& manifest, bool all_files);
  // The text of manifest.json. Throws Error(invalid_argument).
  static std::string read_manifest(const std::filesystem::path& weights_dir);

  bool has(std::string_view name) const;
  // The parts of a canonical tensor, in the order in which they are stacked: tensors of the files or ranges of them,
  // whose rows may be further apart than they are long. One-dimensional tensors have cols = 1; a tensor [a, b, cols] is
  // seen as [a * b, cols].
  // Throws Error(invalid_argument) when it is not there or the stacked shape is not [rows, cols].
  std::vector<ops::HostMatrix> get(std::string_view name, std::int64_t rows, std::int64_t cols) const;
  // Gives back the memory that what was read so far takes in this process; what was returned stays valid.
  void drop_pages() const;
  // Reads everything: the first tensor with values that are not finite, or that become so when a matrix is rounded to
  // weight_type, what is wrong with it and what to do; empty: none, or it was asked to stop.
  std::string find_broken(DType weight_type, const std::stop_token& stop) const;
  // A vector [n] as float.
  std::vector<float> get_vector(std::string_view name, std::int64_t n) const;

  using Range = std::optional<std::pair<std::int64_t, std::int64_t>>;  // [begin, end) of a dimension; none: all of it

 private:
  struct Part {
    const SafetensorsFile* file;
    std::string name;
    Range rows, cols;
  };

  ops::HostMatrix view(std::string_view name, const Part& part) const;

  std::filesystem::path dir_;
  std::map<std::string, std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, std::vector<Part>, std::less<>> tensors_;
};

}  // namespace charonia::model
