// The weights of a LoRA adapter on one rank.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "model/adapter_files.h"
#include "model/manifest.h"
#include "ops/device.h"
#include "ops/low_rank.h"

namespace charonia::model {

// Where the rows of a canonical tensor are in a Linear.
struct LinearPlace {
  const ops::Linear* weight = nullptr;
  std::int64_t first_row = 0, rows = 0, cols = 0;
};
using LinearPlaces = std::map<std::string, LinearPlace, std::less<>>;  // by canonical name

// Why a model without modules (Manifest::modules()) has no adapters, with the remedy.
inline constexpr std::string_view kNoModules =
    "the model has no names of modules: it is a GGUF file, which takes no adapters, or a workspace of an older version. "
    "Use the model's Hugging Face folder, or convert the old workspace again with charonia convert";

// The weights that adapters can change, with their indices in ops::AdapterSlots::weights.
using SlotWeights = std::unordered_map<const ops::Linear*, int>;
SlotWeights slot_weights(const LinearPlaces& places);

// The weights of a rank, for its adapters.
struct AdaptedWeights {
  const Modules& modules;
  const LinearPlaces& places;
  const SlotWeights* slots = nullptr;  // of a device with adapter slots; null: the device has none
  int rank = 0;
  DType type = DType::f32;  // of activations
};

// Immutable, so that steps and other threads may read it.
class Adapter {
 public:
  // Divides the adapter's matrices as the weights of the rank are divided. Throws Error(unsupported) for a module that
  // the engine cannot change, and invalid_argument for matrices of other shapes and for values that are not finite.
  Adapter(const AdapterFiles& files, const AdaptedWeights& weights, ops::Device& device);
  // Returns bytes() of the adapter with these arguments. Throws the errors of the constructor, except for values.
  static std::size_t bytes_of(const AdapterFiles& files, const AdaptedWeights& weights);
  // The same for a model that is not loaded, as if each tensor were a Linear of its own: at least bytes(). with_slots:
  // for a device with adapter slots.
  static std::size_t bytes_of(const AdapterFiles& files, const Modules& modules, int rank, DType type, bool with_slots);
  // Returns slots for adapters of all modules with rank max_rank.
  static ops::AdapterSlots slots_of(const AdaptedWeights& weights, int count, int max_rank);
  // The same for a model that is not loaded: at least as large.
  static ops::AdapterSlots slots_of(const Modules& modules, int rank, DType type, int count, int max_rank);

  // Null if the adapter does not change the weight. On a device without adapter slots.
  const ops::LowRank* change_of(const ops::Linear& weight) const {
    const auto found = changes_.find(&weight);
    return found == changes_.end() ? nullptr : &found->second;
  }
  const ops::Buffer& image() const { return *memory_; }  // on a device with adapter slots
  std::uint64_t id() const { return id_; }               // never 0, never used for another one
  std::int64_t bytes() const { return static_cast<std::int64_t>(memory_->bytes()); }

 private:
  std::uint64_t id_;
  // One allocation, because the system limits the number of mappings.
  std::unique_ptr<ops::Buffer> memory_;
  std::unordered_map<const ops::Linear*, ops::LowRank> changes_;
};

// The rows of a step with an adapter.
struct AdapterRows {
  const Adapter* adapter = nullptr;
  std::vector<std::int32_t> rows;  // ascending
};

}  // namespace charonia::model
