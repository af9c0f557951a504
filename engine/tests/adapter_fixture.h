// An engine with a very small model and LoRA adapters, for tests.
#pragma once

#include <string>
#include <vector>

#include "adapter_folder.h"
#include "base/text.h"
#include "engine_fixture.h"

namespace charonia::testing {

class AdapterFixture : public EngineFixtureBase {
 protected:
  // Writes a model and adapters a, b ... Returns the setting that loads them.
  Settings write(const TinyModel& model, int adapters) const {
    write_tiny_workspace(weights(), model);
    std::string list;
    for (int i = 0; i < adapters; ++i) {
      const std::string name(1, static_cast<char>('a' + i));
      TinyAdapter(weights(), static_cast<unsigned>(i), 1 + 4 * i).write(dir_ / name);
      list += cat(i == 0 ? "" : ",", name, "=", (dir_ / name).string());
    }
    return {{"lora_adapters", list}};
  }
};

// Greedy requests of several lengths with each of the adapters; empty: without one.
inline std::vector<Request> adapter_requests(const std::vector<std::string>& names, int max_tokens = 30) {
  std::vector<Request> out;
  for (const int length : {1, 7, 40}) {
    for (const auto& name : names) {
      std::vector<TokenId> ids;
      for (int i = 0; i < length; ++i) ids.push_back((i * i + 7 * length) % kVocab);
      auto& one = out.emplace_back(request(ids, max_tokens));
      one.sampling.logprobs = 0;
      one.lora_name = name;
    }
  }
  return out;
}

}  // namespace charonia::testing
