#include "tiny_workspace.h"

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/text.h"
#include "quant_files.h"
#include "safetensors_writer.h"

namespace charonia::testing {
namespace {

bool has_experts(const TinyModel& model, std::size_t layer) {
  return model.experts > 0 && model.layer_experts[layer % model.layer_experts.size()] == 'm';
}

// The value of a layer, and `otherwise` instead of 0.
int of_layer(const std::vector<int>& values, std::size_t layer, int otherwise) {
  const int value = values[layer % values.size()];
  return value != 0 ? value : otherwise;
}

const std::string& mixer_of(const TinyModel& model, std::size_t layer) {
  return model.mixers[layer % model.mixers.size()];
}

// Creates the tensors of a model, and writes to the manifest which parts form the canonical tensors of each rank.
class TinyWeights {
 public:
  explicit TinyWeights(const TinyModel& model) : model_(model) {
    if (model.target_hidden > 0) {
      add_head();
      return;
    }
    once("tok_embeddings.weight", model.vocab, model.hidden, 0, 1);
    if (!model.tied) weight("output.weight", model.labels > 0 ? model.labels : model.vocab, model.hidden, 0.5F);
    if (model.labels > 0) stack("output.0.weight", 0, {range("output.weight", "rows", 0, model.labels)});
    for (int rank = 0; rank < (model.labels > 0 ? 0 : model.ranks); ++rank) {
      constexpr int kAlignment = 4;
      const int unit = model.ranks == 1 ? 1 : kAlignment * model.ranks;
      const int share = (model.vocab + unit - 1) / unit * unit / model.ranks;
      const int first = rank * share;
      stack(cat("output.", rank, ".weight"), rank,
            {range(model.tied ? "tok_embeddings.weight" : "output.weight", "rows", first,
                   std::min(share, model.vocab - first))});
    }
    once("norm.weight", model.hidden, 1, 1, 0.1F);
    if (const int columns = model.layers * model.per_layer; columns > 0) {
      once("per_layer_embeddings.weight", model.vocab, columns, 0, 1);
      once("per_layer_projection.weight", columns, model.hidden, 0, 0.5F);
      once("per_layer_projection_norm.weight", model.per_layer, 1, 1, 0.1F);
    }
    for (int i = 0; i < model.layers; ++i) add_layer(i, cat("layers.", i, "."));
    if (!model.mtp) return;
    add_layer(model.layers - 1, "mtp.layers.0.");
    for (const auto* name : {"mtp.norm.weight", "mtp.enorm.weight", "mtp.hnorm.weight"}) {
      once(name, model.hidden, 1, 1, 0.1F);
    }
    weight("mtp.eh_proj.weight", model.hidden, std::int64_t{2} * model.hidden, 0.3F);
    stack("mtp.eh_proj.weight", kEvery, {whole("mtp.eh_proj.weight")});
  }

  const nlohmann::json& tensors() const { return tensors_; }
  std::uintmax_t write(const std::filesystem::path& file) const { return weights_.write(file); }

  // The places of the matrices of layers that adapters can change. A module is a tensor of the file.
  nlohmann::json modules() const {
    auto out = nlohmann::json::object();
    for (const auto& [name, tensor] : tensors_.items()) {
      const auto is = [&](const char* text) { return name.find(text) != std::string::npos; };
      if (!name.starts_with("layers.") || tensor.at("shape").size() < 2 || is(".experts.") || is("w_conv") ||
          is("conv_qkv") || is("feed_forward.gate") || is("shared_gate")) {
        continue;
      }
      std::int64_t row = 0;
      for (const auto& part : tensor.at("parts")) {
        const auto in_file = part.at("name").get<std::string>();
        const auto& size = sizes_.at(in_file);
        const auto rows = part.value("rows", size.at("rows")), cols = part.value("cols", size.at("cols"));
        out[in_file.substr(0, in_file.rfind('.'))].push_back({{"tensor", name},
                                                              {"shape", {size.at("rows")[1], size.at("cols")[1]}},
                                                              {"first_row", row},
                                                              {"rows", rows},
                                                              {"cols", cols}});
        row += rows[1].get<std::int64_t>() - rows[0].get<std::int64_t>();
      }
    }
    return out;
  }

