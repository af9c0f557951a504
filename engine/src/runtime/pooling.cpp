#include "runtime/pooling.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string_view>
#include <utility>

#include "base/text.h"
#include "charonia/error.h"
#include "model/layers.h"

namespace charonia::runtime {
namespace {

template <class... Text>
[[noreturn]] void reject(const Text&... text) {
  throw Error(ErrorCode::invalid_argument, cat(text...));
}

}  // namespace

void check_pooling(const Request& request, const ModelConfig& model) {
  const auto &kind = request.pooling, &task = model.model_task;
  if (!kind.empty() && kind != "embed" && kind != "score") reject("pooling: it is '", kind, "': send embed or score");
  if (kind.empty() && request.dimensions != 0) {
    reject("dimensions: they are for embeddings: send pooling = embed, or leave them out");
  }
  if (kind != (task == "generate" ? "" : task)) {
    const auto gives = [](std::string_view of) {
      return of == "embed" ? "embeddings" : of == "score" ? "scores" : "text";
    };
    const std::string_view routes = task == "embed"   ? "/v1/embeddings"
                                    : task == "score" ? "/v1/rerank and /v1/score"
                                                      : "/v1/chat/completions";
    reject("this model gives ", gives(task), " and no ", gives(kind), ": load it with the setting task = ",
           kind.empty() ? "generate" : kind, " if it can, or use another model. Its own requests go to ", routes);
  }
  if (kind.empty()) return;
  const auto& sampling = request.sampling;
  const std::pair<std::string_view, bool> others[] = {
      {"session_id", !request.session_id.empty() || !request.continuation_ids.empty()},
      {"n or best_of", sampling.n > 1 || sampling.best_of > 1},
      {"a guide", request.guide.has_value() || request.mask != nullptr},
      {"prompt_logprobs", sampling.prompt_logprobs >= 0},
      {"resumed", !request.resumed.empty()}};
  for (const auto& [what, sent] : others) {
    if (sent) reject("pooling: it cannot be combined with ", what, ": leave that out");
  }
  const int most = task == "embed" ? model.hidden_units : 0;
  if (request.dimensions >= 0 && request.dimensions <= most) return;
  if (most == 0) reject("dimensions: a score has none, so leave them out");
  reject("dimensions: ", request.dimensions, " is out of range: the embeddings of this model have up to ", most);
}

void MeanRow::add(std::int32_t position, std::span<const float> row) {
  if (position != rows_) {
    throw Error(ErrorCode::internal, cat("a mean got the row of token ", position, ", expected ", rows_));
  }
  ++rows_;
  sums_.resize(row.size());
  for (std::size_t i = 0; i < row.size(); ++i) sums_[i] += double{row[i]};
}

std::vector<float> MeanRow::mean() const {
  std::vector<float> out;
  for (const double sum : sums_) out.push_back(static_cast<float>(sum / rows_));
  return out;
}

std::vector<float> pool(std::span<const float> row, const ModelConfig& model, int dimensions) {
  if (row.empty()) return {};  // from a device that computes nothing
  if (model.model_task == "score") {
    const double logit = model.score_labels == 2 ? double{row[1]} - double{row[0]} : double{row[0]};
    return {static_cast<float>(model.score_sigmoid ? 1 / (1 + std::exp(-logit)) : logit)};
  }
  if (dimensions > 0) row = row.first(static_cast<std::size_t>(dimensions));
  std::vector<float> out(row.begin(), row.end());
  if (!model.normalize_embedding) return out;
  double squares = 0;
  for (const float x : out) squares += double{x} * double{x};
  const double length = std::max(std::sqrt(squares), 1e-12);
  for (float& x : out) x = static_cast<float>(double{x} / length);
  return out;
}

}  // namespace charonia::runtime
