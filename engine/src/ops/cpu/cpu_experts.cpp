// Mixture of experts: rows are gathered by expert, so that the weights of an expert are read once a step, and threads
// share experts and panels. Every row's sum runs over its experts in ascending order.
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

constexpr std::int64_t kFewAssignments = 512;  // worked on at once, however few rows there are

std::string text_of(const std::array<std::int64_t, 2>& shape) { return cat("[", shape[0], ", ", shape[1], "]"); }

// A packed matrix [rows, cols] in scratch memory.
Tensor matrix_at(void* scratch, std::size_t offset, DType type, std::int64_t rows, std::int64_t cols) {
  return {static_cast<std::byte*>(scratch) + offset, type, rows, cols, cols};
}

}  // namespace

CpuExperts::CpuExperts(std::span<const ExpertSource> experts, DType weight, ThreadPool& pool, HugeArena& arena)
    : type_(weight) {
  for (const auto& [gate, up, down] : experts) {
    add({gate.rows, gate.cols}, {up.rows, up.cols}, {down.rows, down.cols}, [&] {
      gate_up_.push_back(
          std::make_unique<PackedLinear>(std::array{gate, up}, std::span<const HostMatrix>{}, weight, pool, arena));
      down_.push_back(
          std::make_unique<PackedLinear>(std::array{down}, std::span<const HostMatrix>{}, weight, pool, arena));
    });
  }
  if (count_ == 0) throw Error(ErrorCode::invalid_argument, "a layer of experts needs at least one expert");
}

CpuExperts::CpuExperts(std::span<const QuantExpertSource> experts, DType data, ThreadPool& pool, HugeArena& arena)
    : type_(data) {
  for (const auto& [gate, up, down] : experts) {
    const std::array gate_up{gate, up};
    const std::array down_alone{down};
    add({gate->rows(), gate->cols()}, {up->rows(), up->cols()}, {down->rows(), down->cols()}, [&] {
      gate_up_.push_back(make_quantised(gate_up, {}, data, pool, arena));
      down_.push_back(make_quantised(down_alone, {}, data, pool, arena));
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
                    ": gate and up must be [", inter_, ", ", hidden_, "], down the other way round"));
  }
  pack();
  bytes_ += gate_up_.back()->bytes() + down_.back()->bytes();
  ++count_;
}

void Routing::choose(const float* logits, std::int64_t row, bool renormalize, const Kernels& kernels) {
  // The largest so far, largest first; a later one that is equal stays behind.
  auto* const chosen = expert_.data() + row * top_k_;
  int n = 0;
  for (int e = 0; e < count_; ++e) {
    if (n == top_k_ && !(logits[e] > logits[chosen[n - 1]])) continue;
    int at = n < top_k_ ? n++ : n - 1;
    for (; at > 0 && logits[e] > logits[chosen[at - 1]]; --at) chosen[at] = chosen[at - 1];
    chosen[at] = e;
  }
  std::sort(chosen, chosen + top_k_);

  thread_local std::vector<float> exponentials;
  exponentials.resize(static_cast<std::size_t>(count_));
  double sum = kernels.exp_sum(exponentials.data(), logits, kernels.maximum(logits, count_), 1, count_);
  const auto exponential = [&](int i) {
    return static_cast<double>(exponentials[static_cast<std::size_t>(chosen[i])]);
  };
  if (renormalize) {
    sum = 0;
    for (int i = 0; i < top_k_; ++i) sum += exponential(i);
  }
  auto* const weights = weight_.data() + row * top_k_;
  for (int i = 0; i < top_k_; ++i) weights[i] = static_cast<float>(exponential(i) / sum);
}

void Routing::route(const Tensor& router, const RouterParams& how, const Kernels& kernels, ThreadPool& pool) {
  count_ = static_cast<int>(router.cols);
  top_k_ = how.top_k;
  const auto all = static_cast<std::size_t>(router.rows * top_k_);
  expert_.resize(all);
  weight_.resize(all);
  assignment_.resize(all);
  row_.resize(all);
  first_.assign(static_cast<std::size_t>(count_) + 1, 0);
  constexpr std::int64_t kFewRows = 64;
  pool.parallel_for(router.rows, kFewRows, [&](std::int64_t begin, std::int64_t end) {
    for (auto row = begin; row < end; ++row) {
      choose(static_cast<const float*>(router.data) + row * router.stride, row, how.renormalize, kernels);
    }
  });
  for (const auto e : expert_) ++first_[static_cast<std::size_t>(e) + 1];
  for (std::size_t e = 1; e < first_.size(); ++e) first_[e] += first_[e - 1];
  // first_[e] moves to the end of expert e while its rows are numbered, and everything one place on afterwards.
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
                     const RouterParams& how, Activation activation, void* scratch) {
  const auto& w = static_cast<const CpuExperts&>(weights);
  const DType act = precision(w.type()).activation;
  require(in.dtype == act && out.dtype == DType::f32 && router.dtype == DType::f32, "experts",
          "in must be of the weight's activation type, out and router f32");
  require(in.cols == w.hidden() && out.cols == w.hidden() && router.cols == w.count() && in.rows == out.rows &&
              router.rows == in.rows,
          "experts",
          cat("in [", in.rows, ", ", in.cols, "], out [", out.rows, ", ", out.cols, "], router [", router.rows, ", ",
              router.cols, "] and ", w.count(), " experts of ", w.hidden(), " by ", w.inter(), " do not fit together"));
  require(how.top_k >= 1 && how.top_k <= w.count(), "experts",
          cat("top_k ", how.top_k, " must be in [1, ", w.count(), "]"));
  if (in.rows == 0) return;
  plain_gemms_.clear();
  prepared_gemms_.clear();
  routing_.route(router, how, kernels_, pool_);
  const ExpertsWorkspace workspace({w.count(), how.top_k, w.hidden(), w.inter(), w.type()}, act, in.rows);
  for (std::int64_t row = 0; row < out.rows; ++row) {
    std::memset(row_at(out, row), 0, static_cast<std::size_t>(out.cols) * sizeof(float));
  }
  for (int first = 0; first < w.count();) {
    const auto begin = routing_.first_of(first);
    int last = first + 1;
    while (last < w.count() && routing_.first_of(last + 1) - begin <= workspace.assignments) ++last;
    if (routing_.first_of(last) > begin) expert_group(out, in, w, first, last, activation, workspace, scratch);
    first = last;
  }
}

// GEMMs that take the activations as they are, are all computed at once; those that take prepared ones in turns of no
// more rows than there is room for.
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
  // Panels of an expert are neighbours: its rows stay in the cache while threads take one panel after the other.
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
