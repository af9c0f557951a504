// The methods of speculation: what each of them needs, and whether a model with its settings has it. Models with
// recurrent layers may have each of them; the layer or model that makes drafts must have attention only.
#pragma once

#include <array>
#include <string>
#include <string_view>

#include "charonia/config.h"

namespace charonia::runtime {

struct SpeculativeMethod {
  std::string_view name;      // value of speculative_method
  std::string_view model{};   // what speculative_model names; empty: the method needs none
  bool reads_hidden = false;  // it has a layer that reads the hidden states of the engine's model, on one rank. If it
                              // cannot run, the engine does not start; other methods only cause a warning

  bool has_drafts() const { return reads_hidden || !model.empty(); }  // which runtime/draft_model.h computes
};
inline constexpr std::array kSpeculativeMethods = {
    SpeculativeMethod{.name = "off"},
    SpeculativeMethod{.name = "ngram"},
    SpeculativeMethod{.name = "draft_model", .model = "a small model with the same vocabulary"},
    SpeculativeMethod{.name = "mtp", .reads_hidden = true},
    SpeculativeMethod{.name = "eagle3", .model = "an EAGLE-3 head for this model", .reads_hidden = true},
};
// The method of the settings.
const SpeculativeMethod& method_of(const EngineConfig& config);

// Why steps cannot have proposals (runtime/proposals.h), with the remedy; empty: they can. A model for embeddings or
// scores generates no tokens. config.device must be resolved.
std::string speculation_obstacle(const EngineConfig& config, const ModelConfig& model);

// Whether steps may have proposals.
bool speculates(const EngineConfig& config, const ModelConfig& model);
// The warning that speculative_method has no effect; empty if it has.
std::string speculation_warning(const EngineConfig& config, const ModelConfig& model);

}  // namespace charonia::runtime
