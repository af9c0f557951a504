// The inputs and parameters of one Triton request as typed values. A parameter counts as the input of its name where
// that input is absent: JSON fields of HTTP generate that are no inputs arrive that way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "triton_api.h"

namespace charonia::triton {

template <class T>
struct Tensor {
  std::vector<T> values;  // row-major
  std::vector<std::int64_t> shape;
};

// Views the request: not to be used after its release. Every reader throws Error(invalid_argument) naming the input,
// what it is and what would be right; a value that was not sent is nullopt.
class Inputs {
 public:
  explicit Inputs(TRITONBACKEND_Request* request);

  // T: std::int32_t or float. Tensors only: no parameter can hold one.
  template <class T>
  std::optional<Tensor<T>> tensor(std::string_view name) const;

  // One value of any shape with one element. T: bool, std::int32_t, std::uint64_t or float.
  template <class T>
  std::optional<T> scalar(std::string_view name) const;

  // [n] or one INT parameter.
  std::optional<std::vector<std::int32_t>> ids(std::string_view name) const;

  // BYTES of any shape with at most `most` elements, or one STRING parameter.
  std::optional<std::vector<std::string>> strings(std::string_view name, std::size_t most) const;

 private:
  using Parameter = std::variant<std::int64_t, double, bool, std::string>;

  struct Raw {
    TRITONSERVER_DataType type;
    std::vector<std::int64_t> shape;
    std::string bytes;  // all buffers joined
  };

  std::optional<Raw> read(std::string_view name) const;
  const Parameter* parameter(std::string_view name) const;

  std::map<std::string, TRITONBACKEND_Input*, std::less<>> inputs_;
  std::map<std::string, Parameter, std::less<>> parameters_;
};

}  // namespace charonia::triton