 private:
  static constexpr int kEvery = -1, kConvKernel = 3;

  void tensor(const std::string& name, std::int64_t rows, std::int64_t cols, float mean, float deviation,
              std::vector<std::int64_t> shape = {}) {
    auto values = random_values(name, rows * cols, mean, deviation);
    if (shape.empty()) shape = cols > 1 ? std::vector{rows, cols} : std::vector{rows};
    weights_.add(name, shape, "F32", bytes_of(values));
    sizes_[name] = {{"rows", {0, rows}}, {"cols", {0, cols}}};
  }

  std::vector<float> random_values(const std::string& name, std::int64_t n, float mean, float deviation) {
    std::normal_distribution<float> normal(mean, deviation);
    std::vector<float> values(static_cast<std::size_t>(n));
    for (auto& value : values) value = model_.change(name, normal(random_));
    return values;
  }

  // A matrix, which is quantised if the model is; then it has two dimensions. pair: groups of this number of rows of
  // the two halves alternate in the file.
  void weight(const std::string& name, std::int64_t rows, std::int64_t cols, float deviation,
              std::vector<std::int64_t> shape = {}, std::int64_t pair = 0) {
    if (!model_.quantised) return tensor(name, rows, cols, 0, deviation, std::move(shape));
    const auto& how = *model_.quantised;
    const auto group = how.group == 0 ? cols : how.group;
    auto plain = random_quant(codes_random_, how.dtype, rows, cols, group, how.zeros, deviation, how.shuffled);
    for (auto& scale : plain.scales) scale = model_.change(name, scale);
    sizes_[name] = {{"rows", {0, rows}}, {"cols", {0, cols}}};
    if (how.as_floats) {
      std::vector<float> values;
      for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t c = 0; c < cols; ++c) values.push_back(static_cast<float>(plain.value(r, c)));
      }
      weights_.add(name, {rows, cols}, "F32", bytes_of(values));
      return;
    }
    if (pair != 0) {
      in_turn(plain.codes, cols, pair);
      in_turn(plain.scales, plain.groups(), pair);
    }
    const auto packed = pack(how.layout, plain);
    const auto add = [&](const std::string& to, const FileTensor& from) {
      weights_.add(to, from.shape, from.dtype, from.bytes);
      return nlohmann::json{{"file", "rank-0.safetensors"}, {"name", to}, {"dtype", from.dtype}};
    };
    add(name, packed.codes);
    auto& beside = beside_[name] = {{"scales", add(name + ".scales", packed.scales)}};
    if (packed.zeros) beside["zeros"] = add(name + ".zeros", *packed.zeros);
    if (packed.order) beside["order"] = add(name + ".order", *packed.order);
  }

  // In each 2 * pair rows of a matrix, row i of the first half comes before row i of the second.
  template <class T>
  static void in_turn(std::vector<T>& values, std::int64_t cols, std::int64_t pair) {
    const auto before = values;
    const auto rows = std::ssize(values) / cols;
    for (std::int64_t row = 0; row < rows; ++row) {
      const auto place = row % (2 * pair), to = row - place + 2 * (place % pair) + place / pair;
      std::copy_n(before.begin() + row * cols, cols, values.begin() + to * cols);
    }
  }

  // The parts of a canonical tensor: each is a whole tensor, or `size` of its rows or columns from `first` on.
  static nlohmann::json whole(const std::string& name) { return {{"file", "rank-0.safetensors"}, {"name", name}}; }
  static nlohmann::json range(const std::string& name, const char* dimension, int first, int size) {
    auto part = whole(name);
    part[dimension] = {first, first + size};
    return part;
  }

