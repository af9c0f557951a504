// Divides a step's attention into items for thread blocks (kernels/attention.h). Integers only.
//
// Items are sorted, longest first, and distributed to a grid whose blocks all run at the same time; the block with the
// most work determines the time. Therefore items that are longer than a block's fair share (or a half or a quarter of
// it) are divided into splits of about that length, as long as reading a split takes much longer than writing and
// reading its partial results. The planner uses the length that minimises the work of the busiest block. One long
// sequence becomes one split per block; sequences of different lengths balance better with smaller splits.
//
// Reproducible mode: only whole chunks of kAttentionChunk positions may be splits, and a thread block that takes
// several chunks combines them like splits. So the division may depend on the batch without changing results. (With a
// window, the first chunk is the part of a chunk that lies in the window.)
#include <algorithm>

#include "ops/cuda/kernels/attention.h"

namespace charonia::cuda {
namespace {

constexpr std::int64_t kDecodeSplitsPerBlock = 4, kPrefillSplitsPerBlock = 2;  // maximum splits of a fair share
constexpr std::int64_t kSplitCost = kAttentionTile;                    // the fixed cost of a split, in positions
constexpr std::int64_t kMinPrefillSplit = 512, kMinReproducibleDecodeSplit = 256;  // positions
constexpr std::int64_t kMaxReproducibleDecodeSplits = 1024;
static_assert(kMinReproducibleDecodeSplit % kAttentionTile == 0 && kMinPrefillSplit % kAttentionTile == 0 &&
              kAttentionChunk % kAttentionTile == 0);

// How one kind of items is divided.
struct Cut {
  std::int64_t units = 1;             // thread blocks per item
  std::int64_t blocks = 1;            // blocks that run at the same time
  std::int64_t splits_per_block = 1;  // maximum
  std::int64_t min_split = 1;         // positions
  std::int64_t max_splits = 1;        // maximum of all divided items together
  bool reproducible = false;

