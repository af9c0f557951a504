// A block of a layer: attention, a dense MLP, or experts.
//
// A block is made from the model's configuration and the rank's shard. It then declares the KV cache and the tensors
// that it needs, without weights, so that memory can be planned before anything is loaded. load() reads its weights,
// and issue() issues its operations in every step. A new kind of block is one class with its kernels and its test;
// decoder_plan.cpp chooses the blocks of a layer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "model/activations.h"
#include "model/adapter.h"
#include "model/weight_loader.h"
#include "ops/ops.h"

namespace charonia::model {

// The device, the cache and the memory of a step, for the blocks that issue its operations.
struct StepContext {
  ops::Ops& ops;
  const ops::StepShape& shape;
  ops::KvCache& cache;
  std::byte* memory;  // of the activations
  ops::Tensor residual{};  // the residual stream, before the block's output is added
  std::span<const AdapterRows> adapters{};    // of the step's rows that have one; on a device without adapter slots
  const SlotWeights* slot_weights = nullptr;  // of a device with adapter slots

  // Whether rows may have adapters, which need the inputs of weights.
  bool has_adapters() const { return shape.adapters || !adapters.empty(); }
  // Operations::announce_linear(), unless adapters need the input too.
  void announce_linear(const ops::Linear& weight) const {
    if (!has_adapters()) ops.announce_linear(weight);
  }

  // Operations::linear() and gated_linear(), with the changes of the weight by the rows' adapters.
  void linear(const ops::Tensor& out, const ops::Tensor& in, const ops::Linear& weight) const;
  void gated_linear(const ops::Tensor& out, const ops::Tensor& gate_up, const ops::Tensor& in,
                    const ops::Linear& weight, ops::Activation activation) const;

  std::byte* at(const Activations::Part& part) const { return memory + part.offset; }
  ops::Tensor view(const Activations::Part& part, std::int64_t rows) const {
    return {at(part), part.dtype, rows, part.cols, part.cols};
  }
  ops::Tensor view(const Activations::Part& part) const { return view(part, shape.rows); }
  // Replaces a rank's part of a sum by the sum of all ranks.
  void sum_ranks(const ops::Tensor& tensor) const {
    if (ops.ranks() > 1) ops.all_reduce(tensor);
  }
};

class Block {
 public:
  virtual ~Block() = default;

  // The KV cache of the block; empty: none. Its layer in KvLayout is the one that load() gets.
  virtual std::optional<ops::KvLayer> cache() const { return {}; }
  // The window of its cache, in tokens; 0: none.
  virtual int window() const { return 0; }
  // Places the tensors that issue() uses. Call before load().
  virtual void plan(Activations& activations) = 0;
  virtual void load(WeightLoader& loader) = 0;
  // The only weight that reads the block's input; null: several weights read it.
  virtual const ops::Linear* input_weight() const { return nullptr; }
  // Whether issue() computes the whole output on every rank. Otherwise the outputs of all ranks are summed.
  virtual bool whole_output() const { return false; }
  // out [rows, hidden] GEMM type = this rank's part of the block's output for in [rows, hidden] activation type.
  virtual void issue(const StepContext& step, const ops::Tensor& out, const ops::Tensor& in) = 0;
};

}  // namespace charonia::model