  // A canonical tensor of a rank; kEvery: all ranks read it.
  void stack(const std::string& name, int rank, std::vector<nlohmann::json> parts) {
    std::int64_t rows = 0, cols = 0;
    bool quantised = false;
    for (auto& part : parts) {
      const auto& all = sizes_.at(part.at("name"));
      const auto size = [&](const char* dimension) {
        const auto ends = part.value(dimension, all.at(dimension));
        return ends[1].get<std::int64_t>() - ends[0].get<std::int64_t>();
      };
      const int step = part.value("row_step", 1);
      rows += (size("rows") + step - 1) / step;
      cols = size("cols");
      if (const auto beside = beside_.find(part.at("name")); beside != beside_.end()) {
        part.update(beside->second);
        quantised = true;
      }
    }
    auto& out = tensors_[name] = {{"dtype", "F32"}, {"parts", parts}};
    if (quantised) {
      const auto& how = *model_.quantised;
      out["dtype"] = how.dtype;
      out["quantization"] = {{"layout", how.layout}, {"zeros", how.zeros}};
      if (how.group != 0) out["quantization"]["group_size"] = how.group;
      if (!how.activations.empty()) out["quantization"]["activations"] = how.activations;
    }
    out["shape"] = cols > 1 ? std::vector{rows, cols} : std::vector{rows};
    if (rank != kEvery) out["rank"] = rank;
  }

  void once(const std::string& name, std::int64_t rows, std::int64_t cols, float mean, float deviation,
            int rank = kEvery) {
    tensor(name, rows, cols, mean, deviation);
    stack(name, rank, {whole(name)});
  }

  void add_head() {
    if (model_.has_embedding) once("tok_embeddings.weight", model_.vocab, model_.hidden, 0, 1);
    weight("output.weight", std::ssize(model_.draft_tokens), model_.hidden, 0.5F);
    stack("output.0.weight", 0, {whole("output.weight")});
    for (const auto* name : {"norm.weight", "enorm.weight", "hnorm.weight"}) once(name, model_.hidden, 1, 1, 0.1F);
    weight("fc.weight", model_.hidden, std::int64_t{3} * model_.target_hidden, 0.1F);
    stack("fc.weight", kEvery, {whole("fc.weight")});
    if (model_.head_norms) once("fused_norm.weight", std::int64_t{3} * model_.target_hidden, 1, 1, 0.1F);
    add_layer(0, "layers.0.");
  }

  void add_layer(int index, const std::string& at) {
    const auto layer = static_cast<std::size_t>(index);
    const bool sparse = has_experts(model_, layer);
    head_dim_ = of_layer(model_.head_dims, layer, model_.head_dim);
    kv_heads_ = of_layer(model_.kv_counts, layer, model_.kv_heads);
    kv_parts_ = of_layer(model_.kv_sources, layer, 0) > 0                             ? 0
                : model_.keys_as_values[layer % model_.keys_as_values.size()] ? 1
                                                                              : 2;
    q_ = model_.heads * head_dim_, kv_ = kv_heads_ * head_dim_;
    const auto& mixer = mixer_of(model_, layer);
    add_norms(at, mixer == "attention");
    if (model_.layer_scalars) once(at + "scalar.weight", 1, 1, 0.9F, 0.1F);
    if (model_.per_layer > 0) {
      once(at + "per_layer.gate.weight", model_.per_layer, model_.hidden, 0, 0.3F);
      once(at + "per_layer.projection.weight", model_.hidden, model_.per_layer, 0, 0.3F);
      once(at + "per_layer_post_norm.weight", model_.hidden, 1, 1, 0.1F);
    }
    if (mixer == "short_conv") {
      add_conv(at + "conv.");
    } else if (mixer == "delta_net") {
      add_delta(at + "delta.");
    } else {
      add_attention(at + "attention.");
    }
    const std::string mlp = at + (sparse ? "feed_forward.shared." : "feed_forward.");
    const int inter = sparse ? model_.shared_inter : of_layer(model_.inters, layer, model_.inter);  // 0: none
    if (sparse) add_experts(at);
    if (inter > 0) {
      weight(mlp + "w1.0.weight", inter, model_.hidden, 0.3F);
      weight(mlp + "w3.0.weight", inter, model_.hidden, 0.3F);
      weight(mlp + "w2.0.weight", model_.hidden, inter, 0.3F);
    }
    if (inter == 0) return;
    if (model_.biases) add_biases(mlp, inter);
    for (int rank = 0; rank < model_.ranks; ++rank) name_shards(mlp, inter, rank);
  }

