#include "tiny_workspace.h"

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <string_view>
#include <vector>

#include "base/text.h"

namespace charonia::testing {
namespace {

// A safetensors file of float tensors.
class SafetensorsWriter {
 public:
  void add(const std::string& name, std::vector<std::int64_t> shape, const std::string& dtype,
           const std::string& bytes) {
    header_[name] = {{"dtype", dtype}, {"shape", shape}, {"data_offsets", {data_.size(), data_.size() + bytes.size()}}};
    data_ += bytes;
  }
  void metadata(const std::string& key, const std::string& value) { header_["__metadata__"][key] = value; }
  std::uintmax_t write(const std::filesystem::path& file) const {
    const std::string header = header_.dump();
    const std::uint64_t size = header.size();
    std::ofstream out(file, std::ios::binary);
    out.write(reinterpret_cast<const char*>(&size), sizeof size);
    out << header << data_;
    out.close();
    return std::filesystem::file_size(file);
  }

 private:
  nlohmann::json header_ = nlohmann::json::object();
  std::string data_;
};

template <class T>
std::string bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

}  // namespace

void write_tiny_workspace(const std::filesystem::path& dir, const TinyModel& model) {
  std::filesystem::create_directories(dir);
  std::mt19937_64 random(7);
  SafetensorsWriter weights;
  nlohmann::json tensors = nlohmann::json::object();
  const auto tensor = [&](const std::string& name, std::int64_t rows, std::int64_t cols, float mean, float deviation,
                          std::vector<std::int64_t> shape = {}) {
    std::normal_distribution<float> normal(mean, deviation);
    std::vector<float> values(static_cast<std::size_t>(rows * cols));
    for (auto& value : values) value = model.change(name, normal(random));
    if (shape.empty()) shape = cols > 1 ? std::vector{rows, cols} : std::vector{rows};
    weights.add(name, shape, "F32", bytes_of(values));
  };
  // The parts of a canonical tensor: each all of a tensor, or `size` of its rows or columns from `first` on.
  const auto whole = [&](const std::string& name) {
    return nlohmann::json{{"file", "rank-0.safetensors"}, {"name", name}};
  };
  const auto range = [&](const std::string& name, const char* dimension, int first, int size) {
    auto part = whole(name);
    part[dimension] = {first, first + size};
    return part;
  };
  const int q = model.heads * model.head_dim, kv = model.kv_heads * model.head_dim;
  const auto once = [&](const std::string& name, std::int64_t rows, std::int64_t cols, float mean, float deviation) {
    tensor(name, rows, cols, mean, deviation);
    tensors[name] = nlohmann::json::array({whole(name)});
  };
  once("tok_embeddings.weight", model.vocab, model.hidden, 0, 1);
  if (!model.tied) once("output.weight", model.vocab, model.hidden, 0, 0.5F);
  once("norm.weight", model.hidden, 1, 1, 0.1F);
  for (int i = 0; i < model.layers; ++i) {
    const std::string at = "layers." + std::to_string(i) + ".";
    once(at + "attention_norm.weight", model.hidden, 1, 1, 0.1F);
    once(at + "ffn_norm.weight", model.hidden, 1, 1, 0.1F);
    if (model.post_norms) {
      once(at + "attention_post_norm.weight", model.hidden, 1, 1, 0.1F);
      once(at + "ffn_post_norm.weight", model.hidden, 1, 1, 0.1F);
    }
    if (model.qk_norm) {
      once(at + "attention.q_norm.weight", model.head_dim, 1, 1, 0.1F);
      once(at + "attention.k_norm.weight", model.head_dim, 1, 1, 0.1F);
    }
    tensor(at + "attention.w_qkv.0.weight", q + 2 * kv, model.hidden, 0, 0.3F);
    tensor(at + "attention.wo.0.weight", model.hidden, q, 0, 0.3F);
    const bool sparse =
        model.experts > 0 && (model.layer_experts.empty() || model.layer_experts[std::size_t(i)] == 'm');
    if (sparse) {
      once(at + "feed_forward.gate.weight", model.experts, model.hidden, 0, 0.5F);
      // All experts of a layer are one tensor of three dimensions: gate and up above one another, and one of downs.
      const std::int64_t size = model.expert_inter;
      const std::string gate_up = at + "experts.gate_up", downs = at + "experts.down";
      tensor(gate_up, model.experts * 2 * size, model.hidden, 0, 0.3F, {model.experts, 2 * size, model.hidden});
      tensor(downs, std::int64_t{model.experts} * model.hidden, size, 0, 0.3F, {model.experts, model.hidden, size});
      const int share = model.expert_inter / model.ranks;
      for (int e = 0; e < model.experts; ++e) {
        for (int rank = 0; rank < model.ranks; ++rank) {
          const std::string name = cat(at, "feed_forward.experts.", e, "."), end = cat(".", rank, ".weight");
          const int first = 2 * e * model.expert_inter + rank * share;
          tensors[name + "w1" + end] = nlohmann::json::array({range(gate_up, "rows", first, share)});
          tensors[name + "w3" + end] =
              nlohmann::json::array({range(gate_up, "rows", first + model.expert_inter, share)});
          auto down = range(downs, "rows", e * model.hidden, model.hidden);
          down["cols"] = {rank * share, (rank + 1) * share};
          tensors[name + "w2" + end] = nlohmann::json::array({down});
        }
      }
    } else {
      tensor(at + "feed_forward.w1.0.weight", model.inter, model.hidden, 0, 0.3F);
      tensor(at + "feed_forward.w3.0.weight", model.inter, model.hidden, 0, 0.3F);
      tensor(at + "feed_forward.w2.0.weight", model.hidden, model.inter, 0, 0.3F);
    }
    const auto kinds =
        model.biases ? std::vector<std::string>{".weight", ".bias"} : std::vector<std::string>{".weight"};
    if (model.biases) {
      tensor(at + "attention.w_qkv.0.bias", q + 2 * kv, 1, 0, 0.3F);
      tensor(at + "attention.wo.0.bias", model.hidden, 1, 0, 0.3F);
      if (!sparse) {
        tensor(at + "feed_forward.w1.0.bias", model.inter, 1, 0, 0.3F);
        tensor(at + "feed_forward.w3.0.bias", model.inter, 1, 0, 0.3F);
        tensor(at + "feed_forward.w2.0.bias", model.hidden, 1, 0, 0.3F);
      }
    }
    // With more ranks than KV heads several have the same one.
    const int groups = std::min(model.ranks, model.kv_heads), inter = model.inter / model.ranks;
    for (int rank = 0; rank < model.ranks; ++rank) {
      const std::string number = cat(".", rank);
      const int q_rows = q / model.ranks, kv_rows = kv / groups, k_first = q + rank * groups / model.ranks * kv_rows;
      for (const auto& kind : kinds) {
        const std::string qkv = at + "attention.w_qkv.0" + kind;
        tensors[at + "attention.w_qkv" + number + kind] = {range(qkv, "rows", rank * q_rows, q_rows),
                                                           range(qkv, "rows", k_first, kv_rows),
                                                           range(qkv, "rows", k_first + kv, kv_rows)};
        if (sparse) continue;
        for (const auto* name : {"feed_forward.w1", "feed_forward.w3"}) {
          tensors[at + name + number + kind] =
              nlohmann::json::array({range(at + name + ".0" + kind, "rows", rank * inter, inter)});
        }
      }
      tensors[at + "attention.wo" + number + ".weight"] =
          nlohmann::json::array({range(at + "attention.wo.0.weight", "cols", rank * q_rows, q_rows)});
      if (sparse) continue;
      tensors[at + "feed_forward.w2" + number + ".weight"] =
          nlohmann::json::array({range(at + "feed_forward.w2.0.weight", "cols", rank * inter, inter)});
    }
    if (model.biases) {
      for (const auto* name : {"attention.wo.0.bias", "feed_forward.w2.0.bias"}) {
        if (sparse && std::string_view(name).starts_with("feed_forward")) continue;
        tensors[at + name] = nlohmann::json::array({whole(at + name)});
      }
    }
  }
  const auto bytes = weights.write(dir / "rank-0.safetensors");

  SafetensorsWriter table;
  std::vector<std::int64_t> offsets{0};
  std::vector<std::uint8_t> letters, special(static_cast<std::size_t>(model.vocab), 0);
  for (int i = 0; i < model.vocab; ++i) {
    letters.push_back(static_cast<std::uint8_t>('a' + i % 26));
    offsets.push_back(i + 1);
  }
  special[static_cast<std::size_t>(model.end_id)] = 1;
  table.metadata("strip_leading_space", "0");
  table.add("offsets", {model.vocab + 1}, "I64", bytes_of(offsets));
  table.add("bytes", {model.vocab}, "U8", bytes_of(letters));
  table.add("special", {model.vocab}, "U8", bytes_of(special));
  table.write(dir / "token_table.safetensors");

  const nlohmann::json manifest = {{"format_version", 1},
                                   {"charonia_version", "test"},
                                   {"source", "random"},
                                   {"ranks", model.ranks},
                                   {"files", {{"rank-0.safetensors", {{"bytes", bytes}, {"sha256", ""}}}}},
                                   {"tensors", tensors}};
  std::ofstream(dir / "manifest.json") << manifest.dump();
  std::ofstream(dir / "config.ini") << "[llama]\nmodel_name = tiny\nmodel_family = llama\nhead_num = " << model.heads
                                    << "\nkv_head_num = " << model.kv_heads << "\nsize_per_head = " << model.head_dim
                                    << "\nhidden_units = " << model.hidden << "\ninter_size = " << model.inter
                                    << "\nnum_layer = " << model.layers << "\nvocab_size = " << model.vocab
                                    << "\nmax_position_embeddings = " << model.positions
                                    << "\nend_id = " << model.end_id << "\nrotary_embedding = " << model.head_dim
                                    << "\nattn_bias = " << model.biases << "\nattn_output_bias = " << model.biases
                                    << "\nmlp_bias = " << model.biases << "\ntie_word_embeddings = " << model.tied
                                    << "\ntensor_para_size = " << model.ranks << "\nweight_type = fp32\n"
                                    << "qk_norm = " << model.qk_norm << "\npost_norms = " << model.post_norms
                                    << "\nnum_experts = " << model.experts
                                    << "\nexperts_per_token = " << (model.experts > 0 ? model.experts_per_token : 0)
                                    << "\nexpert_inter_size = " << (model.experts > 0 ? model.expert_inter : 0)
                                    << "\nlayer_experts = " << model.layer_experts << "\n"
                                    << "cache_block_seq_len = 4\nthreads = 2\nstream_interval_ms = 0\n"
                                    << "max_queue_time_s = 0\n"  // however long a busy machine takes
                                    << model.more;
}

}  // namespace charonia::testing
