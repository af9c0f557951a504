// LoRA adapters: loading and unloading while requests run. Any thread.
#include <algorithm>
#include <utility>

#include "base/text.h"
#include "model/adapter_files.h"
#include "runtime/engine_impl.h"
#include "text/utf8.h"

namespace charonia {

void Engine::Impl::load_adapter(const std::string& name, const std::filesystem::path& folder) {
  runtime::check_adapter_name(name, folder, info.model.model_name);
  if (!executor_->takes_adapters()) runtime::refuse_adapter_on(info.device, name);
  const std::lock_guard one(adapters_mutex_);  // one load at a time
  const model::AdapterFiles files(name, folder);
  if (const auto loaded = find_adapter(name)) {
    return runtime::check_same_adapter(files, loaded->digest);
  }
  auto adapter = std::make_shared<runtime::Adapter>();
  adapter->name = name;
  adapter->folder = folder;
  adapter->digest = files.digest();
  adapter->id = ++last_adapter_;
  adapter->max_rank = files.max_rank();
  adapter->ranks = executor_->make_adapter(
      files, (draft_ ? draft_->untouched_bytes() : 0) + (offload_ ? offload_->unfilled_bytes() : 0));
  const std::lock_guard lock(mutex_);
  adapters_.emplace(name, std::move(adapter));
}

bool Engine::Impl::unload_adapter(std::string_view name) {
  std::shared_ptr<const runtime::Adapter> last;  // destroyed after the lock
  const std::lock_guard lock(mutex_);
  const auto found = adapters_.find(name);
  if (found == adapters_.end()) return false;
  last = std::move(found->second);
  adapters_.erase(found);
  return true;
}

std::shared_ptr<const runtime::Adapter> Engine::Impl::find_adapter(std::string_view name) const {
  const std::lock_guard lock(mutex_);
  const auto found = adapters_.find(name);
  return found == adapters_.end() ? nullptr : found->second;
}

std::vector<AdapterInfo> Engine::Impl::adapters() const {
  const std::lock_guard lock(mutex_);
  std::vector<AdapterInfo> out;
  for (const auto& [name, adapter] : adapters_) {
    out.push_back({name, adapter->folder.string(), adapter->fingerprint(), adapter->max_rank, adapter->bytes()});
  }
  return out;
}

std::shared_ptr<const runtime::Adapter> Engine::Impl::adapter_of(const Request& request) const {
  if (request.lora_name.empty()) return nullptr;
  const auto equals = request.lora_name.find('=');
  const auto name = request.lora_name.substr(0, equals);
  if (auto found = find_adapter(name)) {
    if (equals == std::string::npos || request.lora_name.substr(equals + 1) == found->fingerprint()) return found;
    throw Error(ErrorCode::not_found, cat("lora_name = ", text::to_valid_utf8(request.lora_name),
                                          ": the adapter of this name has the fingerprint ", found->fingerprint()));
  }
  throw no_adapter(request.lora_name);
}

Error Engine::Impl::no_adapter(std::string_view name) const {
  std::string all;
  for (const auto& one : adapters()) all += cat(all.empty() ? "" : ", ", one.name);
  return {ErrorCode::not_found, cat("lora_name = ", text::to_valid_utf8(name), ": there is no adapter of this name. ",
                                    all.empty() ? "None is loaded" : cat("Loaded: ", all))};
}

}  // namespace charonia