  // With more ranks than KV heads, several ranks have the same head.
  void add_attention(const std::string& at) {
    const int inputs = model_.target_hidden > 0 ? 2 * model_.hidden : model_.hidden;
    weight(at + "w_qkv.0.weight", q_ + kv_parts_ * kv_, inputs, 0.3F);
    weight(at + "wo.0.weight", model_.hidden, q_, 0.3F);
    if (model_.attention_gate) {
      weight(at + "w_gate.0.weight", q_, model_.hidden, 0.3F);
      if (model_.biases) tensor(at + "w_gate.0.bias", q_, 1, 0, 0.3F);
    }
    if (model_.sinks) once(at + "sinks.weight", model_.heads, 1, 0, 1);
    for (const auto* name : {"k_scale.weight", "v_scale.weight"}) {
      if (model_.kv_scales != "none") once(at + name, model_.kv_scales == "head" ? kv_heads_ : 1, 1, 1, 0.1F);
    }
    if (model_.biases) {
      tensor(at + "w_qkv.0.bias", q_ + kv_parts_ * kv_, 1, 0, 0.3F);
      once(at + "wo.0.bias", model_.hidden, 1, 0, 0.3F, 0);
    }
    const int groups = std::min(model_.ranks, kv_heads_);
    const int q_rows = q_ / model_.ranks, kv_rows = kv_ / groups;
    for (int rank = 0; rank < model_.ranks; ++rank) {
      const int k_first = q_ + rank * groups / model_.ranks * kv_rows;
      for (const std::string kind : {".weight", ".bias"}) {
        if (kind == ".bias" && !model_.biases) continue;
        const std::string qkv = at + "w_qkv.0" + kind;
        std::vector parts = {range(qkv, "rows", rank * q_rows, q_rows)};
        for (int i = 0; i < kv_parts_; ++i) parts.push_back(range(qkv, "rows", k_first + i * kv_, kv_rows));
        stack(cat(at, "w_qkv.", rank, kind), rank, parts);
        if (!model_.attention_gate) continue;
        stack(cat(at, "w_gate.", rank, kind), rank, {range(at + "w_gate.0" + kind, "rows", rank * q_rows, q_rows)});
      }
      stack(cat(at, "wo.", rank, ".weight"), rank, {range(at + "wo.0.weight", "cols", rank * q_rows, q_rows)});
    }
  }

  // The convolution's own weight has three dimensions, as in LFM2.
  void add_conv(const std::string& at) {
    const int hidden = model_.hidden, share = hidden / model_.ranks;
    weight(at + "w_in.0.weight", std::int64_t{3} * hidden, hidden, 0.3F);
    tensor(at + "w_conv.0.weight", hidden, kConvKernel, 0, 0.6F, {hidden, 1, kConvKernel});
    weight(at + "w_out.0.weight", hidden, hidden, 0.3F);
    if (model_.biases) {
      tensor(at + "w_in.0.bias", std::int64_t{3} * hidden, 1, 0, 0.3F);
      tensor(at + "w_conv.0.bias", hidden, 1, 0, 0.3F);
      once(at + "w_out.0.bias", hidden, 1, 0, 0.3F, 0);
    }
    for (int rank = 0; rank < model_.ranks; ++rank) {
      for (const std::string kind : {".weight", ".bias"}) {
        if (kind == ".bias" && !model_.biases) continue;
        std::vector<nlohmann::json> thirds;
        for (int third = 0; third < 3; ++third) {
          thirds.push_back(range(at + "w_in.0" + kind, "rows", third * hidden + rank * share, share));
        }
        stack(cat(at, "w_in.", rank, kind), rank, thirds);
        stack(cat(at, "w_conv.", rank, kind), rank, {range(at + "w_conv.0" + kind, "rows", rank * share, share)});
      }
      stack(cat(at, "w_out.", rank, ".weight"), rank, {range(at + "w_out.0.weight", "cols", rank * share, share)});
    }
  }

