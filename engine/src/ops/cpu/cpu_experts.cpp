// Mixture of experts: rows are gathered by expert, so that a step reads each expert's weights once. Threads share
// experts and panels. Every row's sum runs over its experts in ascending order.
#include "ops/cpu/cpu_experts.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/text.h"
#include "charonia/error.h"
#include "ops/cpu/cpu_ops.h"
#include "ops/cpu/packed_linear.h"
#include "ops/cpu/quant_linear.h"

namespace charonia::ops::cpu {
namespace {

constexpr std::int64_t kFewAssignments = 512;  // processed together, even with few rows

std::string text_of(const std::array<std::int64_t, 2>& shape) { return cat("[", shape[0], ", ", shape[1], "]"); }

// A packed matrix [rows, cols] in scratch memory.
Tensor matrix_at(void* scratch, std::size_t offset, DType type, std::int64_t rows, std::int64_t cols) {
  return {static_cast<std::byte*>(scratch) + offset, type, rows, cols, cols};
}

// out = the k allowed numbers of 0 .. n - 1 with the largest values, largest first. If values are equal, the lowest
// number comes first.
template <class Value, class Allowed>
void pick(int n, int k, Value value, Allowed allowed, std::int32_t* out) {
  int found = 0;
  for (int i = 0; i < n; ++i) {
    if (!allowed(i) || (found == k && !(value(i) > value(out[found - 1])))) continue;
    int at = found < k ? found++ : found - 1;
    for (; at > 0 && value(i) > value(out[at - 1]); --at) out[at] = out[at - 1];
    out[at] = i;
  }
}

}  // namespace

CpuExperts::CpuExperts(std::span<const ExpertSource> experts, DType weight, ThreadPool& pool, HugeArena& arena)
    : type_(weight) {
  for (const auto& [gate, up, down, bias] : experts) {
    add({gate.rows, gate.cols}, {up.rows, up.cols}, {down.rows, down.cols}, [&] {
      gate_up_.push_back(std::make_unique<PackedLinear>(std::array{gate, up}, std::array{bias.gate, bias.up}, weight,
                                                        pool, arena));
      down_.push_back(std::make_unique<PackedLinear>(std::array{down}, std::array{bias.down}, weight, pool, arena));
    });
  }
  if (count_ == 0) throw Error(ErrorCode::invalid_argument, "a layer of experts needs at least one expert");
}

CpuExperts::CpuExperts(std::span<const QuantExpertSource> experts, DType data, ThreadPool& pool, HugeArena& arena)
    : type_(data) {
  for (const auto& [gate, up, down, bias] : experts) {
    const std::array gate_up{gate, up};
    const std::array down_alone{down};
    add({gate->rows(), gate->cols()}, {up->rows(), up->cols()}, {down->rows(), down->cols()}, [&] {
      gate_up_.push_back(make_quantised(gate_up, std::array{bias.gate, bias.up}, data, pool, arena));
      down_.push_back(make_quantised(down_alone, std::array{bias.down}, data, pool, arena));
    });
  }
  if (count_ == 0) throw Error(ErrorCode::invalid_argument, "a layer of experts needs at least one expert");
}

template <class Pack>
void CpuExperts::add(Shape gate, Shape up, Shape down, Pack pack) {
  if (count_ == 0) inter_ = gate[0], hidden_ = gate[1];
  if (gate != Shape{inter_, hidden_} || up != gate || down != Shape{hidden_, inter_}) {
    throw Error(ErrorCode::invalid_argument,
                cat("expert ", count_, " has gate ", text_of(gate), ", up ", text_of(up), " and down ", text_of(down),
                    ": gate and up must be [", inter_, ", ", hidden_, "], down the transposed shape"));
  }
  pack();
  bytes_ += gate_up_.back()->bytes() + down_.back()->bytes();
  ++count_;
}

namespace {

float factor_of(const RouterParams& how, std::int32_t expert) {
  return how.expert_scale == nullptr ? how.scale : how.scale * how.expert_scale[expert];
}

}  // namespace

void Routing::choose(const float* logits, std::int64_t row, const RouterParams& how, const Kernels& kernels) {
  if (!how.by_logits()) return choose_by_scores(logits, row, how, kernels);
  auto* const chosen = expert_.data() + row * top_k_;
  pick(count_, top_k_, [&](int e) { return logits[e]; }, [](int) { return true; }, chosen);
  std::sort(chosen, chosen + top_k_);

  thread_local std::vector<float> exponentials;
  exponentials.resize(static_cast<std::size_t>(count_));
  double sum = kernels.exp_sum(exponentials.data(), logits, kernels.maximum(logits, count_), 1, count_);
  const auto exponential = [&](int i) {
    return static_cast<double>(exponentials[static_cast<std::size_t>(chosen[i])]);
  };
  if (how.renormalize) {
    sum = 0;
    for (int i = 0; i < top_k_; ++i) sum += exponential(i);
  }
  auto* const weights = weight_.data() + row * top_k_;
  for (int i = 0; i < top_k_; ++i) weights[i] = static_cast<float>(exponential(i) / sum) * factor_of(how, chosen[i]);
}

void Routing::choose_by_scores(const float* logits, std::int64_t row, const RouterParams& how, const Kernels& kernels) {
  thread_local std::vector<float> scores, ranks;
  scores.resize(static_cast<std::size_t>(count_));
  if (how.score == RouterScore::sigmoid) {
    kernels.exp_sum(scores.data(), logits, 0, -1, count_);
    for (auto& score : scores) score = 1 / (1 + score);
  } else {
    const double sum = kernels.exp_sum(scores.data(), logits, kernels.maximum(logits, count_), 1, count_);
    for (auto& score : scores) score = static_cast<float>(static_cast<double>(score) / sum);
  }
  ranks = scores;
  for (std::size_t e = 0; how.bias != nullptr && e < ranks.size(); ++e) ranks[e] += how.bias[e];

  // Without groups, all experts form one group.
  std::array<bool, RouterParams::kMaxGroups> allowed{true};
  const int size = how.groups > 0 ? count_ / how.groups : count_;
  if (how.groups > 0) {
    std::array<float, RouterParams::kMaxGroups> values{};
    std::array<std::int32_t, RouterParams::kMaxGroups> best{};
    for (int g = 0; g < how.groups; ++g) {
      std::array<std::int32_t, 2> two{};
      pick(size, 2, [&](int i) { return ranks[static_cast<std::size_t>(g * size + i)]; }, [](int) { return true; },
           two.data());
      const auto* const own = ranks.data() + g * size;
      values[static_cast<std::size_t>(g)] = own[two[0]] + own[two[1]];
    }
    pick(how.groups, how.top_groups, [&](int g) { return values[static_cast<std::size_t>(g)]; },
         [](int) { return true; }, best.data());
    allowed[0] = false;
    for (const auto g : std::span(best).first(static_cast<std::size_t>(how.top_groups))) {
      allowed[static_cast<std::size_t>(g)] = true;
    }
  }
  auto* const chosen = expert_.data() + row * top_k_;
  pick(count_, top_k_, [&](int e) { return ranks[static_cast<std::size_t>(e)]; },
       [&](int e) { return allowed[static_cast<std::size_t>(e / size)]; }, chosen);
  std::sort(chosen, chosen + top_k_);

  double sum = 1;
  if (how.renormalize) {
    sum = 0;
    for (int i = 0; i < top_k_; ++i) sum += static_cast<double>(scores[static_cast<std::size_t>(chosen[i])]);
    sum = std::max(sum, static_cast<double>(how.norm_min));
  }
  auto* const weights = weight_.data() + row * top_k_;
  for (int i = 0; i < top_k_; ++i) {
    weights[i] = static_cast<float>(static_cast<double>(scores[static_cast<std::size_t>(chosen[i])]) / sum) *
                 factor_of(how, chosen[i]);
  }
}

void Routing::route(const Tensor& router, int experts, const RouterParams& how, const Kernels& kernels,
                    ThreadPool& pool) {
  count_ = experts;
  top_k_ = how.top_k;
  const auto all = static_cast<std::size_t>(router.rows * top_k_);
  expert_.resize(all);
  weight_.resize(all);
  assignment_.resize(all);
  row_.resize(all);
  first_.assign(static_cast<std::size_t>(count_) + 1, 0);
  constexpr std::int64_t kFewRows = 64;
  pool.parallel_for(router.rows, kFewRows, [&](std::int64_t begin, std::int64_t end) {
    thread_local std::vector<float> sums;
    for (auto row = begin; row < end; ++row) {
      const auto* logits = static_cast<const float*>(router.data) + row * router.stride;
      if (router.cols > count_) {
        sums.assign(logits, logits + count_);
        for (int e = 0; e < count_; ++e) sums[static_cast<std::size_t>(e)] += logits[count_ + e];
        logits = sums.data();
      }
      choose(logits, row, how, kernels);
    }
  });
  for (const auto e : expert_) ++first_[static_cast<std::size_t>(e) + 1];
  for (std::size_t e = 1; e < first_.size(); ++e) first_[e] += first_[e - 1];
  // While its rows are numbered, first_[e] moves to the end of expert e. Afterwards all entries are shifted by one.
  for (std::size_t i = 0; i < all; ++i) {
    const auto assignment = first_[static_cast<std::size_t>(expert_[i])]++;
    assignment_[i] = assignment;
    row_[static_cast<std::size_t>(assignment)] = static_cast<std::int64_t>(i) / top_k_;
  }
  std::copy_backward(first_.begin(), first_.end() - 1, first_.end());
  first_[0] = 0;
}

ExpertsWorkspace::ExpertsWorkspace(const ExpertsShape& shape, DType activation, std::int64_t rows)
    : assignments(std::min(rows * shape.top_k, std::max(rows, kFewAssignments))) {
  const auto place = [this](std::int64_t cols, DType type) {
    constexpr std::size_t kLine = 64;
    const auto at = bytes;
    const auto size = static_cast<std::size_t>(assignments * cols) * size_of(type);
    bytes += (size + kLine - 1) / kLine * kLine;
    return at;
  };
  gathered = place(shape.hidden, activation);
  gate_up = place(2 * shape.inter, DType::f32);
  gated = place(shape.inter, activation);
  down = place(shape.hidden, DType::f32);
}

std::unique_ptr<Experts> CpuOps::make_experts(std::span<const ExpertSource> experts, DType weight) {
  return std::make_unique<CpuExperts>(experts, weight, pool_, weights_);
}

std::unique_ptr<Experts> CpuOps::make_quantised_experts(std::span<const QuantExpertSource> experts, DType data) {
  return std::make_unique<CpuExperts>(experts, data, pool_, weights_);
}

std::size_t CpuOps::experts_scratch_bytes(const ExpertsShape& shape, std::int64_t rows) const {
  return ExpertsWorkspace(shape, precision(shape.weight).activation, rows).bytes;
}

void CpuOps::experts(const Tensor& out, const Tensor& in, const Tensor& router, const Experts& weights,
                     const RouterParams& how, Activation activation, void* scratch, const SharedExpert& shared) {
  const auto& w = static_cast<const CpuExperts&>(weights);
  const DType act = precision(w.type()).activation;
  require(in.dtype == act && out.dtype == DType::f32 && router.dtype == DType::f32 &&
              (shared.out.data == nullptr || shared.out.dtype == DType::f32),
          "experts",
          "in must have the weight's activation type; out, router and the shared expert's output must be f32");
  require(in.cols == w.hidden() && out.cols == w.hidden() &&
              (router.cols == w.count() || router.cols == 2 * w.count()) && in.rows == out.rows &&
              router.rows == in.rows,
          "experts", [&] {
            return cat("in [", in.rows, ", ", in.cols, "], out [", out.rows, ", ", out.cols, "], router [", router.rows,
                       ", ", router.cols, "] and ", w.count(), " experts of ", w.hidden(), " by ", w.inter(),
                       " do not fit together");
          });
  require(shared.out.data == nullptr || (shared.out.rows == out.rows && shared.out.cols == out.cols), "experts", [&] {
    return cat("the shared expert's output is [", shared.out.rows, ", ", shared.out.cols, "], but out is [", out.rows,
               ", ", out.cols, "]");
  });
  require(how.fits(w.count()), "experts", [&] {
    return cat("top_k ", how.top_k, " out of ", how.top_groups, " of ", how.groups, " groups does not fit ", w.count(),
               " experts");
  });
  if (in.rows == 0) return;
  plain_gemms_.clear();
  prepared_gemms_.clear();
  routing_.route(router, w.count(), how, kernels_, pool_);
  const ExpertsWorkspace workspace({w.count(), how.top_k, w.hidden(), w.inter(), w.type()}, act, in.rows);
  for_rows(out.rows, out.cols, [&](std::int64_t row) {
    auto* const to = reinterpret_cast<float*>(row_at(out, row));
    const auto bytes = static_cast<std::size_t>(out.cols) * sizeof(float);
    if (shared.out.data == nullptr) {
      std::memset(to, 0, bytes);
      return;
    }
    std::memcpy(to, row_at(shared.out, row), bytes);
    if (shared.gate == nullptr) return;
    float factor = 0;  // e^-gate, then the sigmoid
    kernels_.exp_sum(&factor, shared.gate + row * shared.gate_stride, 0, -1, 1);
    kernels_.scale(to, 1 / (1 + factor), out.cols);
  });
  for (int first = 0; first < w.count();) {
    const auto begin = routing_.first_of(first);
    int last = first + 1;
    while (last < w.count() && routing_.first_of(last + 1) - begin <= workspace.assignments) ++last;
    if (routing_.first_of(last) > begin) expert_group(out, in, w, first, last, activation, workspace, scratch);
    first = last;
  }
}

// GEMMs that take activations in place are computed together. GEMMs that need prepared activations are computed in
// batches of as many rows as the buffer holds.
void CpuOps::add_expert_gemm(const Tensor& out, const Tensor& in, const CpuLinear& weight) {
  const auto gemm = weight.gemm(kernels_, in.rows);
  if (gemm.prepared_bytes == 0) return plain_gemms_.add({gemm, &weight, out, gemm_rows(in)});
  reserve_prepared(kPreparedRows, gemm);
  for (std::int64_t begin = 0; begin < in.rows; begin += kPreparedRows) {
    const auto end = std::min(in.rows, begin + kPreparedRows);
    if (prepared_gemms_.rows + end - begin > kPreparedRows) multiply_experts(prepared_gemms_);
    const auto rows = prepare(rows_of(in, begin, end - begin), weight, gemm, prepared_gemms_.rows);
    prepared_gemms_.add({gemm, &weight, rows_of(out, begin, end - begin), rows});
  }
}

void CpuOps::multiply_experts(ExpertGemms& gemms) {
  const auto& parts = gemms.parts;
  if (parts.empty()) return;
  // Panels of one expert are neighbours, so its rows stay in the cache while threads process its panels.
  const auto rows = std::max<std::int64_t>(1, gemms.rows / static_cast<std::int64_t>(parts.size()));
  const auto grain = std::max<std::int64_t>(1, kSmallGemm / work_of_panel(rows, parts.front().weight->in_features()));
  pool_.parallel_for(gemms.chunks, grain, [&](std::int64_t chunk, std::int64_t end) {
    auto part = std::ranges::upper_bound(parts, chunk, {}, &ExpertGemm::first_chunk) - 1;
    for (; chunk < end; ++chunk) {
      while (part + 1 != parts.end() && (part + 1)->first_chunk <= chunk) ++part;
      const auto panel = (chunk - part->first_chunk) * part->gemm.panels;
      const RowBlocks blocks(part->gemm, part->in.count);
      for (std::int64_t row = 0; row < part->in.count; row += blocks.size) {
        part->weight->multiply(part->gemm, panel, part->out, part->in, row,
                               std::min(blocks.size, part->in.count - row));
      }
    }
  });
  gemms.clear();
}

void CpuOps::expert_group(const Tensor& out, const Tensor& in, const CpuExperts& w, int first, int last,
                          Activation activation, const ExpertsWorkspace& workspace, void* scratch) {
  const auto begin = routing_.first_of(first), end = routing_.first_of(last), n = end - begin;
  const auto gathered = matrix_at(scratch, workspace.gathered, in.dtype, n, w.hidden());
  const auto gate_up = matrix_at(scratch, workspace.gate_up, DType::f32, n, 2 * w.inter());
  const auto gated = matrix_at(scratch, workspace.gated, in.dtype, n, w.inter());
  const auto down = matrix_at(scratch, workspace.down, DType::f32, n, w.hidden());

  for_rows(n, w.hidden(), [&](std::int64_t i) {
    std::memcpy(row_at(gathered, i), row_at(in, routing_.row_of(begin + i)),
                static_cast<std::size_t>(w.hidden()) * size_of(in.dtype));
  });
  const auto multiply = [&](const Tensor& to, const Tensor& from, auto weight_of) {
    for (int e = first; e < last; ++e) {
      const auto rows = routing_.first_of(e + 1) - routing_.first_of(e);
      if (rows == 0) continue;
      const auto at = routing_.first_of(e) - begin;
      add_expert_gemm(rows_of(to, at, rows), rows_of(from, at, rows), weight_of(e));
    }
    multiply_experts(plain_gemms_);
    multiply_experts(prepared_gemms_);
  };
  multiply(gate_up, gathered, [&](int e) -> const CpuLinear& { return w.gate_up(e); });
  gated_activation(gated, gate_up, activation);
  multiply(down, gated, [&](int e) -> const CpuLinear& { return w.down(e); });
  for_rows(out.rows, routing_.top_k() * w.hidden(), [&](std::int64_t row) {
    const auto assignments = routing_.assignments(row);
    const auto factors = routing_.weights(row);
    for (std::size_t i = 0; i < assignments.size(); ++i) {
      if (assignments[i] < begin || assignments[i] >= end) continue;
      kernels_.add_scaled(reinterpret_cast<float*>(row_at(out, row)),
                          reinterpret_cast<const float*>(row_at(down, assignments[i] - begin)), factors[i], out.cols);
    }
  });
}

}  // namespace charonia::ops::cpu