  // The number of splits of an item, if a split should have at least `minimum` positions.
  std::int64_t splits(std::int64_t begin, std::int64_t end, std::int64_t minimum) const {
    const auto fair = (end - begin) / minimum;
    return fair < 2 ? 1 : reproducible ? divide_up(end, kAttentionChunk) - begin / kAttentionChunk : fair;
  }
};

Cut decode_cut(const AttentionShape& shape) {
  const auto units = shape.kv_heads * divide_up(shape.group(), kDecodeTileRows);
  const auto blocks = std::int64_t{shape.sms} * kBlocksPerSm;
  const auto most = divide_up(blocks * kDecodeSplitsPerBlock, units);
  return {units,
          blocks,
          kDecodeSplitsPerBlock,
          shape.reproducible ? kMinReproducibleDecodeSplit : shape.min_decode_split,
          shape.reproducible ? std::max(most, kMaxReproducibleDecodeSplits) : most,
          shape.reproducible};
}

Cut prefill_cut(const AttentionShape& shape) {
  const auto units = shape.kv_heads * divide_up(shape.group(), shape.prefill_rows());
  const std::int64_t blocks = shape.prefill_blocks();
  const auto most = divide_up(blocks * kPrefillSplitsPerBlock, units);
  return {units, blocks, kPrefillSplitsPerBlock, kMinPrefillSplit, most, shape.reproducible};
}

std::int64_t length(const AttentionItem& item) { return item.kv_end - item.kv_begin; }

bool longer(const AttentionItem& a, const AttentionItem& b) { return length(a) > length(b); }

// The work of the busiest block, in positions, if items are distributed like in the kernels.
std::int64_t busiest(const Cut& how, const std::vector<AttentionItem>& items) {
  std::vector<std::int64_t> work(static_cast<std::size_t>(how.blocks));
  std::int64_t index = 0;
  for (const auto& item : items) {
    for (std::int64_t unit = 0; unit < how.units; ++unit, ++index) {
      const auto turn = index / how.blocks, at = index % how.blocks;
      work[static_cast<std::size_t>(turn % 2 == 0 ? at : how.blocks - 1 - at)] += length(item) + kSplitCost;
    }
  }
  return *std::max_element(work.begin(), work.end());
}

// items = the items of `whole`, divided into splits of at least `minimum` positions, longest first. Returns
// num_partials plus the number of new partial results.
std::int32_t cut_to(const Cut& how, const std::vector<AttentionItem>& whole, std::int64_t minimum,
                    std::int32_t num_partials, std::vector<AttentionItem>& items) {
  items.clear();
  auto left = how.max_splits;
  for (const auto& item : whole) {
    const auto splits = how.splits(item.kv_begin, item.kv_end, minimum);
    if (splits < 2 || splits > left) {
      items.push_back(item);
      continue;
    }
    left -= splits;
    const auto tiles = divide_up(length(item), kAttentionTile);
    const auto begin_of = [&](std::int64_t split) -> std::int64_t {
      if (split == 0) return item.kv_begin;
      return how.reproducible ? (item.kv_begin / kAttentionChunk + split) * kAttentionChunk
                              : item.kv_begin + split * tiles / splits * kAttentionTile;
    };
    for (std::int64_t split = 0; split < splits; ++split) {
      auto part = item;
      part.kv_begin = static_cast<std::int32_t>(begin_of(split));
      part.kv_end = static_cast<std::int32_t>(std::min<std::int64_t>(begin_of(split + 1), item.kv_end));
      part.partial = num_partials;
      part.split = static_cast<std::int16_t>(split);
      part.splits = static_cast<std::int16_t>(splits);
      items.push_back(part);
    }
    num_partials += static_cast<std::int32_t>(splits * item.num_rows);
  }
  std::stable_sort(items.begin(), items.end(), longer);
  return num_partials;
}

// Divides `whole` into `items` and counts their partial results.
void cut(const Cut& how, std::vector<AttentionItem>& whole, std::vector<AttentionItem>& items,
         std::int32_t& num_partials) {
  std::stable_sort(whole.begin(), whole.end(), longer);
  std::int64_t total = 0;
  for (const auto& item : whole) total += length(item);
  const auto min_of = [&](std::int64_t per_block) {
    const auto share = divide_up(total * how.units, how.blocks * per_block);
    return std::max(how.min_split, round_up(share, kAttentionTile));
  };
  const auto before = num_partials;
  auto minimum = min_of(how.splits_per_block);
  num_partials = cut_to(how, whole, minimum, before, items);
  if (num_partials == before) return;
  auto most = busiest(how, items);
  std::vector<AttentionItem> other;
  for (auto per_block = how.splits_per_block / 2; per_block >= 1; per_block /= 2) {
    if (min_of(per_block) == minimum) continue;
    minimum = min_of(per_block);
    const auto partials = cut_to(how, whole, minimum, before, other);
    const auto most_of_other = busiest(how, other);
    if (most_of_other > most) continue;
    most = most_of_other;
    num_partials = partials;
    items.swap(other);
  }
}

}  // namespace

AttentionBounds attention_bounds(const AttentionShape& shape, int max_rows, int max_sequences, int max_positions) {
  const std::int64_t item_rows = shape.item_rows();
  const std::int64_t sequences = std::min(max_rows, max_sequences);
  // Every sequence has at most one item that is not full.
  const auto decodes = item_rows == 1 ? std::int64_t{max_rows} : sequences;
  const auto prefills = item_rows == 1 ? 0 : std::min(max_rows / item_rows + sequences, std::int64_t{max_rows} / 2);
  // The longest item. With a window, an item that begins at the end of a chunk touches the most chunks.
  const auto longest = std::int64_t{shape.window} + item_rows + kAttentionTile;
  const bool all = shape.window == 0 || longest >= max_positions;
  const std::int64_t begin = all ? 0 : kAttentionChunk - kAttentionTile;
  const std::int64_t end = all ? max_positions : begin + longest;
  const auto splits = [&](const Cut& how, std::int64_t items) {
    const auto of_one = how.splits(begin, end, how.min_split);
    return of_one < 2 ? 0 : std::min(how.max_splits, items * of_one);
  };
  const auto decode_splits = splits(decode_cut(shape), decodes), prefill_splits = splits(prefill_cut(shape), prefills);
  return {decodes + decode_splits, prefills + prefill_splits, decode_splits + prefill_splits * item_rows};
}

void plan_attention(const AttentionShape& shape, const ops::AttentionBatch& batch,
                    std::span<const std::int32_t> table_begin, AttentionPlan& plan) {
  plan.decode.clear();
  plan.prefill.clear();
  plan.num_partials = 0;
  plan.wgmma = shape.wgmma;
  plan.wide_at = plan.wide_blocks = 0;
  std::vector<AttentionItem> decode, prefill;
  const int item_rows = shape.item_rows();
  for (std::size_t s = 0; s + 1 < batch.query_start.size(); ++s) {
    const auto end = batch.query_start[s + 1];
    for (auto row = batch.query_start[s]; row < end; row += item_rows) {
      AttentionItem item;
      item.table = table_begin[s];
      item.first_row = row;
      item.num_rows = std::min(item_rows, end - row);
      item.first_position = batch.positions[static_cast<std::size_t>(row)];
      item.kv_begin = shape.first_seen(item.first_position);
      item.kv_end = item.first_position + item.num_rows;
      (item.num_rows == 1 ? decode : prefill).push_back(item);
    }
  }
  cut(decode_cut(shape), decode, plan.decode, plan.num_partials);
  cut(prefill_cut(shape), prefill, plan.prefill, plan.num_partials);
}

bool widen_plan(const AttentionShape& shape, std::int64_t max_blocks, AttentionPlan& plan,
                std::vector<std::int32_t>& tables) {
  struct Blocks {
    std::int32_t table, begin, end;
    std::int32_t to = 0;  // the first copy
  };
  std::vector<Blocks> all;  // of each sequence with prefill items
  const auto of_item = [&](const AttentionItem& item) { return std::ranges::find(all, item.table, &Blocks::table); };
  for (const auto& item : plan.prefill) {
    const auto begin = item.kv_begin / shape.block_len, end = (item.kv_end - 1) / shape.block_len + 1;
    if (const auto found = of_item(item); found != all.end()) {
      found->begin = std::min(found->begin, begin);
      found->end = std::max(found->end, end);
    } else {
      all.push_back({item.table, begin, end});
    }
  }
  std::int64_t count = 0;
  for (auto& one : all) {
    one.to = static_cast<std::int32_t>(count);
    count += one.end - one.begin;
  }
  if (count > max_blocks) return false;
  plan.wide_at = std::ssize(tables);
  plan.wide_blocks = count;
  for (auto& item : plan.prefill) {
    const auto found = of_item(item);
    item.table = found->to - found->begin;
  }
  tables.reserve(tables.size() + static_cast<std::size_t>(count));
  for (const auto& one : all) {
    for (auto i = one.begin; i < one.end; ++i) tables.push_back(tables[static_cast<std::size_t>(one.table + i)]);
  }
  return true;
}

}  // namespace charonia::cuda
