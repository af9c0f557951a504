// A LoRA adapter in the format of PEFT: adapter_config.json and adapter_model.safetensors.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "base/safetensors.h"
#include "ops/tensor.h"

namespace charonia::model {

class AdapterFiles {
 public:
  // The change of a module's weight: scale * b a. Views stay valid as long as the AdapterFiles.
  struct Module {
    std::string name;     // as in the model of transformers, such as model.layers.0.self_attn.q_proj
    ops::HostMatrix a, b;  // [rank, in_features], [out_features, rank]
    float scale = 1;
  };

  // Reads and checks the files. name: of the adapter, for errors. Throws Error: invalid_argument for invalid files,
  // unsupported for a feature of PEFT that the engine does not compute, with the key or the tensor and the remedy.
  AdapterFiles(std::string name, std::filesystem::path folder);

  const std::string& name() const { return name_; }
  const std::filesystem::path& folder() const { return folder_; }
  const std::vector<Module>& modules() const { return modules_; }  // at least one
  int max_rank() const;
  // Computes 64 hexadecimal digits: a SHA-256 of all that was read. Equal adapters have the same one.
  std::string digest() const;

  // Throws Error with the adapter's name, its folder and `what`.
  [[noreturn]] void refuse(const std::string& what) const;
  [[noreturn]] void refuse_feature(const std::string& what) const;

 private:
  struct Scales;

  std::string config_text() const;
  Scales read_config(std::string_view text) const;
  void read_modules(const Scales& scales);

  std::string name_;
  std::filesystem::path folder_;
  SafetensorsFile file_;
  std::string config_;
  std::vector<Module> modules_;
};

}  // namespace charonia::model
