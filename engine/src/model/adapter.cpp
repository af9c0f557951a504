#include "model/adapter.h"

#include <algorithm>
#include <atomic>
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
  // Bytes from the beginning of the memory. header: of ops::SlotChange, on a device with adapter slots.
  std::size_t a = 0, b = 0, scales = 0, header = 0;
};

struct Plan {
  std::map<const ops::Linear*, Planned> changes;
  std::size_t bytes = 0;
};

std::size_t aligned(std::size_t bytes) {
  constexpr std::size_t kAlignment = 64;
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// A matrix on the host that is written element by element.
class Elements {
 public:
  Elements(DType type, std::int64_t count) : type_(type), data_(static_cast<std::size_t>(count) * size_of(type)) {}

  void set(std::int64_t index, float value) {
    auto* const to = data_.data() + static_cast<std::size_t>(index) * size_of(type_);
    if (type_ == DType::f32) {
      std::memcpy(to, &value, sizeof value);
    } else {
      const auto bits = type_ == DType::f16 ? float_to_f16(value) : float_to_bf16(value);
      std::memcpy(to, &bits, sizeof bits);
    }
  }
  void copy(std::byte* to) const { std::ranges::copy(data_, to); }

 private:
  DType type_;
  std::vector<std::byte> data_;
};

// Reads a value of a module's matrix. type: of the activations; the value must be finite in it.
float value_at(const AdapterFiles& files, const Module& module, const ops::HostMatrix& matrix, std::int64_t row,
               std::int64_t col, DType type) {
  const float value = float_at(matrix.row(row), static_cast<std::size_t>(col), matrix.dtype);
  const float stored = type == DType::bf16  ? bf16_to_float(float_to_bf16(value))
                       : type == DType::f16 ? f16_to_float(float_to_f16(value))
                                            : value;
  if (!std::isfinite(stored)) {
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
void plan_change(Planned& plan, const ops::Linear& weight, DType type, bool with_slots, std::size_t& bytes) {
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
  const auto place = [&](std::size_t size) { return std::exchange(bytes, bytes + aligned(size)); };
  const auto place_of = [&](std::int64_t count, DType of) {
    return place(static_cast<std::size_t>(count) * size_of(of));
  };
  if (with_slots) plan.header = place(sizeof(ops::SlotChange) + change.parts.size() * sizeof(ops::SlotPart));
  plan.a = place_of(change.a_elements(), type);
  plan.b = place_of(plan.elements, type);
  if (!with_slots) plan.scales = place_of(change.ranks, DType::f32);
}

void plan_all(Plan& plan, const AdaptedWeights& weights) {
  if (weights.slots != nullptr) plan.bytes = aligned(weights.slots->size() * sizeof(std::int64_t));
  for (auto& [weight, change] : plan.changes) {
    plan_change(change, *weight, weights.type, weights.slots != nullptr, plan.bytes);
  }
}

Plan plan_changes(const AdapterFiles& files, const AdaptedWeights& weights) {
  const auto& [modules, places, slots, rank, type] = weights;
  if (modules.places.empty()) files.refuse_feature(std::string(kNoModules));
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
  plan_all(out, weights);
  return out;
}

// Reads the matrices of a change into the adapter's memory. Returns the scales of its ranks.
std::vector<float> read_matrices(const AdapterFiles& files, const Planned& plan, std::byte* memory) {
  const auto& change = plan.change;
  Elements a(change.type, change.a_elements()), b(change.type, plan.elements);
  std::vector<float> scales(static_cast<std::size_t>(change.ranks));
  for (const auto& [key, first_rank] : plan.first_ranks) {
    const auto& module = *key.first;
    for (std::int64_t j = 0; j < module.a.rows; ++j) {
      scales[static_cast<std::size_t>(first_rank + j)] = module.scale;
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
  a.copy(memory + plan.a);
  b.copy(memory + plan.b);
  return scales;
}

// The change of a device that reads it where it is.
ops::LowRank change_in(Planned& plan, std::span<const float> scales, std::byte* memory) {
  auto change = std::move(plan.change);
  std::memcpy(memory + plan.scales, scales.data(), scales.size_bytes());
  change.a = memory + plan.a;
  change.b = memory + plan.b;
  change.scales = reinterpret_cast<const float*>(memory + plan.scales);
  return change;
}

// Writes the header of a change into an image.
void write_header(const Planned& plan, std::span<const float> scales, int weight, std::byte* image) {
  const auto& change = plan.change;
  const auto offset = [](std::size_t at) { return static_cast<std::int64_t>(at); };
  const ops::SlotChange header{.a = offset(plan.a),
                               .ranks = static_cast<std::int32_t>(change.ranks),
                               .parts = static_cast<std::int32_t>(change.parts.size())};
  reinterpret_cast<std::int64_t*>(image)[weight] = offset(plan.header);
  auto* const to = image + plan.header;
  std::memcpy(to, &header, sizeof header);
  for (std::size_t i = 0; i < change.parts.size(); ++i) {
    const auto& part = change.parts[i];
    const ops::SlotPart written{.b = offset(plan.b + static_cast<std::size_t>(part.b) * size_of(change.type)),
                                .first_column = static_cast<std::int32_t>(part.first_column),
                                .columns = static_cast<std::int32_t>(part.columns),
                                .first_rank = static_cast<std::int32_t>(part.first_rank),
                                .ranks = static_cast<std::int32_t>(part.ranks),
                                .scale = scales[static_cast<std::size_t>(part.first_rank)]};
    std::memcpy(to + sizeof header + i * sizeof written, &written, sizeof written);
  }
}

// The weights of a model that is not loaded: each tensor is a Linear of its own.
class UnloadedWeights {
 public:
  UnloadedWeights(const Modules& modules, int rank) {
    for (const auto& [name, found] : modules.places) {
      for (const auto& place : found) {
        if (place.rank.value_or(rank) != rank) continue;
        tensors_[place.tensor].grow(place.first_row + rows_of(place), place.cols.second - place.cols.first);
      }
    }
    for (const auto& [name, linear] : tensors_) {
      places.emplace(name, LinearPlace{&linear, 0, linear.out_features(), linear.in_features()});
    }
    slots = slot_weights(places);
  }

  LinearPlaces places;
  SlotWeights slots;

 private:
  struct Unloaded : ops::Linear {
    void grow(std::int64_t rows, std::int64_t cols) { n_ = std::max(n_, rows), k_ = cols; }
  };
  std::map<std::string_view, Unloaded> tensors_;
};

}  // namespace

SlotWeights slot_weights(const LinearPlaces& places) {
  SlotWeights out;
  for (const auto& [name, place] : places) out.try_emplace(place.weight, static_cast<int>(out.size()));
  return out;
}

Adapter::Adapter(const AdapterFiles& files, const AdaptedWeights& weights, ops::Device& device) {
  static std::atomic<std::uint64_t> last{0};
  id_ = ++last;
  auto plan = plan_changes(files, weights);
  memory_ = device.allocate_host(plan.bytes);
  auto* const memory = memory_->as<std::byte>();
  if (weights.slots != nullptr) std::memset(memory, 0, weights.slots->size() * sizeof(std::int64_t));
  for (auto& [weight, change] : plan.changes) {
    const auto scales = read_matrices(files, change, memory);
    if (weights.slots != nullptr) {
      write_header(change, scales, weights.slots->at(weight), memory);
    } else {
      changes_.emplace(weight, change_in(change, scales, memory));
    }
  }
}

std::size_t Adapter::bytes_of(const AdapterFiles& files, const AdaptedWeights& weights) {
  return plan_changes(files, weights).bytes;
}

std::size_t Adapter::bytes_of(const AdapterFiles& files, const Modules& modules, int rank, DType type,
                              bool with_slots) {
  const UnloadedWeights model(modules, rank);
  return bytes_of(files, {modules, model.places, with_slots ? &model.slots : nullptr, rank, type});
}

ops::AdapterSlots Adapter::slots_of(const AdaptedWeights& weights, int count, int max_rank) {
  std::vector<Module> all;
  all.reserve(weights.modules.places.size());
  Plan plan;
  for (const auto& [name, places] : weights.modules.places) {
    auto& module = all.emplace_back();
    module.a.rows = module.b.cols = max_rank;
    for (const auto& place : places) {
      const auto found = weights.places.find(place.tensor);
      if (place.rank.value_or(weights.rank) != weights.rank || found == weights.places.end()) continue;
      const auto& linear = found->second;
      plan.changes[linear.weight].pieces.push_back(
          {&module, &place, linear.first_row + place.first_row, rows_of(place)});
    }
  }
  plan_all(plan, weights);
  ops::AdapterSlots out{.count = count, .bytes = plan.bytes, .weights = {}};
  out.weights.resize(weights.slots->size());
  for (const auto& [weight, index] : *weights.slots) {
    out.weights[static_cast<std::size_t>(index)].in_features = weight->in_features();
  }
  for (const auto& [weight, change] : plan.changes) {
    out.weights[static_cast<std::size_t>(weights.slots->at(weight))].ranks = change.change.ranks;
  }
  return out;
}

ops::AdapterSlots Adapter::slots_of(const Modules& modules, int rank, DType type, int count, int max_rank) {
  const UnloadedWeights model(modules, rank);
  return slots_of({modules, model.places, &model.slots, rank, type}, count, max_rank);
}

}  // namespace charonia::model
