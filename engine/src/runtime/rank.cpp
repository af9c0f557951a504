#include "runtime/rank.h"

#include <utility>

#include "base/text.h"
#include "charonia/error.h"

namespace charonia::runtime {

void Rank::check_memory(const ModelConfig& model, const ops::StepLimits& limits) const {
  const auto needs = model::Decoder::memory_needs(model, *ops_, limits);
  const auto free = ops_->free_memory();
  const auto megabytes = [](std::size_t bytes) { return static_cast<double>(bytes) / 1e6; };
  if (needs.weights + needs.activations + needs.kv_block > free) {
    throw Error(
        ErrorCode::resource_exhausted,
        cat("the model does not fit: its weights take ", megabytes(needs.weights), " MB, the activations of ",
            limits.max_rows, " tokens (token_budget) and ", limits.max_sequences, " sequences (max_batch_size) ",
            megabytes(needs.activations), " MB, one k/v block ", megabytes(needs.kv_block), " MB, and ",
            megabytes(free), " MB are free on the device (", ops_->device(),
            "). Take a smaller or quantised model, a larger tensor_para_size, a lower "
            "token_budget or max_batch_size, or free memory"));
  }
}

void Rank::load(const ModelConfig& model, const model::WeightFiles& files, const ops::StepLimits& limits) {
  limits_ = limits;
  decoder_ = std::make_unique<model::Decoder>(model, files, *ops_, limits);
}

void Rank::make_cache(int num_blocks) {
  cache_ = ops_->make_kv_cache(layout(), num_blocks);
  decoder_->prepare(*cache_);
}

void Rank::launch(const ops::StepInput& input) {
  decoder_->launch(input);
  steps_.emplace_back();
}

std::vector<ops::Sampled> Rank::collect() {
  if (steps_.empty()) throw Error(ErrorCode::internal, "no step is in flight");
  wait(steps_.front());
  auto oldest = std::move(steps_.front());
  steps_.pop_front();
  if (oldest.error) std::rethrow_exception(oldest.error);
  return std::move(oldest.samples);
}

void Rank::settle() noexcept {
  for (auto& step : steps_) wait(step);
}

void Rank::wait(Step& step) noexcept {
  if (step.done) return;
  step.done = true;
  try {
    step.samples = ops_->collect();
  } catch (...) {
    step.error = std::current_exception();
  }
}

}  // namespace charonia::runtime
