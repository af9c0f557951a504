#include "cache/units.h"

#include <utility>

namespace charonia::cache {

Units::Units(const UnitKind& kind, int block_len, int num_nodes)
    : kind_(kind.kind),
      window_(kind.kind == CacheKind::state ? kStateWindow : kind.window),
      block_len_(block_len),
      free_(kind.num_units, kind.chunk == 0 ? kind.num_units : kind.chunk, kind.commit),
      cached_(kind.num_units),
      units_(static_cast<std::size_t>(kind.num_units)),
      nodes_(static_cast<std::size_t>(num_nodes)) {}

Units::Unit& Units::checked(BlockId unit, std::string_view call) {
  if (unit < 0 || unit >= num_units()) {
    broken(cat(call, "(): unit ", unit, " does not exist; there are ", num_units(), " units"));
  }
  return at(unit);
}

void Units::use(BlockId unit) {
  if (at(unit).use_count++ > 0) return;
  cached_.erase(unit);
  ++num_active_;
}

void Units::unuse(BlockId unit) {
  auto& own = at(unit);
  if (--own.use_count > 0) return;
  --num_active_;
  if (own.node == kNone) {
    free_.put(unit);
  } else {
    cached_.push(unit, at_node(own.node).pins > 0);
  }
}

BlockId Units::take() {
  if (free_.num_ready() == 0) {
    const auto evicted = cached_.first();
    cached_.erase(evicted);
    at_node(std::exchange(at(evicted).node, kNone)).unit = kNone;
    free_.put(evicted);
  }
  const auto unit = free_.take();
  at(unit).use_count = 1;
  ++num_active_;
  return unit;
}

BlockId Units::join(BlockId node, BlockId unit) {
  auto& own = checked(unit, "insert");
  if (own.use_count == 0) broken(cat("insert(): unit ", unit, " is not Active"));
  auto& place = at_node(node);
  if (place.unit == unit) return unit;
  if (place.unit == kNone) {
    if (own.node != kNone) broken(cat("insert(): unit ", unit, " was already inserted at another node"));
    own.node = node;
    return place.unit = unit;
  }
  use(place.unit);
  unuse(unit);
  return place.unit;
}

bool Units::withdraw(BlockId unit) {
  auto& own = checked(unit, "withdraw_unit");
  if (own.use_count == 0) broken(cat("withdraw_unit(): unit ", unit, " is not Active"));
  if (own.use_count > 1) return false;
  if (own.node != kNone) at_node(std::exchange(own.node, kNone)).unit = kNone;
  return true;
}

void Units::drop(BlockId node) {
  auto& place = at_node(node);
  if (place.unit == kNone || place.pins > 0 || at(place.unit).use_count > 0) return;
  const auto unit = std::exchange(place.unit, kNone);
  at(unit).node = kNone;
  cached_.erase(unit);
  free_.put(unit);
}

void Units::leave(BlockId node) {
  auto& place = at_node(node);
  num_pinned_ -= place.pins > 0;
  const auto unit = std::exchange(place, {}).unit;
  if (unit == kNone) return;
  at(unit).node = kNone;
  if (at(unit).use_count > 0) return;
  cached_.erase(unit);
  free_.put(unit);
}

void Units::pin(BlockId node) {
  if (at_node(node).pins++ > 0) return;
  ++num_pinned_;
  requeue(node);
}

void Units::unpin(BlockId node) {
  if (at_node(node).pins == 0) broken(cat("unpin(): the unit of block ", node, " is not pinned"));
  if (--at_node(node).pins > 0) return;
  --num_pinned_;
  requeue(node);
}

void Units::requeue(BlockId node) {
  const auto unit = at_node(node).unit;
  if (unit != kNone && cached_.contains(unit)) cached_.set_pinned(unit, at_node(node).pins > 0);
}

}  // namespace charonia::cache
