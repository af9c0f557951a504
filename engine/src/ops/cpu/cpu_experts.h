// Mixture of experts on the CPU: the weights, the routing of rows to experts, and the workspace of a step.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/huge_memory.h"
#include "ops/cpu/cpu_linear.h"
#include "ops/cpu/kernels.h"
#include "ops/device.h"
#include "ops/operations.h"

namespace charonia::ops::cpu {

class CpuExperts : public Experts {
 public:
  // Throws Error(invalid_argument) if the shapes do not match.
  CpuExperts(std::span<const ExpertSource> experts, DType weight, ThreadPool& pool, HugeArena& arena);
  CpuExperts(std::span<const QuantExpertSource> experts, DType data, ThreadPool& pool, HugeArena& arena);

  DType type() const { return type_; }
  const CpuLinear& gate_up(int expert) const { return *gate_up_[static_cast<std::size_t>(expert)]; }
  const CpuLinear& down(int expert) const { return *down_[static_cast<std::size_t>(expert)]; }

 private:
  using Shape = std::array<std::int64_t, 2>;
  // Packs another expert.
  template <class Pack>
  void add(Shape gate, Shape up, Shape down, Pack pack);

  DType type_;
  std::vector<std::unique_ptr<CpuLinear>> gate_up_, down_;  // [experts]: gate above up
};

// Assigns rows to experts. An assignment is a pair: a row and an expert that is selected for it.
class Routing {
 public:
  // router: the argument of Operations::experts().
  void route(const Tensor& router, int experts, const RouterParams& how, const Kernels& kernels, ThreadPool& pool);

  int top_k() const { return top_k_; }
  // Assignments are numbered by expert, then by row. Expert e has assignments [first_of(e), first_of(e + 1)).
  std::int64_t first_of(int expert) const { return first_[static_cast<std::size_t>(expert)]; }
  std::int64_t row_of(std::int64_t assignment) const { return row_[static_cast<std::size_t>(assignment)]; }
  // The assignments and the weights of a row, in ascending order of its experts.
  std::span<const std::int64_t> assignments(std::int64_t row) const { return slice(assignment_, row); }
  std::span<const float> weights(std::int64_t row) const { return slice(weight_, row); }

 private:
  template <class T>
  std::span<const T> slice(const std::vector<T>& all, std::int64_t row) const {
    return std::span(all).subspan(static_cast<std::size_t>(row * top_k_), static_cast<std::size_t>(top_k_));
  }
  void choose(const float* logits, std::int64_t row, const RouterParams& how, const Kernels& kernels);
  void choose_by_scores(const float* logits, std::int64_t row, const RouterParams& how, const Kernels& kernels);

  int count_ = 0, top_k_ = 0;
  std::vector<std::int32_t> expert_;      // [rows, top_k], ascending in a row
  std::vector<float> weight_;             // [rows, top_k]
  std::vector<std::int64_t> assignment_;  // [rows, top_k]
  std::vector<std::int64_t> first_;       // [experts + 1]
  std::vector<std::int64_t> row_;         // [rows * top_k]
};

// The GEMM of some rows of an expert. In the loop over several GEMMs, each chunk is gemm.panels of its panels.
struct ExpertGemm {
  GemmKernel gemm;
  const CpuLinear* weight = nullptr;
  Tensor out;
  GemmRows in;
  std::int64_t first_chunk = 0;
};
struct ExpertGemms {
  void add(ExpertGemm part) {
    part.first_chunk = chunks;
    chunks += (part.weight->panels() + part.gemm.panels - 1) / part.gemm.panels;
    rows += part.in.count;
    parts.push_back(part);
  }
  void clear() {
    parts.clear();
    chunks = rows = 0;
  }
  std::vector<ExpertGemm> parts;
  std::int64_t chunks = 0, rows = 0;
};

// The workspace for the assignments of a group of experts. Experts are processed in groups, so that the scratch memory
// stays within a small multiple of a dense layer's, although every row has several experts.
struct ExpertsWorkspace {
  ExpertsWorkspace(const ExpertsShape& shape, DType activation, std::int64_t rows);

  std::int64_t assignments = 0;                                // at a time, at least those of one expert
  std::size_t gathered = 0, gate_up = 0, gated = 0, down = 0;  // byte offsets
  std::size_t bytes = 0;
};

}  // namespace charonia::ops::cpu
