#include "model/adapter.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <utility>

#include "base/text.h"
#include "charonia/error.h"

namespace charonia::model {
namespace {

using Module = AdapterFiles::Module;

// Rows of a module's B, and columns of its A, that change columns of a Linear's output.
struct Piece {
  const Module* module = nullptr;
  const ModulePlace* place = nullptr;
  std::int64_t first_column = 0, columns = 0;  // of the Linear's output
};

// The change of a Linear. Its matrices have places in the adapter's memory, but no values yet.
struct Planned {
  ops::LowRank change;
  std::vector<Piece> pieces;
  // By module and first column of A: pieces of one module share its A.
  std::map<std::pair<const Module*, std::int64_t>, std::int64_t> first_ranks;
  std::int64_t elements = 0;                // of B
  std::size_t a = 0, b = 0, scales = 0;     // bytes from the beginning of the memory
};

struct Plan {
  std::map<const ops::Linear*, Planned> changes;
  std::size_t bytes = 0;
};

// A matrix on the host that is written element by element.
class Elements {
 public:
  Elements(DType type, std::int64_t count) : type_(type), data_(static_cast<std::size_t>(count) * size_of(type)) {}

  void set(std::int64_t index, float value) {
    auto* const to = data_.data() + static_cast<std::size_t>(index) * size_of(type_);
    if (type_ == DType::f32) {
      std::memcpy(to, &value, sizeof value);
    } else {
      const auto bits = float_to_bf16(value);
      std::memcpy(to, &bits, sizeof bits);
    }
  }
  void upload(ops::Device& device, void* to) const { device.upload(to, data_.data(), data_.size()); }

