// Writes the weights folder of a very small random model, for tests of the whole engine.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace charonia::testing {

// The quantisation of the matrices of attention, feed-forward, experts and output. The sizes of ranks' shares must be
// whole groups.
struct TinyQuant {
  std::string layout, dtype;  // as in the manifest
  int group = 16;             // 0: one scale per row
  bool zeros = false;
  bool shuffled = false;   // layout gptq: groups have columns from the whole matrix
  bool as_floats = false;  // the same values, not quantised
  std::string data_type = "fp32";
  std::string activations = {};  // empty: not in the manifest
};

constexpr int kVocab = 40;

struct TinyModel {
  int hidden = 32, inter = 48, layers = 2, heads = 4, kv_heads = 2, head_dim = 8, vocab = kVocab, positions = 256;
  int end_id = 0;
  std::vector<int> special = {};  // special tokens besides end_id
  int labels = 0;  // rows of the output layer, with score_labels in `more`; 0: vocab
  int ranks = 1;  // the weights of each rank are ranges of the whole model, so that any number of ranks gives the same
                  // model
  bool biases = false, tied = false, qk_norm = false, qk_norm_rows = false, pre_norms = true, post_norms = false,
       parallel_block = false;
  int experts = 0, experts_per_token = 2, expert_inter = 24;  // 0 experts: all layers are dense
  // For each layer, and repeated if there are fewer:
  std::string layer_experts = "m";  // with experts (m), if there are any, or dense (d)
  std::vector<int> windows = {0};
  std::vector<std::string> rotations = {"global"};
  std::vector<int> head_dims = {0}, kv_counts = {0}, inters = {0};  // 0: as the model
  std::vector<int> kv_sources = {0};
  std::vector<bool> keys_as_values = {false};
  bool layer_scalars = false, expert_norms = false, expert_scales = false;
  bool mtp = false;                                           // has an MTP layer, like the last layer
  // An EAGLE-3 head for a model of this many hidden units, with one layer and these draft tokens; 0: a model.
  int target_hidden = 0;
  std::vector<std::int64_t> draft_tokens = {};
  bool has_embedding = true;  // of a head
  bool head_norms = false;    // of a head: fused_norm, with the kind in `more`
  int per_layer = 0;                                          // elements of per-layer embeddings
  // Or "short_conv" or "delta_net", then without window and rotation.
  std::vector<std::string> mixers = {"attention"};
  // Of delta nets.
  int k_heads = 2, v_heads = 4, k_dim = 6, v_dim = 10;
  int shared_inter = 0;                                       // of the shared expert; 0: no shared expert
  bool router_bias = false, shared_gate = false, expert_biases = false, sinks = false,
       attention_gate = false;
  std::string kv_scales = "none";                             // or "layer" or "head": the model has scales for FP8
  std::string more;                                           // lines of config.ini
  std::string weight_type = "fp32";                           // unless quantised
  std::optional<TinyQuant> quantised;
  // Changes a value before it is written to a tensor, by canonical name.
  std::function<float(const std::string& name, float value)> change = [](const std::string&, float value) {
    return value;
  };
};

// Token i has the letter 'a' + i % 26; end_id and the tokens of `special` are special.
void write_tiny_workspace(const std::filesystem::path& dir, const TinyModel& model = {});

// A small random head for the model, without every seventh token, and with an embedding of its own. For a model with
// post_norms, it has the norms of EAGLE-3.1.
TinyModel tiny_head(const TinyModel& model);

}  // namespace charonia::testing
