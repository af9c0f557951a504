// The products of LoRA adapters on the CPU, for all adapters of a step together.
#include <algorithm>

#include "base/text.h"
#include "ops/cpu/cpu_ops.h"
#include "ops/low_rank.h"

namespace charonia::ops::cpu {
namespace {

// The work of a thread: up to this number of rows, and of ranks or panels.
constexpr std::int64_t kRows = 32, kRanks = 16, kPanels = 8;
static_assert(kRanks % LowRank::kGroup == 0 && LowRank::kGroup == kLowRankGroup && LowRank::kPanel == kPanel);

}  // namespace

// Splits the rows of the changes into items. Returns the number of products of `in` and A.
std::int64_t CpuOps::split_low_rank(const Tensor& out, const Tensor& in, std::span<const LowRankRows> changes) {
  low_rank_items_.clear();
  std::int64_t floats = 0, products = 0;
  for (const auto& [change, rows] : changes) {
    require(out.dtype == DType::f32 && in.dtype == change->type && in.cols == change->in_features &&
                out.cols == change->out_features && in.rows == out.rows,
            "add_low_rank", [&] {
              return cat("in [", in.rows, ", ", in.cols, "], out [", out.rows, ", ", out.cols,
                         "] and the change of a weight [", change->out_features, ", ", change->in_features,
                         "] do not fit together");
            });
    const auto count = std::ssize(rows);
    for (std::int64_t first = 0; first < count; first += kRows) {
      const auto some = rows.subspan(static_cast<std::size_t>(first),
                                     static_cast<std::size_t>(std::min(kRows, count - first)));
      low_rank_items_.push_back({change, some, floats});
      floats += std::ssize(some) * change->ranks;
    }
    products += count * change->ranks * change->in_features;
  }
  if (std::ssize(low_rank_t_) < floats) low_rank_t_.resize(static_cast<std::size_t>(floats));
  return products;
}

void CpuOps::add_low_rank(const Tensor& out, const Tensor& in, std::span<const LowRankRows> changes) {
  const auto products = split_low_rank(out, in, changes);
  if (low_rank_items_.empty()) return;
  const auto args_of = [&](const LowRankItem& item) {
    return LowRankArgs{.rows = item.rows.data(),
                       .count = static_cast<int>(item.rows.size()),
                       .in = in.data,
                       .in_stride = in.stride,
                       .in_features = in.cols,
                       .a = item.change->a,
                       .scales = item.change->scales,
                       .t = low_rank_t_.data() + item.t,
                       .t_stride = item.change->ranks,
                       .out = static_cast<float*>(out.data),
                       .out_stride = out.stride};
  };
  const auto down = [&](const LowRankItem& item, std::int64_t first, std::int64_t ranks) {
    auto args = args_of(item);
    args.first_rank = first;
    args.ranks = std::min(ranks, item.change->ranks - first);
    (item.change->type == DType::bf16 ? kernels_.low_rank_down_bf16 : kernels_.low_rank_down_f32)(args);
  };
  const auto up = [&](const LowRankItem& item, const LowRank::Part& part, std::int64_t first, std::int64_t columns) {
    auto args = args_of(item);
    args.first_rank = part.first_rank;
    args.ranks = part.ranks;
    args.first_column = part.first_column + first;
    args.columns = std::min(columns, part.columns - first);
    const auto element = static_cast<std::size_t>(part.b + first * item.change->padded_ranks(part));
    args.b = static_cast<const std::byte*>(item.change->b) + element * size_of(item.change->type);
    (item.change->type == DType::bf16 ? kernels_.low_rank_up_bf16 : kernels_.low_rank_up_f32)(args);
  };

  // With an item for each thread, a thread computes both products of an item.
  const auto items = std::ssize(low_rank_items_);
  if (items >= pool_.size() || products <= kSmallGemm) {
    const auto grain = std::max<std::int64_t>(1, kSmallGemm * items / std::max<std::int64_t>(1, products));
    pool_.parallel_for(items, grain, [&](std::int64_t begin, std::int64_t end) {
      for (auto i = begin; i < end; ++i) {
        const auto& item = low_rank_items_[static_cast<std::size_t>(i)];
        down(item, 0, item.change->ranks);
        for (const auto& part : item.change->parts) up(item, part, 0, part.columns);
      }
    });
    return;
  }
  // Otherwise threads share an item: its ranks, then its columns.
  const auto run = [&](auto pieces_of, auto compute) {
    std::int64_t pieces = 0;
    for (auto& item : low_rank_items_) {
      item.first_piece = pieces;
      pieces += pieces_of(item);
    }
    const auto grain = std::max<std::int64_t>(1, kSmallGemm * pieces / products);
    pool_.parallel_for(pieces, grain, [&](std::int64_t begin, std::int64_t end) {
      auto item = std::ranges::upper_bound(low_rank_items_, begin, {}, &LowRankItem::first_piece) - 1;
      for (auto piece = begin; piece < end; ++piece) {
        while (item + 1 != low_rank_items_.end() && (item + 1)->first_piece <= piece) ++item;
        compute(*item, piece - item->first_piece);
      }
    });
  };
  run([](const LowRankItem& item) { return (item.change->ranks + kRanks - 1) / kRanks; },
      [&](const LowRankItem& item, std::int64_t piece) { down(item, piece * kRanks, kRanks); });
  const auto pieces_of_part = [](const LowRank::Part& part) { return (part.panels() + kPanels - 1) / kPanels; };
  run(
      [&](const LowRankItem& item) {
        std::int64_t pieces = 0;
        for (const auto& part : item.change->parts) pieces += pieces_of_part(part);
        return pieces;
      },
      [&](const LowRankItem& item, std::int64_t piece) {
        const auto* part = item.change->parts.data();
        for (; piece >= pieces_of_part(*part); ++part) piece -= pieces_of_part(*part);
        up(item, *part, piece * kPanels * kPanel, kPanels * kPanel);
      });
}

}  // namespace charonia::ops::cpu
