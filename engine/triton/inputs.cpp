#include "inputs.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "error.h"
#include "unpack.h"

namespace charonia::triton {
namespace {

[[noreturn]] void reject_input(std::string_view name, const std::string& text) {
  throw Error(ErrorCode::invalid_argument, std::string(name) + ": " + text);
}

const char* name_of(TRITONSERVER_DataType type) {
  static constexpr const char* kNames[] = {"INVALID", "BOOL",  "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16",
                                           "INT32",   "INT64", "FP16",  "FP32",   "FP64",   "BYTES",  "BF16"};
  const auto index = static_cast<std::size_t>(type);
  return index < std::size(kNames) ? kNames[index] : "an unknown type";
}

template <class T>
constexpr TRITONSERVER_DataType kTypeOf = TRITONSERVER_TYPE_INVALID;
template <>
constexpr TRITONSERVER_DataType kTypeOf<bool> = TRITONSERVER_TYPE_BOOL;
template <>
constexpr TRITONSERVER_DataType kTypeOf<std::int32_t> = TRITONSERVER_TYPE_INT32;
template <>
constexpr TRITONSERVER_DataType kTypeOf<std::uint64_t> = TRITONSERVER_TYPE_UINT64;
template <>
constexpr TRITONSERVER_DataType kTypeOf<float> = TRITONSERVER_TYPE_FP32;

void check_type(std::string_view name, TRITONSERVER_DataType is, TRITONSERVER_DataType wanted) {
  if (is != wanted) reject_input(name, std::string("is ") + name_of(is) + " and must be " + name_of(wanted));
}

template <class T>
std::vector<T> unpack(std::string_view name, const std::string& bytes) {
  if (bytes.size() % sizeof(T) != 0) {
    reject_input(name,
                 std::to_string(bytes.size()) + " bytes are no whole number of " + name_of(kTypeOf<T>) + " values");
  }
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

// A JSON number may stand for any type whose range it is in; true and false only for BOOL.
template <class T, class From>
T convert(std::string_view name, From value) {
  constexpr bool kToBool = std::is_same_v<T, bool>, kFromBool = std::is_same_v<From, bool>;
  if constexpr (kToBool && kFromBool) {
    return value;
  } else if constexpr (kToBool || kFromBool || std::is_same_v<From, std::string>) {
    reject_input(name, std::string("the parameter has another type than ") + name_of(kTypeOf<T>));
  } else if constexpr (std::is_floating_point_v<T>) {
    return static_cast<T>(value);
  } else if constexpr (std::is_floating_point_v<From>) {
    // Beyond 2^53 a double does not tell whole numbers apart. (NaN is not equal to its floor.)
    constexpr double kExact = 9007199254740992.0;
    if (value != std::floor(value) || std::abs(value) > kExact) {
      reject_input(name, std::to_string(value) + " is no whole number");
    }
    return convert<T>(name, static_cast<std::int64_t>(value));
  } else {
    if (!std::in_range<T>(value)) {
      reject_input(name, std::to_string(value) + " is out of the range of " + name_of(kTypeOf<T>) + ", " +
                             std::to_string(std::numeric_limits<T>::min()) + " to " +
                             std::to_string(std::numeric_limits<T>::max()));
    }
    return static_cast<T>(value);
  }
}

std::string gather(std::string_view name, TRITONBACKEND_Input* input, std::uint32_t buffers, std::uint64_t total) {
  std::string bytes;
  bytes.reserve(total);
  for (std::uint32_t i = 0; i < buffers; ++i) {
    const void* buffer = nullptr;
    std::uint64_t size = 0;
    auto memory = TRITONSERVER_MEMORY_CPU;
    std::int64_t memory_id = 0;
    check(TRITONBACKEND_InputBuffer(input, i, &buffer, &size, &memory, &memory_id));
    if (memory == TRITONSERVER_MEMORY_GPU) reject_input(name, "lies in GPU memory; send it in system memory");
    bytes.append(static_cast<const char*>(buffer), size);
  }
  return bytes;
}

}  // namespace

Inputs::Inputs(TRITONBACKEND_Request* request) {
  std::uint32_t count = 0;
  check(TRITONBACKEND_RequestInputCount(request, &count));
  for (std::uint32_t i = 0; i < count; ++i) {
    TRITONBACKEND_Input* input = nullptr;
    check(TRITONBACKEND_RequestInputByIndex(request, i, &input));
    const char* name = nullptr;
    check(TRITONBACKEND_InputProperties(input, &name, nullptr, nullptr, nullptr, nullptr, nullptr));
    inputs_.emplace(name, input);
  }
  check(TRITONBACKEND_RequestParameterCount(request, &count));
  for (std::uint32_t i = 0; i < count; ++i) {
    const char* name = nullptr;
    TRITONSERVER_ParameterType type{};
    const void* value = nullptr;
    check(TRITONBACKEND_RequestParameter(request, i, &name, &type, &value));
    switch (type) {
      case TRITONSERVER_PARAMETER_INT:
        parameters_.emplace(name, *static_cast<const std::int64_t*>(value));
        break;
      case TRITONSERVER_PARAMETER_DOUBLE:
        parameters_.emplace(name, *static_cast<const double*>(value));
        break;
      case TRITONSERVER_PARAMETER_BOOL:
        parameters_.emplace(name, *static_cast<const bool*>(value));
        break;
      case TRITONSERVER_PARAMETER_STRING:
        parameters_.emplace(name, std::string(static_cast<const char*>(value)));
        break;
      case TRITONSERVER_PARAMETER_BYTES:
        break;
    }
  }
}

std::optional<Inputs::Raw> Inputs::read(std::string_view name) const {
  const auto found = inputs_.find(name);
  if (found == inputs_.end()) return std::nullopt;
  Raw raw{};
  const std::int64_t* shape = nullptr;
  std::uint32_t dims = 0, buffers = 0;
  std::uint64_t total = 0;
  check(TRITONBACKEND_InputProperties(found->second, nullptr, &raw.type, &shape, &dims, &total, &buffers));
  raw.shape.assign(shape, shape + dims);
  raw.bytes = gather(name, found->second, buffers, total);
  return raw;
}

const Inputs::Parameter* Inputs::parameter(std::string_view name) const {
  const auto found = parameters_.find(name);
  return found == parameters_.end() ? nullptr : &found->second;
}

template <class T>
std::optional<Tensor<T>> Inputs::tensor(std::string_view name) const {
  auto raw = read(name);
  if (!raw) return std::nullopt;
  check_type(name, raw->type, kTypeOf<T>);
  return Tensor<T>{unpack<T>(name, raw->bytes), std::move(raw->shape)};
}
template std::optional<Tensor<std::int32_t>> Inputs::tensor(std::string_view) const;
template std::optional<Tensor<float>> Inputs::tensor(std::string_view) const;

template <class T>
std::optional<T> Inputs::scalar(std::string_view name) const {
  if (const auto raw = read(name)) {
    check_type(name, raw->type, kTypeOf<T>);
    if (raw->bytes.size() != sizeof(T)) {
      reject_input(name,
                   "holds " + std::to_string(raw->bytes.size() / sizeof(T)) + " values and must hold one: shape [1]");
    }
    if constexpr (std::is_same_v<T, bool>) return raw->bytes.front() != 0;
    T value{};
    std::memcpy(&value, raw->bytes.data(), sizeof(T));
    return value;
  }
  const auto* found = parameter(name);
  if (found == nullptr) return std::nullopt;
  return std::visit([name](const auto& value) { return convert<T>(name, value); }, *found);
}
template std::optional<bool> Inputs::scalar(std::string_view) const;
template std::optional<std::int32_t> Inputs::scalar(std::string_view) const;
template std::optional<std::uint64_t> Inputs::scalar(std::string_view) const;
template std::optional<float> Inputs::scalar(std::string_view) const;

std::optional<std::vector<std::int32_t>> Inputs::ids(std::string_view name) const {
  if (auto sent = tensor<std::int32_t>(name)) return std::move(sent->values);
  if (const auto one = scalar<std::int32_t>(name)) return std::vector{*one};
  return std::nullopt;
}

std::optional<std::vector<std::string>> Inputs::strings(std::string_view name, std::size_t most) const {
  const auto raw = read(name);
  if (!raw) {
    const auto* found = parameter(name);
    if (found == nullptr) return std::nullopt;
    const auto* text = std::get_if<std::string>(found);
    if (text == nullptr) reject_input(name, "the parameter has another type than STRING");
    return std::vector{*text};
  }
  check_type(name, raw->type, TRITONSERVER_TYPE_BYTES);
  return unpack_strings(name, raw->bytes, most);
}

}  // namespace charonia::triton