  void add_delta(const std::string& at) {
    const int k = model_.k_heads * model_.k_dim, v = model_.v_heads * model_.v_dim, channels = 2 * k + v;
    weight(at + "w_qkvz.0.weight", channels + v, model_.hidden, 0.3F);
    weight(at + "w_ba.0.weight", std::int64_t{2} * model_.v_heads, model_.hidden, 0.3F);
    tensor(at + "conv_qkv.0.weight", channels, kConvKernel, 0, 0.6F, {channels, 1, kConvKernel});
    weight(at + "w_out.0.weight", model_.hidden, v, 0.3F);
    once(at + "a_log.weight", model_.v_heads, 1, -3, 1);
    once(at + "dt_bias.weight", model_.v_heads, 1, 0, 0.3F);
    once(at + "norm.weight", model_.v_dim, 1, 1, 0.1F);
    // A rank has a share of each section of rows.
    const auto share = [&](const char* name, int rank, const std::vector<int>& sections) {
      std::vector<nlohmann::json> parts;
      int first = 0;
      for (const int size : sections) {
        const int mine = size / model_.ranks;
        parts.push_back(range(cat(at, name, ".0.weight"), "rows", first + rank * mine, mine));
        first += size;
      }
      stack(cat(at, name, ".", rank, ".weight"), rank, parts);
    };
    for (int rank = 0; rank < model_.ranks; ++rank) {
      share("w_qkvz", rank, {k, k, v, v});
      share("w_ba", rank, {model_.v_heads, model_.v_heads});
      share("conv_qkv", rank, {k, k, v});
      const int columns = v / model_.ranks;
      stack(cat(at, "w_out.", rank, ".weight"), rank, {range(at + "w_out.0.weight", "cols", rank * columns, columns)});
    }
  }

  void add_norms(const std::string& at, bool has_attention) {
    const bool joins = model_.target_hidden > 0;  // has enorm and hnorm instead
    if (model_.pre_norms && !joins) once(at + "attention_norm.weight", model_.hidden, 1, 1, 0.1F);
    if (model_.pre_norms && !model_.parallel_block) once(at + "ffn_norm.weight", model_.hidden, 1, 1, 0.1F);
    if (model_.post_norms) {
      once(at + "attention_post_norm.weight", model_.hidden, 1, 1, 0.1F);
      once(at + "ffn_post_norm.weight", model_.hidden, 1, 1, 0.1F);
    }
    if (model_.qk_norm && has_attention) {
      once(at + "attention.q_norm.weight", model_.qk_norm_rows ? q_ : head_dim_, 1, 1, 0.1F);
      if (kv_parts_ > 0) once(at + "attention.k_norm.weight", model_.qk_norm_rows ? kv_ : head_dim_, 1, 1, 0.1F);
    }
  }

