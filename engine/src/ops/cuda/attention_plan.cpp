// How a step's attention is cut into items for thread blocks: see kernels/attention.h. Integers only.
//
// Items are sorted, longest first, and dealt to a grid that runs all at once; what decides the time is the block with
// the most work. Items longer than a fraction of a block's fair share are therefore cut into pieces of about that
// length, as long as pieces stay so long that reading them takes much longer than writing and reading their partial
// results.
//
// Reproducible: only whole chunks of kAttentionChunk positions may be pieces, and a thread block that takes several
// chunks combines them as pieces are combined. Whether an item is cut is then free to depend on the batch. (In a
// window, the first chunk is the part of one that lies in it.)
#include <algorithm>

#include "ops/cuda/kernels/attention.h"

namespace charonia::cuda {
namespace {

constexpr std::int64_t kDecodePiecesPerBlock = 4, kPrefillPiecesPerBlock = 2;  // what a fair share is cut into
constexpr std::int64_t kLeastDecodePiece = 256, kLeastPrefillPiece = 512;      // positions
constexpr std::int64_t kMostReproducibleDecodePieces = 1024;
static_assert(kLeastDecodePiece % kAttentionTile == 0 && kLeastPrefillPiece % kAttentionTile == 0 &&
              kAttentionChunk % kAttentionTile == 0);

// How one kind of items is cut.
struct Cut {
  std::int64_t units = 1;        // thread blocks of one item
  std::int64_t shares = 1;       // pieces of equal work that all items together are worth cutting into
  std::int64_t least_piece = 1;  // positions
  std::int64_t most_pieces = 1;  // of all cut items together: what there is room for
  bool reproducible = false;

  // Of an item, when a piece should have at least `least` positions.
  std::int64_t pieces(std::int64_t begin, std::int64_t end, std::int64_t least) const {
    const auto fair = (end - begin) / least;
    return fair < 2 ? 1 : reproducible ? divide_up(end, kAttentionChunk) - begin / kAttentionChunk : fair;
  }
};

Cut decode_cut(const AttentionShape& shape) {
  const auto units = shape.kv_heads * divide_up(shape.group(), kDecodeTileRows);
  const auto shares = shape.multiprocessors * kBlocksPerMultiprocessor * kDecodePiecesPerBlock;
  const auto most = divide_up(shares, units);
  return {units, shares, kLeastDecodePiece, shape.reproducible ? std::max(most, kMostReproducibleDecodePieces) : most,
          shape.reproducible};
}

Cut prefill_cut(const AttentionShape& shape) {
  const auto units = shape.kv_heads * divide_up(shape.group(), prefill_tile_rows(shape.head_dim));
  const auto shares = shape.multiprocessors * kBlocksPerMultiprocessor * kPrefillPiecesPerBlock;
  return {units, shares, kLeastPrefillPiece, divide_up(shares, units), shape.reproducible};
}

std::int64_t length(const AttentionItem& item) { return item.kv_end - item.kv_begin; }

bool longer(const AttentionItem& a, const AttentionItem& b) { return length(a) > length(b); }

// Cuts `whole` into `items`, longest first, and counts their partial results.
void cut(const Cut& how, std::vector<AttentionItem>& whole, std::vector<AttentionItem>& items,
         std::int32_t& num_partials) {
  std::stable_sort(whole.begin(), whole.end(), longer);
  std::int64_t total = 0;
  for (const auto& item : whole) total += length(item);
  const auto least = std::max(how.least_piece, round_up(divide_up(total * how.units, how.shares), kAttentionTile));
  auto left = how.most_pieces;
  for (const auto& item : whole) {
    const auto pieces = how.pieces(item.kv_begin, item.kv_end, least);
    if (pieces < 2 || pieces > left) {
      items.push_back(item);
      continue;
    }
    left -= pieces;
    const auto tiles = divide_up(length(item), kAttentionTile);
    const auto begin_of = [&](std::int64_t piece) -> std::int64_t {
      if (piece == 0) return item.kv_begin;
      return how.reproducible ? (item.kv_begin / kAttentionChunk + piece) * kAttentionChunk
                              : item.kv_begin + piece * tiles / pieces * kAttentionTile;
    };
    for (std::int64_t piece = 0; piece < pieces; ++piece) {
      auto part = item;
      part.kv_begin = static_cast<std::int32_t>(begin_of(piece));
      part.kv_end = static_cast<std::int32_t>(std::min<std::int64_t>(begin_of(piece + 1), item.kv_end));
      part.partial = num_partials;
      part.piece = static_cast<std::int16_t>(piece);
      part.pieces = static_cast<std::int16_t>(pieces);
      items.push_back(part);
    }
    num_partials += static_cast<std::int32_t>(pieces * item.num_rows);
  }
  std::stable_sort(items.begin(), items.end(), longer);
}

}  // namespace

AttentionBounds attention_bounds(const AttentionShape& shape, int max_rows, int max_sequences, int max_positions) {
  const std::int64_t item_rows = prefill_item_rows(shape.head_dim, shape.group());
  const std::int64_t sequences = std::min(max_rows, max_sequences);
  // Every sequence has at most one item that is not full.
  const auto decodes = item_rows == 1 ? std::int64_t{max_rows} : sequences;
  const auto prefills = item_rows == 1 ? 0 : std::min(max_rows / item_rows + sequences, std::int64_t{max_rows} / 2);
  // A longest item; in a window, one that begins at the end of a chunk touches most of them.
  const auto longest = std::int64_t{shape.window} + item_rows + kAttentionTile;
  const bool all = shape.window == 0 || longest >= max_positions;
  const std::int64_t begin = all ? 0 : kAttentionChunk - kAttentionTile;
  const std::int64_t end = all ? max_positions : begin + longest;
  const auto pieces = [&](const Cut& how, std::int64_t items) {
    const auto of_one = how.pieces(begin, end, how.least_piece);
    return of_one < 2 ? 0 : std::min(how.most_pieces, items * of_one);
  };
  const auto decode_pieces = pieces(decode_cut(shape), decodes), prefill_pieces = pieces(prefill_cut(shape), prefills);
  return {decodes + decode_pieces, prefills + prefill_pieces, decode_pieces + prefill_pieces * item_rows};
}

void plan_attention(const AttentionShape& shape, const ops::AttentionBatch& batch,
                    std::span<const std::int32_t> table_begin, AttentionPlan& plan) {
  plan.decode.clear();
  plan.prefill.clear();
  plan.num_partials = 0;
  std::vector<AttentionItem> decode, prefill;
  const int item_rows = prefill_item_rows(shape.head_dim, shape.group());
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

}  // namespace charonia::cuda
