// Embeddings and scores: what a request with `pooling` gives instead of text.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "charonia/config.h"
#include "charonia/types.h"

namespace charonia::runtime {

// Throws Error(invalid_argument) if the model has another task than the request, or if the request has fields that an
// embedding or a score does not have.
void check_pooling(const Request& request, const ModelConfig& model);

// The mean of the rows of an input's tokens. Sums are in double, in the order of the tokens, so chunks change no bit.
class MeanRow {
 public:
  // Throws Error(internal) if it is not the next position. Also after a preemption, each row is given once.
  void add(std::int32_t position, std::span<const float> row);
  std::vector<float> mean() const;

 private:
  std::vector<double> sums_;
  std::int32_t rows_ = 0;
};

// row: the decoder's row of the last token, or the mean of all rows (model::output_columns()). Returns the embedding,
// which is the row, or the score. dimensions: as in Request. Sums are in double, in order, so the bits depend on the
// row alone.
std::vector<float> pool(std::span<const float> row, const ModelConfig& model, int dimensions);

}  // namespace charonia::runtime
