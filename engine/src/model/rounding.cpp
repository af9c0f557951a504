#include "model/rounding.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <span>
#include <utility>

#include "base/text.h"
#include "charonia/error.h"

namespace charonia::model {
namespace {

struct Scheme {
  std::string_view name;
  ops::Code code;
  bool grouped;  // groups of columns have a scale, instead of whole rows
  ops::Activations activations;
};
constexpr std::array kSchemes{Scheme{"fp8", ops::Code::f8_e4m3, false, ops::Activations::f8_token},
                              Scheme{"w8a8", ops::Code::i8, false, ops::Activations::i8_token},
                              Scheme{"w8a16", ops::Code::i8, false, ops::Activations::as_is},
                              Scheme{"w4a16", ops::Code::u4, true, ops::Activations::as_is}};
constexpr std::array kGroups{128, 64, 32, 16};  // sizes of groups, as in `charonia quantize`

// Linear layers, by a part of their tensors' names. Ranks divide the columns of the first ones.
constexpr std::array<std::string_view, 4> kByColumns{".attention.wo.", ".conv.w_out.", ".delta.w_out.", ".w2."};
constexpr std::array<std::string_view, 11> kOthers{
    ".attention.w_qkv.", ".attention.w_gate.", ".attention.wq.", ".attention.wq_a.", ".attention.wkv_a.", ".conv.w_in.",
    ".delta.w_qkvz.", ".w1.", ".w3.", ".per_layer.gate.", ".per_layer.projection."};

bool contains_one(std::string_view name, std::span<const std::string_view> texts) {
  return std::ranges::any_of(texts, [&](auto text) { return name.find(text) != std::string_view::npos; });
}

bool is_rounded(std::string_view name) {
  if (name == "eh_proj.weight") return true;  // of an MTP layer
  return name.starts_with("layers.") && name.ends_with(".weight") &&
         (contains_one(name, kByColumns) || contains_one(name, kOthers));
}

// Columns of the whole weight, which may be divided between ranks.
std::int64_t all_columns(const Manifest& manifest, std::string_view name) {
  auto columns = manifest.tensor(name).cols;
  for (const auto& other : other_columns(name, manifest.ranks())) columns += manifest.tensor(other).cols;
  return columns;
}

// The largest size of groups that divides the rows of all weights.
std::int64_t group_of(const Manifest& manifest, const std::vector<std::string>& names) {
  std::int64_t common = 0;
  std::string narrowest;
  for (const auto& name : names) {
    const auto columns = all_columns(manifest, name);
    if (narrowest.empty() || columns % kGroups.back() != 0) narrowest = name;
    common = std::gcd(common, columns);
  }
  const auto found = std::ranges::find_if(kGroups, [&](int size) { return common % size == 0; });
  if (found != kGroups.end()) return *found;
  throw Error(ErrorCode::unsupported,
              cat("quantization = w4a16 needs rows that groups of ", kGroups.back(), " columns divide, but ", narrowest,
                  " has ", all_columns(manifest, narrowest), " columns. Use quantization = w8a16"));
}

void check_ranks(const Manifest& manifest, const std::string& name, std::int64_t group) {
  const auto columns = manifest.tensor(name).cols;
  if (columns % group == 0) return;
  throw Error(ErrorCode::unsupported,
              cat("quantization = w4a16: with tensor_para_size = ", manifest.ranks(), ", a rank has ", columns,
                  " columns of ", name, ", which groups of ", group,
                  " do not divide. Use a smaller tensor_para_size, or quantization = w8a16"));
}

}  // namespace

std::vector<std::string> other_columns(std::string_view name, int ranks) {
  std::vector<std::string> out;
  const auto end = name.rfind(".weight");
  if (ranks == 1 || end == std::string_view::npos || !contains_one(name, kByColumns)) return out;
  const auto begin = name.rfind('.', end - 1) + 1;  // of the number of the rank
  for (int rank = 0; rank < ranks; ++rank) {
    auto other = cat(name.substr(0, begin), rank, ".weight");
    if (other != name) out.push_back(std::move(other));
  }
  return out;
}

void round_weights(ModelConfig& model, Manifest& manifest, std::string_view scheme) {
  if (scheme == "none") return;
  const auto& how = *std::ranges::find(kSchemes, scheme, &Scheme::name);
  std::vector<std::string> names;
  for (const auto& [name, tensor] : manifest.tensors()) {
    if (tensor.quantization) {
      throw Error(ErrorCode::unsupported,
                  cat("quantization = ", scheme, " needs 16-bit weights, but the model is already quantised (",
                      ops::to_string(tensor.quantization->code), " in layout ", to_string(tensor.quantization->layout),
                      ", tensor ", name, "). Set quantization = none, or use the 16-bit model"));
    }
    if (is_rounded(name)) names.push_back(name);
  }
  const auto group = how.grouped && !names.empty() ? group_of(manifest, names) : 0;
  for (const auto& name : names) {
    if (group > 0) check_ranks(manifest, name, group);
    manifest.round(name, {.layout = QuantLayout::rounded,
                          .code = how.code,
                          .group_size = group,
                          .activations = how.activations});
  }
  if (model.data_type.empty()) model.data_type = model.weight_type;
  model.weight_type = ops::to_string(how.code);
  model.group_size = static_cast<int>(group);
}

}  // namespace charonia::model
