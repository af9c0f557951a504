#include "model/block.h"

namespace charonia::model {
namespace {

// Adds the changes of a weight by the rows' adapters.
void add_changes(const StepContext& step, const ops::Tensor& out, const ops::Tensor& in, const ops::Linear& weight) {
  if (step.shape.adapters) {
    const auto found = step.slot_weights->find(&weight);
    if (found != step.slot_weights->end()) step.ops.add_adapters(out, in, found->second);
    return;
  }
  thread_local std::vector<ops::LowRankRows> changes;
  changes.clear();
  for (const auto& [adapter, rows] : step.adapters) {
    if (const auto* const change = adapter->change_of(weight)) changes.push_back({change, rows});
  }
  if (!changes.empty()) step.ops.add_low_rank(out, in, changes);
}

}  // namespace

void StepContext::linear(const ops::Tensor& out, const ops::Tensor& in, const ops::Linear& weight) const {
  ops.linear(out, in, weight);
  add_changes(*this, out, in, weight);
}

void StepContext::gated_linear(const ops::Tensor& out, const ops::Tensor& gate_up, const ops::Tensor& in,
                               const ops::Linear& weight, ops::Activation activation) const {
  if (!has_adapters()) return ops.gated_linear(out, gate_up, in, weight, activation);
  linear(gate_up, in, weight);
  ops.gated_activation(out, gate_up, activation);
}

}  // namespace charonia::model
