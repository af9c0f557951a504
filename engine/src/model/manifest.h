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
#include "model/quant_layouts.h"

namespace charonia::model {

class Manifest {
 public:
  using Range = std::optional<std::pair<std::int64_t, std::int64_t>>;  // [begin, end) of a dimension; none: all of it

  struct File {
    std::string path;  // relative to the folder, or absolute
    std::uint64_t bytes = 0;
  };
  // A whole tensor of a file, beside the codes of a quantised part.
  struct Beside {
    std::size_t file = 0;  // index in files()
    std::string name;      // in that file
    DType dtype = DType::f32;
  };
  // A tensor of a file or a range of it. Of a quantised tensor these are the codes, and rows and cols are the weight's.
  struct Part {
    std::size_t file = 0;  // index in files()
    std::string name;      // in that file
    DType dtype = DType::f32;
    Range rows, cols;
    std::int64_t row_step = 1;  // n: of `rows` the first and every n-th after it; 1 but of quantised tensors
    std::optional<Beside> scales, zeros, order, input_scale;  // of a quantised tensor
  };
  // A tensor as the model has it: its parts, stacked along dimension 0.
  struct Tensor {
    std::int64_t rows = 0, cols = 1;
    bool vector = false;       // of one dimension; then cols = 1
    DType dtype = DType::f32;  // a quantised tensor: the type of its codes
    std::optional<int> rank;   // the only one that reads it; none: all do
    std::vector<Part> parts;  // none in a manifest without files
    std::optional<Quantization> quantization;

    std::string shape() const;  // "[rows, cols]", "[rows]"
  };
  // Numbers of elements that are not quantised, and bytes of what is: of codes, scales and zeros, a byte each of these.
  struct Elements {
    std::int64_t matrices = 0, vectors = 0;
    std::int64_t quantised_bytes = 0;
  };

  // Throws Error(invalid_argument), with the command that mends it, when the manifest is missing, not valid, of another
  // format version or for another number of ranks. The files need not be there.
  Manifest(std::filesystem::path weights_dir, int ranks);

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
