#include "runtime/rank.h"

#include "base/text.h"
#include "charonia/error.h"

namespace charonia::runtime {

void Rank::load(const ModelConfig& model, const model::WeightFiles& files, const ops::StepLimits& limits) {
  limits_ = limits;
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
  decoder_ = std::make_unique<model::Decoder>(model, files, *ops_, limits);
}

void Rank::make_cache(int num_blocks) {
  cache_ = ops_->make_kv_cache(layout(), num_blocks);
  decoder_->prepare(*cache_);
}

}  // namespace charonia::runtime