  // All experts of a layer are one tensor of three dimensions: gate above up, and another one for down. In mxfp4, rows
  // of gate and up alternate, as in GPT-OSS.
  void add_experts(const std::string& at) {
    once(at + "feed_forward.gate.weight", model_.experts, model_.hidden, 0, 0.5F);
    if (model_.expert_scales) once(at + "feed_forward.expert_scales.weight", model_.experts, 1, 1, 0.2F);
    if (model_.expert_norms) {
      for (const auto* name : {"gate_norm", "experts_norm", "experts_post_norm", "shared_post_norm"}) {
        once(cat(at, "feed_forward.", name, ".weight"), model_.hidden, 1, 1, 0.1F);
      }
    }
    if (model_.router_bias) once(at + "feed_forward.gate.bias", model_.experts, 1, 0, 0.2F);
    if (model_.shared_gate) {
      tensor(at + "feed_forward.shared_gate.weight", 1, model_.hidden, 0, 0.5F);
      stack(at + "feed_forward.shared_gate.weight", kEvery, {whole(at + "feed_forward.shared_gate.weight")});
    }
    const int size = model_.expert_inter, share = size / model_.ranks;
    const std::string gate_up = at + "experts.gate_up", downs = at + "experts.down";
    const bool paired = model_.quantised && model_.quantised->layout == "mxfp4" && !model_.quantised->as_floats;
    weight(gate_up, std::int64_t{model_.experts} * 2 * size, model_.hidden, 0.3F,
           {model_.experts, 2 * size, model_.hidden}, paired ? size : 0);
    weight(downs, std::int64_t{model_.experts} * model_.hidden, size, 0.3F, {model_.experts, model_.hidden, size});
    for (int e = 0; e < model_.experts; ++e) {
      for (int rank = 0; rank < model_.ranks; ++rank) {
        const std::string name = cat(at, "feed_forward.experts.", e, "."), end = cat(".", rank, ".weight");
        const int first = 2 * e * size + rank * share * (paired ? 2 : 1);
        auto gate = range(gate_up, "rows", first, paired ? 2 * share - 1 : share);
        auto up = range(gate_up, "rows", first + (paired ? 1 : size), paired ? 2 * share - 1 : share);
        if (paired) gate["row_step"] = up["row_step"] = 2;
        stack(name + "w1" + end, rank, {gate});
        stack(name + "w3" + end, rank, {up});
        auto down = range(downs, "rows", e * model_.hidden, model_.hidden);
        down["cols"] = {rank * share, (rank + 1) * share};
        stack(name + "w2" + end, rank, {down});
      }
    }
    if (model_.expert_biases) add_expert_biases(at);
  }

  // As in GPT-OSS: biases of gate and up alternate, [experts, 2 * inter].
  void add_expert_biases(const std::string& at) {
    const int size = model_.expert_inter, share = size / model_.ranks;
    const std::string gate_up = at + "experts.gate_up_bias", downs = at + "experts.down_bias";
    tensor(gate_up, std::int64_t{model_.experts} * 2 * size, 1, 0, 0.3F, {model_.experts, 2 * size});
    tensor(downs, std::int64_t{model_.experts} * model_.hidden, 1, 0, 0.3F, {model_.experts, model_.hidden});
    for (int e = 0; e < model_.experts; ++e) {
      const std::string name = cat(at, "feed_forward.experts.", e, ".");
      for (int rank = 0; rank < model_.ranks; ++rank) {
        for (int odd = 0; odd < 2; ++odd) {
          auto part = range(gate_up, "rows", 2 * (e * size + rank * share) + odd, 2 * share - 1);
          part["row_step"] = 2;
          stack(cat(name, odd == 0 ? "w1." : "w3.", rank, ".bias"), rank, {part});
        }
      }
      stack(name + "w2.0.bias", 0, {range(downs, "rows", e * model_.hidden, model_.hidden)});
    }
  }

  void add_biases(const std::string& mlp, int inter) {
    tensor(mlp + "w1.0.bias", inter, 1, 0, 0.3F);
    tensor(mlp + "w3.0.bias", inter, 1, 0, 0.3F);
    once(mlp + "w2.0.bias", model_.hidden, 1, 0, 0.3F, 0);
  }

  // Writes the shares of a gated feed-forward: its names begin with `mlp`, and its width is `whole_inter`.
  void name_shards(const std::string& mlp, int whole_inter, int rank) {
    const std::string number = cat(".", rank);
    const int inter = whole_inter / model_.ranks;
    for (const std::string kind : {".weight", ".bias"}) {
      if (kind == ".bias" && !model_.biases) continue;
      for (const auto* name : {"w1", "w3"}) {
        stack(mlp + name + number + kind, rank, {range(mlp + name + ".0" + kind, "rows", rank * inter, inter)});
      }
    }
    stack(mlp + "w2" + number + ".weight", rank, {range(mlp + "w2.0.weight", "cols", rank * inter, inter)});
  }

