// manifest.json of a `weights` folder: the layers and tensors of a model, the ranges that each rank reads, and their
// files (docs/contracts.md).
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
#include "model/generated/layer_attributes.h"
#include "model/quant_layouts.h"

namespace charonia::model {

// Where a linear module of the Hugging Face model is in the canonical tensors, for adapters: rows
// [rows.first, rows.second) of its weight with step row_step, and columns [cols.first, cols.second), are the rows of
// `tensor` from first_row on.
struct ModulePlace {
  std::string tensor;
  std::optional<int> rank;  // the only rank that reads it; empty: all ranks
  std::int64_t first_row = 0;
  std::pair<std::int64_t, std::int64_t> shape;  // of the module's weight: out_features, in_features
  std::pair<std::int64_t, std::int64_t> rows, cols;
  std::int64_t row_step = 1;
};

// The linear modules of the Hugging Face model. Empty if the manifest has none.
struct Modules {
  std::map<std::string, std::vector<ModulePlace>, std::less<>> places;  // by name; at least one place each
  // Other beginnings of names, and the beginnings in `places` that they stand for.
  std::vector<std::pair<std::string, std::string>> prefixes;

  // Returns null for an unknown name.
  const std::vector<ModulePlace>* find(const std::string& name) const;
};

class Manifest {
 public:
  using Range = std::optional<std::pair<std::int64_t, std::int64_t>>;  // [begin, end) of a dimension; empty: all of it

  struct File {
    std::string path;  // relative to the folder, or absolute
    std::uint64_t bytes = 0;
    std::string tensors;  // of a file without a safetensors header: the header's JSON, with offsets from byte 0
  };
  // A whole tensor of a file that accompanies the codes of a quantised part.
  struct SideTensor {
    std::size_t file = 0;  // index in files()
    std::string name;      // in that file
    DType dtype = DType::f32;
  };
  // A tensor of a file, or a range of it. For a quantised tensor these are the codes, with the rows and cols of the
  // weight.
  struct Part {
    std::size_t file = 0;  // index in files()
    std::string name;      // in that file
    DType dtype = DType::f32;
    Range rows, cols;
    std::int64_t row_step = 1;  // n: the first of `rows` and every n-th row after it
    std::optional<SideTensor> scales, zeros, order, input_scale;  // only for a quantised tensor
    const BlockType* block = nullptr;                             // only in layout gguf
  };
  // A tensor of the model: its parts, stacked along dimension 0.
  struct Tensor {
    std::int64_t rows = 0, cols = 1;
    bool vector = false;       // one-dimensional; then cols = 1
    DType dtype = DType::f32;  // for a quantised tensor, the type of its codes; in layout rounded, of the weight
    std::optional<int> rank;   // the only rank that reads it; empty: all ranks
    std::vector<Part> parts;   // empty in a manifest without files
    std::optional<Quantization> quantization;

    std::string shape() const;  // "[rows, cols]", "[rows]"
    // The format, for a quantised tensor. Devices may choose another type of scales, and have no zeros.
    ops::QuantFormat format() const;
  };
  // Numbers of dense elements, and bytes of the quantised tensors' codes, scales and zeros (one byte per zero).
  struct Elements {
    std::int64_t matrices = 0, vectors = 0;
    std::int64_t quantised_bytes = 0;
    // The part that the CUDA device dequantises: elements, and their share of quantised_bytes. It dequantises all
    // experts of a layer, or none.
    std::int64_t dequantised = 0, dequantised_bytes = 0;
  };

  // Throws Error(invalid_argument), with the command that fixes it, if the manifest is missing, invalid, or for another
  // format version or number of ranks. The files need not exist.
  Manifest(std::filesystem::path weights_dir, int ranks);

  const std::filesystem::path& dir() const { return dir_; }
  int ranks() const { return ranks_; }
  const std::vector<File>& files() const { return files_; }  // empty: only shapes are known
  const std::vector<LayerAttributes>& layers() const { return layers_; }
  const std::map<std::string, Tensor, std::less<>>& tensors() const { return tensors_; }

  const Modules& modules() const { return modules_; }

  // The manifest of the MTP layer (`mtp_layers`, and tensors with names after "mtp."): a model with one layer, without
  // an embedding and an output layer. Empty if the weights have no such layer.
  std::optional<Manifest> mtp() const;
  bool has_mtp() const { return !mtp_layers_.empty(); }  // also of the result of mtp()
  bool is_mtp() const { return is_mtp_; }
  void drop_mtp() { mtp_layers_.clear(), mtp_tensors_.clear(); }

  // The layers whose inputs an EAGLE-3 head reads (decoder.h); the number of layers stands for the output of the
  // last one. They are not part of the file.
  const std::vector<int>& kept_layers() const { return kept_layers_; }
  void keep_layers(std::vector<int> layers) { kept_layers_ = std::move(layers); }

  // Finds a tensor by its canonical name. Throws Error(invalid_argument) if there is none.
  const Tensor& tensor(std::string_view name) const;
  // Sums over all tensors that a rank reads, without the scales of an FP8 cache, which are loaded for each head.
  // dense_output: a quantised output layer counts as dense. Throws
  // Error(invalid_argument) if they exceed the memory of any machine.
  Elements elements(int rank, bool dense_output = false) const;

  // Marks a tensor that is not quantised as one in layout rounded (rounding.h).
  void round(std::string_view name, const Quantization& how) { tensors_.find(name)->second.quantization = how; }

  // Throws Error(invalid_argument): the folder cannot be used. `what` is the reason; the message also says how to
  // create the folder again.
  [[noreturn]] void refuse(const std::string& what) const;

 private:
  std::filesystem::path dir_;
  int ranks_;
  std::vector<File> files_;
  std::vector<LayerAttributes> layers_;
  std::map<std::string, Tensor, std::less<>> tensors_;
  std::vector<LayerAttributes> mtp_layers_;
  std::map<std::string, Tensor, std::less<>> mtp_tensors_;
  bool is_mtp_ = false;
  std::vector<int> kept_layers_;
  Modules modules_;
};

}  // namespace charonia::model
