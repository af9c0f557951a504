// manifest.json of a `weights` folder: the tensors of a model, what each rank reads of them, and where they lie
// (docs/contracts.md).
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/dtype.h"

namespace charonia::model {

class Manifest {
 public:
  using Range = std::optional<std::pair<std::int64_t, std::int64_t>>;  // [begin, end) of a dimension; none: all of it

  struct File {
    std::string path;  // relative to the folder, or absolute
    std::uint64_t bytes = 0;
  };
  // A tensor of a file or a range of it.
  struct Part {
    std::size_t file = 0;  // index in files()
    std::string name;      // in that file
    DType dtype = DType::f32;
    Range rows, cols;
  };
  // A tensor as the model has it: its parts, stacked along dimension 0.
  struct Tensor {
    std::int64_t rows = 0, cols = 1;
    bool vector = false;      // of one dimension; then cols = 1
    std::optional<int> rank;  // the only one that reads it; none: all do
    std::vector<Part> parts;  // none in a manifest without files

    std::string shape() const;  // "[rows, cols]", "[rows]"
  };
  // Numbers of elements.
  struct Elements {
    std::int64_t matrices = 0, vectors = 0;
  };

  // Throws Error(invalid_argument), with the command that mends it, when the manifest is missing, not valid, of another
  // format version or for another number of ranks. The files need not be there.
  Manifest(std::filesystem::path weights_dir, int ranks);
  // With the text of a manifest that was read before.
  Manifest(std::filesystem::path weights_dir, int ranks, const std::string& text);
  // The text of manifest.json. Throws Error(invalid_argument).
  static std::string read(const std::filesystem::path& weights_dir);

  const std::filesystem::path& dir() const { return dir_; }
  int ranks() const { return ranks_; }
  const std::vector<File>& files() const { return files_; }  // none: only shapes are known
  const std::map<std::string, Tensor, std::less<>>& tensors() const { return tensors_; }

  // By canonical name. Throws Error(invalid_argument) when it is not there.
  const Tensor& tensor(std::string_view name) const;
  // Of all tensors that a rank reads. Throws Error(invalid_argument) when no machine could hold them.
  Elements elements(int rank) const;

  // Throws Error(invalid_argument): the folder cannot be used, `what` says why, and the message how to make it anew.
  [[noreturn]] void refuse(const std::string& what) const;

 private:
  std::filesystem::path dir_;
  int ranks_;
  std::vector<File> files_;
  std::map<std::string, Tensor, std::less<>> tensors_;
};

}  // namespace charonia::model
