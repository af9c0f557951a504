// Policy: which adapters of the running sequences are in the device's slots (ops/low_rank.h).
//
// An adapter takes a slot when the first sequence with it starts to run, and keeps the slot after the last one has
// stopped, until another adapter takes it: a free slot first, then the slot of the adapter that was last used longest
// ago. An adapter of a running sequence keeps its slot. If all slots have such adapters, a waiting sequence with
// another adapter is not admitted, and sequences of the same priority without an adapter overtake it. Those with an
// adapter in a slot do so only for kOvertakenPlans plans, because they could keep the slots for ever. Then it
// runs when the sequences of one adapter have ended.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <vector>

#include "schedule/sequence_state.h"

namespace charonia::schedule {

inline constexpr int kOvertakenPlans = 100;

class AdapterSlots {
 public:
  explicit AdapterSlots(int count) : slots_(static_cast<std::size_t>(count)) {}

  // Whether take() would succeed. Adapter 0 is none. Without slots, adapters need none.
  bool has_room(std::uint64_t adapter) const {
    return adapter == 0 || slots_.empty() ||
           std::ranges::any_of(slots_, [&](const Slot& slot) { return slot.adapter == adapter || slot.users == 0; });
  }
  // Counts a sequence that starts to run. has_room() must hold.
  void take(std::uint64_t adapter) {
    if (adapter == 0 || slots_.empty()) return;
    auto slot = find(adapter);
    if (slot == slots_.end()) {
      slot = std::ranges::min_element(
          slots_, {}, [](const Slot& one) { return one.users > 0 ? ~std::uint64_t{0} : one.last_used; });
      if (slot->users > 0) broken(cat("adapter ", adapter, " has no slot"));
      slot->adapter = adapter;
    }
    ++slot->users;
  }
  // Counts a sequence that stops.
  void release(std::uint64_t adapter) {
    if (adapter == 0 || slots_.empty()) return;
    auto slot = find(adapter);
    if (slot == slots_.end() || slot->users == 0) broken(cat("adapter ", adapter, " is not in use"));
    --slot->users;
    slot->last_used = ++clock_;
  }
  // -1: none.
  int slot_of(std::uint64_t adapter) const {
    const auto slot = std::ranges::find(slots_, adapter, &Slot::adapter);
    return adapter == 0 || slot == slots_.end() ? -1 : static_cast<int>(slot - slots_.begin());
  }
  int users(std::uint64_t adapter) const {
    const int slot = slot_of(adapter);
    return slot < 0 ? 0 : slots_[static_cast<std::size_t>(slot)].users;
  }
  // Of all slots.
  int users() const {
    return std::transform_reduce(slots_.begin(), slots_.end(), 0, std::plus{},
                                 [](const Slot& one) { return one.users; });
  }
  bool any() const { return !slots_.empty(); }

 private:
  struct Slot {
    std::uint64_t adapter = 0;  // 0: never used
    int users = 0;              // running sequences
    std::uint64_t last_used = 0;
  };
  std::vector<Slot>::iterator find(std::uint64_t adapter) { return std::ranges::find(slots_, adapter, &Slot::adapter); }

  std::vector<Slot> slots_;
  std::uint64_t clock_ = 0;
};

}  // namespace charonia::schedule