  const TinyModel& model_;
  // These describe the current layer. kv_parts_: 2 for k and v, 1 for k only, 0 for none.
  int head_dim_ = 0, kv_heads_ = 0, kv_parts_ = 2, q_ = 0, kv_ = 0;
  std::mt19937_64 random_{7};
  std::mt19937 codes_random_{7};
  SafetensorsWriter weights_;
  std::map<std::string, nlohmann::json> sizes_;   // of the file's tensors: rows and cols, each [0, size]
  std::map<std::string, nlohmann::json> beside_;  // of the file's quantised tensors: their side tensors
  nlohmann::json tensors_ = nlohmann::json::object();
};

void write_token_table(const std::filesystem::path& file, const TinyModel& model) {
  SafetensorsWriter table;
  std::vector<std::int64_t> offsets{0};
  std::vector<std::uint8_t> letters, special(static_cast<std::size_t>(model.vocab), 0);
  for (int i = 0; i < model.vocab; ++i) {
    letters.push_back(static_cast<std::uint8_t>('a' + i % 26));
    offsets.push_back(i + 1);
  }
  special[static_cast<std::size_t>(model.end_id)] = 1;
  for (const int id : model.special) special[static_cast<std::size_t>(id)] = 1;
  table.metadata("strip_leading_space", "0");
  table.add("offsets", {model.vocab + 1}, "I64", bytes_of(offsets));
  table.add("bytes", {model.vocab}, "U8", bytes_of(letters));
  table.add("special", {model.vocab}, "U8", bytes_of(special));
  table.write(file);
}

// With the additional lines of a quantised model.
std::string weight_type(const TinyModel& model) {
  if (!model.quantised || model.quantised->as_floats) return model.weight_type;
  const auto& dtype = model.quantised->dtype;
  return cat(dtype == "U4"        ? "int4"
             : dtype == "I8"      ? "int8"
             : dtype == "F8_E4M3" ? "fp8"
                                  : "mxfp4",
             "\ndata_type = ", model.quantised->data_type, "\ngroup_size = ", model.quantised->group);
}

void write_config(const std::filesystem::path& file, const TinyModel& model) {
  // A gated delta net has no biases.
  const bool has_conv_bias = model.biases && std::ranges::find(model.mixers, "delta_net") == model.mixers.end();
  std::ofstream(file) << "[llama]\nmodel_name = tiny\nmodel_family = llama\nhead_num = " << model.heads
                      << "\nkv_head_num = " << model.kv_heads << "\nsize_per_head = " << model.head_dim
                      << "\nhidden_units = " << model.hidden << "\ninter_size = " << model.inter
                      << "\nnum_layer = " << model.layers << "\nvocab_size = " << model.vocab
                      << "\nmax_position_embeddings = " << model.positions << "\nend_id = " << model.end_id
                      << "\nrotary_embedding = " << model.head_dim << "\nattn_bias = " << model.biases
                      << "\nattn_output_bias = " << model.biases << "\nmlp_bias = " << model.biases
                      << "\ntie_word_embeddings = " << model.tied << "\ntensor_para_size = " << model.ranks
                      << "\nweight_type = " << weight_type(model) << "\n"
                      << "qk_norm = " << model.qk_norm << "\nqk_norm_rows = " << model.qk_norm_rows
                      << "\npre_norms = " << model.pre_norms << "\npost_norms = " << model.post_norms
                      << "\nparallel_block = " << model.parallel_block << "\nnum_experts = " << model.experts
                      << "\nexperts_per_token = " << (model.experts > 0 ? model.experts_per_token : 0)
                      << "\nexpert_inter_size = " << (model.experts > 0 ? model.expert_inter : 0)
                      << "\nexpert_bias = " << model.expert_biases << "\nattention_sinks = " << model.sinks
                      << "\nkv_scales = " << model.kv_scales
                      << "\nrouter_bias = " << model.router_bias << "\nconv_kernel = 3\nconv_bias = " << has_conv_bias
                      << "\nattention_gate = " << model.attention_gate << "\ndelta_k_heads = " << model.k_heads
                      << "\ndelta_v_heads = " << model.v_heads << "\ndelta_k_dim = " << model.k_dim
                      << "\ndelta_v_dim = " << model.v_dim
                      << "\nshared_expert_inter_size = " << model.shared_inter
                      << "\nshared_expert_gate = " << model.shared_gate
                      << "\nlayer_scalars = " << model.layer_scalars << "\nexpert_norms = " << model.expert_norms
                      << "\nexpert_scales = " << model.expert_scales
                      << "\nper_layer_embedding = " << model.per_layer
                      << "\nper_layer_vocab_size = " << (model.per_layer > 0 ? model.vocab : 0)
                      << "\ntarget_hidden_units = " << model.target_hidden
                      << "\ndraft_vocab_size = " << model.draft_tokens.size() << "\n"
                      << "cache_block_seq_len = 4\nthreads = 2\nstream_interval_ms = 0\n"
                      << "max_queue_time_s = 0\n"  // unlimited, for a slow machine
                      << model.more;
}

}  // namespace