 private:
  DType type_;
  std::vector<std::byte> data_;
};

// Reads a value of a module's matrix. type: of the activations; the value must be finite in it.
float value_at(const AdapterFiles& files, const Module& module, const ops::HostMatrix& matrix, std::int64_t row,
               std::int64_t col, DType type) {
  const float value = float_at(matrix.row(row), static_cast<std::size_t>(col), matrix.dtype);
  if (!std::isfinite(type == DType::bf16 ? bf16_to_float(float_to_bf16(value)) : value)) {
    files.refuse(cat("module ", module.name, " has the value ", value, ", which is not finite (NaN or infinity) in ",
                     to_string(type), ": train it again"));
  }
  return value;
}

[[noreturn]] void refuse_module(const AdapterFiles& files, const std::string& name, const Modules& modules,
                                const LinearPlaces& places) {
  std::set<std::string> kinds;
  for (const auto& [module, found] : modules.places) {
    if (places.contains(found.front().tensor)) kinds.insert(module.substr(module.rfind('.') + 1));
  }
  std::string all;
  for (const auto& kind : kinds) all += cat(all.empty() ? "" : ", ", kind);
  files.refuse_feature(cat("module ", name, " cannot be adapted in this model. Adapters can change: ", all,
                           ". Merge the adapter into the model, or train it for these modules"));
}

// The number of the tensor's rows.
std::int64_t rows_of(const ModulePlace& place) {
  return (place.rows.second - place.rows.first + place.row_step - 1) / place.row_step;
}

// Gives the change its parts, and its matrices their places from byte `bytes` on.
void plan_change(Planned& plan, const ops::Linear& weight, DType type, std::size_t& bytes) {
  auto& change = plan.change;
  change.type = type;
  change.in_features = weight.in_features();
  change.out_features = weight.out_features();
  for (const auto& piece : plan.pieces) {
    const auto rank = piece.module->a.rows;
    const auto [found, added] =
        plan.first_ranks.try_emplace({piece.module, piece.place->cols.first}, change.ranks);
    if (added) change.ranks += rank;
    const auto& part = change.parts.emplace_back(ops::LowRank::Part{.first_column = piece.first_column,
                                                                    .columns = piece.columns,
                                                                    .first_rank = found->second,
                                                                    .ranks = rank,
                                                                    .b = plan.elements});
    plan.elements += change.b_elements(part);
  }
  const auto place = [&](std::int64_t count, DType of) {
    constexpr std::size_t kAlignment = 64;
    const auto at = bytes;
    bytes += (static_cast<std::size_t>(count) * size_of(of) + kAlignment - 1) / kAlignment * kAlignment;
    return at;
  };
  plan.a = place(change.a_elements(), type);
  plan.b = place(plan.elements, type);
  plan.scales = place(change.ranks, DType::f32);
}

Plan plan_changes(const AdapterFiles& files, const Modules& modules, const LinearPlaces& places, int rank, DType type) {
  if (modules.places.empty()) {
    files.refuse_feature(
        "this workspace has no names of the model's modules: it comes from a GGUF file or from an older version. "
        "Use the model's Hugging Face folder, or convert it again with charonia convert");
  }
  Plan out;
  std::map<const std::vector<ModulePlace>*, std::string_view> taken;
  for (const auto& module : files.modules()) {
    const auto* const found = modules.find(module.name);
    if (found == nullptr) refuse_module(files, module.name, modules, places);
    if (const auto [first, added] = taken.try_emplace(found, module.name); !added) {
      files.refuse(cat("modules ", first->second, " and ", module.name,
                       " are the same module of the model: save the adapter with one of them"));
    }
    for (const auto& place : *found) {
      if (place.rank.value_or(rank) != rank) continue;
      const auto of_tensor = places.find(place.tensor);
      if (of_tensor == places.end()) refuse_module(files, module.name, modules, places);
      const auto& linear = of_tensor->second;
      if (module.a.cols != place.shape.second || module.b.rows != place.shape.first) {
        files.refuse(cat("module ", module.name, " has lora_A [", module.a.rows, ", ", module.a.cols, "] and lora_B [",
                         module.b.rows, ", ", module.b.cols, "], but the weight is [", place.shape.first, ", ",
                         place.shape.second, "]: use the adapter with the model that it was trained for"));
      }
      const auto columns = rows_of(place);
      if (place.cols.second - place.cols.first != linear.cols || place.first_row + columns > linear.rows) {
        throw Error(ErrorCode::internal, cat("module ", module.name, " is not within tensor ", place.tensor));
      }
      out.changes[linear.weight].pieces.push_back({&module, &place, linear.first_row + place.first_row, columns});
    }
  }
  for (auto& [weight, change] : out.changes) plan_change(change, *weight, type, out.bytes);
  return out;
}

// Reads the matrices of a change into the adapter's memory.
ops::LowRank read_change(const AdapterFiles& files, Planned&& plan, ops::Device& device, std::byte* memory) {
  auto& change = plan.change;
  Elements a(change.type, change.a_elements()), b(change.type, plan.elements);
  Elements scales(DType::f32, change.ranks);
  for (const auto& [key, first_rank] : plan.first_ranks) {
    const auto& module = *key.first;
    for (std::int64_t j = 0; j < module.a.rows; ++j) {
      scales.set(first_rank + j, module.scale);
      for (std::int64_t k = 0; k < change.in_features; ++k) {
        a.set(change.a_at(first_rank + j, k), value_at(files, module, module.a, j, key.second + k, change.type));
      }
    }
  }
  for (std::size_t i = 0; i < plan.pieces.size(); ++i) {
    const auto& [module, place, first_column, columns] = plan.pieces[i];
    const auto& part = change.parts[i];
    for (std::int64_t c = 0; c < columns; ++c) {
      const auto row = place->rows.first + c * place->row_step;
      for (std::int64_t j = 0; j < part.ranks; ++j) {
        b.set(change.b_at(part, j, c), value_at(files, *module, module->b, row, j, change.type));
      }
    }
  }
  a.upload(device, memory + plan.a);
  b.upload(device, memory + plan.b);
  scales.upload(device, memory + plan.scales);
  change.a = memory + plan.a;
  change.b = memory + plan.b;
  change.scales = reinterpret_cast<const float*>(memory + plan.scales);
  return std::move(change);
}

}  // namespace

Adapter::Adapter(const AdapterFiles& files, const Modules& modules, const LinearPlaces& places, ops::Device& device,
                 int rank, DType type) {
  auto plan = plan_changes(files, modules, places, rank, type);
  memory_ = device.allocate(plan.bytes);
  for (auto& [weight, change] : plan.changes) {
    changes_.emplace(weight, read_change(files, std::move(change), device, memory_->as<std::byte>()));
  }
}

std::size_t Adapter::bytes_of(const AdapterFiles& files, const Modules& modules, const LinearPlaces& places, int rank,
                              DType type) {
  return plan_changes(files, modules, places, rank, type).bytes;
}

std::size_t Adapter::bytes_of(const AdapterFiles& files, const Modules& modules, int rank, DType type) {
  struct Unloaded : ops::Linear {
    void grow(std::int64_t rows, std::int64_t cols) { n_ = std::max(n_, rows), k_ = cols; }
  };
  std::map<std::string_view, Unloaded> tensors;
  for (const auto& [name, found] : modules.places) {
    for (const auto& place : found) {
      if (place.rank.value_or(rank) != rank) continue;
      tensors[place.tensor].grow(place.first_row + rows_of(place), place.cols.second - place.cols.first);
    }
  }
  LinearPlaces places;
  for (const auto& [name, linear] : tensors) {
    places.emplace(name, LinearPlace{&linear, 0, linear.out_features(), linear.in_features()});
  }
  return bytes_of(files, modules, places, rank, type);
}

}  // namespace charonia::model
