// Writes LoRA adapters in the format of PEFT for models of tiny_workspace.h, and models with merged weights.
#pragma once

#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "base/json.h"
#include "safetensors_writer.h"
#include "tiny_workspace.h"

namespace charonia::testing {

struct TinyAdapter {
  std::map<std::string, std::vector<std::int64_t>> shapes;      // of the modules' weights
  std::map<std::string, std::vector<float>> a, b;               // [rank, in], [out, rank]
  std::map<std::string, int> ranks;
  nlohmann::json config = {{"peft_type", "LORA"}, {"r", 4}, {"lora_alpha", 8}};
  std::map<std::string, std::string> more;  // names of further tensors [1], and the kinds of their values

  // Random matrices for all modules of a weights folder.
  TinyAdapter(const std::filesystem::path& weights, unsigned seed, int first_rank = 3) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0, 0.25F);
    const auto manifest = nlohmann::json::parse(std::ifstream(weights / "manifest.json"));
    for (const auto& [name, places] : manifest.at("modules").items()) {
      shapes[name] = places.at(0).at("shape").get<std::vector<std::int64_t>>();
      const int rank = ranks[name] = first_rank + static_cast<int>(ranks.size()) % 3;
      for (auto n = rank * shapes[name][1]; n > 0; --n) a[name].push_back(normal(random));
      for (auto n = rank * shapes[name][0]; n > 0; --n) b[name].push_back(normal(random));
    }
  }

  float scale(const std::string& name) const {
    return config.at("lora_alpha").get<float>() / static_cast<float>(ranks.at(name));
  }

  void write(const std::filesystem::path& folder) const {
    std::filesystem::create_directories(folder);
    auto written = config;
    if (!config.contains("rank_pattern")) written["rank_pattern"] = ranks;
    std::ofstream(folder / "adapter_config.json") << written.dump();
    SafetensorsWriter out;
    for (const auto& [name, shape] : shapes) {
      const auto at = "base_model.model." + name;
      out.add(at + ".lora_A.weight", {ranks.at(name), shape[1]}, "F32", bytes_of(a.at(name)));
      out.add(at + ".lora_B.weight", {shape[0], ranks.at(name)}, "F32", bytes_of(b.at(name)));
    }
    for (const auto& [name, kind] : more) out.add(name, {1}, kind, bytes_of(std::vector<float>{1}));
    out.write(folder / "adapter_model.safetensors");
  }

  // The model with the merged weights W + scale * B A.
  TinyModel merged(TinyModel model) const {
    model.change = [*this, indices = std::map<std::string, std::int64_t>()](const std::string& name,
                                                                             float value) mutable {
      const auto module = name.substr(0, name.rfind('.'));
      if (!shapes.contains(module) || !name.ends_with(".weight")) return value;
      const auto index = indices[name]++, in = shapes.at(module)[1], rank = std::int64_t{ranks.at(module)};
      double sum = 0;
      for (std::int64_t j = 0; j < rank; ++j) {
        sum += double{b.at(module)[static_cast<std::size_t>(index / in * rank + j)]} *
               a.at(module)[static_cast<std::size_t>(j * in + index % in)];
      }
      return static_cast<float>(value + scale(module) * sum);
    };
    return model;
  }
};

}  // namespace charonia::testing