void write_tiny_workspace(const std::filesystem::path& dir, const TinyModel& model) {
  std::filesystem::create_directories(dir);
  const TinyWeights weights(model);
  const auto bytes = weights.write(dir / "rank-0.safetensors");
  write_token_table(dir / "token_table.safetensors", model);
  if (model.target_hidden > 0) {
    SafetensorsWriter tokens;
    tokens.add("tokens", {std::ssize(model.draft_tokens)}, "I64", bytes_of(model.draft_tokens));
    tokens.write(dir / "draft_tokens.safetensors");
  }
  auto layers = nlohmann::json::array();
  for (std::size_t i = 0; i < static_cast<std::size_t>(model.layers); ++i) {
    const bool attention = mixer_of(model, i) == "attention";
    layers.push_back({{"window", attention ? model.windows[i % model.windows.size()] : 0},
                      {"rotation", attention ? model.rotations[i % model.rotations.size()] : "none"},
                      {"head_size", of_layer(model.head_dims, i, 0)},
                      {"kv_heads", of_layer(model.kv_counts, i, 0)},
                      {"values", model.keys_as_values[i % model.keys_as_values.size()] ? "keys" : "projected"},
                      {"kv_source", of_layer(model.kv_sources, i, 0)},
                      {"inter_size", of_layer(model.inters, i, 0)},
                      {"ffn", has_experts(model, i) ? "experts" : "dense"},
                      {"mixer", mixer_of(model, i)}});
  }
  const auto mtp_layers = model.mtp ? nlohmann::json::array({layers.back()}) : nlohmann::json::array();
  const nlohmann::json manifest = {{"format_version", 3},
                                   {"charonia_version", "test"},
                                   {"source", "random"},
                                   {"ranks", model.ranks},
                                   {"files", {{"rank-0.safetensors", {{"bytes", bytes}, {"sha256", ""}}}}},
                                   {"layers", layers},
                                   {"mtp_layers", mtp_layers},
                                   {"tensors", weights.tensors()},
                                   {"modules", weights.modules()}};
  std::ofstream(dir / "manifest.json") << manifest.dump();
  write_config(dir / "config.ini", model);
}

TinyModel tiny_head(const TinyModel& model) {
  TinyModel out;
  out.hidden = 16, out.inter = 32, out.layers = 1, out.heads = 2, out.kv_heads = 1;
  out.target_hidden = model.hidden;
  out.vocab = model.vocab;
  for (int token = 0; token < model.vocab; ++token) {
    if (token % 7 != 3) out.draft_tokens.push_back(token);
  }
  out.more = cat("target_layers = 0,1,", model.layers - 1, "\n");
  out.head_norms = model.post_norms;
  if (out.head_norms) out.more += "fused_norm = parts\nnorm_output = 1\n";
  return out;
}

}  // namespace charonia::testing
