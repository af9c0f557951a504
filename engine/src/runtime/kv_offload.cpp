#include "runtime/kv_offload.h"

#include <dlfcn.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <fstream>
#include <iterator>
#include <new>
#include <utility>

#include "base/bytes.h"
#include "base/json.h"
#include "base/log.h"
#include "base/text.h"
#include "charonia/config.h"
#include "charonia/engine.h"
#include "charonia/error.h"
#include "runtime/devices.h"

namespace charonia::runtime {
namespace {

using std::chrono::duration;
using Clock = KvFiles::Clock;

constexpr std::chrono::milliseconds kIdleSlice{20};
// With the patience of KvFiles::close(), less than the time after which `charonia serve` kills a server
// (_KILL_AFTER_S in charonia/serve/launcher.py).
constexpr std::chrono::seconds kFlush{4};
constexpr std::size_t kMostOfferedBlocks = 1 << 16;

std::string content_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// A hash of the library or program that contains the engine, which changes with each build.
const std::string& program() {
  static const std::string digest = [] {
    static const int kHere = 0;
    Dl_info found{};
    const auto content = dladdr(&kHere, &found) == 0 ? std::string() : content_of(found.dli_fname);
    return KvFiles::digest(content.empty() ? content_of("/proc/self/exe") : content);
  }();
  return digest;
}

// Names a file of weights by its checksum. A file without one is where it was, and has not changed.
std::string identity_of_file(const std::filesystem::path& weights_dir, const std::string& name,
                             const nlohmann::json& file) {
  if (auto sum = file.value("sha256", ""); !sum.empty()) return sum;
  const auto path = std::filesystem::weakly_canonical(weights_dir / name);
  struct stat status{};
  ::stat(path.c_str(), &status);
  return cat(path.string(), " ", status.st_size, " ", status.st_mtim.tv_sec, ".", status.st_mtim.tv_nsec);
}

bool in_memory(const EngineConfig& config) { return config.kv_offload_path.empty(); }

std::int64_t size_of(const EngineConfig& config) {
  return parse_bytes(in_memory(config) ? config.kv_offload_memory : config.kv_offload_size).value_or(0);
}

}  // namespace

void check_offload(const EngineConfig& config, std::string_view device, std::int64_t free_bytes,
                   std::vector<std::string>& warnings) {
  const std::string setting = in_memory(config) ? "kv_offload_memory" : "kv_offload_path";
  const auto reject = [&](const std::string& why, ErrorCode code = ErrorCode::unsupported) {
    throw Error(code, cat(setting, " = ", in_memory(config) ? config.kv_offload_memory : config.kv_offload_path, ": ",
                          why, ". Leave ", setting, " empty"));
  };
  if (!in_memory(config) && !config.kv_offload_memory.empty()) {
    reject("kv_offload_memory is set too, and the system keeps files in memory anyway", ErrorCode::invalid_argument);
  }
  if (!in_memory(config) && config.kv_offload_size.empty()) {
    throw Error(ErrorCode::invalid_argument, "kv_offload_size is empty: it must be a size, such as 8GiB");
  }
  if (device == "null") reject("device = null has no KV to store");
  if (!config.enable_prefix_caching) reject("it needs enable_prefix_caching = true");
  if (!in_memory(config)) return;
  if (size_of(config) > free_bytes) {
    throw Error(ErrorCode::resource_exhausted,
                cat("kv_offload_memory = ", config.kv_offload_memory, ", but ",
                    bytes_text(std::max<std::int64_t>(0, free_bytes)),
                    " of host memory are free beside the KV cache: lower it, or free memory"));
  }
  if (device == "cpu") {
    warnings.push_back(cat("kv_offload_memory = ", config.kv_offload_memory, " has little use with device = cpu: the ",
                           "KV cache is in the same memory. Raise cache_max_entry_count or cache_size instead"));
  }
}

std::string kv_identity(const std::filesystem::path& weights_dir, const EngineInfo& info, int max_positions) {
  const auto& config = info.config;
  const auto manifest = nlohmann::json::parse(content_of(weights_dir / "manifest.json"));
  auto out = cat(program(), "\n", kernels_of(config, info.instruction_set), "\nranks ", config.tensor_para_size,
                 "\nblock ", config.cache_block_seq_len, "\nquant_policy ", config.quant_policy, "\nquantization ",
                 config.quantization, "\nrope ", config.rope_scaling_factor, "\nlogn ", config.use_logn_attn,
                 "\nweights ", manifest.value("weights", ""), "\n", manifest.value("layers", nlohmann::json()).dump(),
                 "\n", manifest.value("tensors", nlohmann::json()).dump(), "\n");
  // A GPU without `reproducible` divides attention by the longest sequence.
  if (info.device != "cpu") out += cat("positions ", max_positions, "\n");
  const auto files = manifest.value("files", nlohmann::json::object());
  for (const auto& [name, file] : files.items()) {
    // Keys are token ids, so tables of the tokenizer have no effect. Their checksums differ between equal workspaces.
    if (!name.starts_with("token_")) out += cat(identity_of_file(weights_dir, name, file), "\n");
  }
  const auto stored = read_config_ini(weights_dir / "config.ini");
  for (const auto& field : config_fields()) {
    const auto found = stored.find(std::string(field.key));
    if (field.model_attribute && found != stored.end()) out += cat(field.key, " = ", found->second, "\n");
  }
  return KvFiles::digest(out);
}

// Copies blocks that are read to the device.
class KvOffload::Reader final : public schedule::Load {
 public:
  Reader(KvOffload& offload, KvFiles::PrefixPtr prefix, std::int32_t end, const std::vector<PrefixPart>& parts,
         Clock::time_point until)
      : Load(end, parts), offload_(offload), reading_(offload.files_->read(std::move(prefix), parts)), until_(until) {}

  std::int64_t bytes() const override { return static_cast<std::int64_t>(offload_.block_bytes_[part().kind]); }

 private:
  Next copy(cache::BlockId to) override {
    const auto data = offload_.files_->take(*reading_);
    if (!data || (*data == nullptr && offload_.files_->now() > until_)) return Next::failed;
    if (*data == nullptr) return Next::waits;
    offload_.executor_.write_block(part().kind, to, data->get());
    return Next::copied;
  }

  KvOffload& offload_;
  const std::shared_ptr<KvFiles::Reading> reading_;
  const Clock::time_point until_;
};

KvOffload::KvOffload(const std::filesystem::path& weights_dir, const EngineInfo& info, int max_positions,
                     Executor& executor, const cache::BlockManager& blocks, const LoadTracker& load,
                     KvFiles::Options options, std::vector<std::string>& warnings)
    : block_len_(info.config.cache_block_seq_len),
      block_bytes_(executor.block_bytes()),
      executor_(executor),
      blocks_(blocks),
      load_(load) {
  options.folder = info.config.kv_offload_path;
  options.identity = kv_identity(weights_dir, info, max_positions);
  options.block_len = block_len_;
  options.block_bytes = block_bytes_;
  options.most_bytes = size_of(info.config);
  files_ = KvFiles::open(std::move(options), warnings);
  if (auto warning = size_warning(info); !warning.empty()) warnings.push_back(std::move(warning));
}

std::string KvOffload::size_warning(const EngineInfo& info) const {
  constexpr int kMostPlaces = 3;  // the end of the prompt, a branch, the end of the response
  const auto blocks = (std::int64_t{info.config.session_len} + block_len_ - 1) / block_len_;
  auto bytes = blocks * files_->file_bytes(CacheKind::full);
  for (const auto& kind : blocks_.kinds()) {
    const auto first = first_needed(kind, static_cast<std::int32_t>(blocks));
    bytes += std::min(blocks, kMostPlaces * (blocks - first)) * files_->file_bytes(kind.kind());
  }
  if (size_of(info.config) >= bytes) return {};
  const std::string setting = in_memory(info.config) ? "kv_offload_memory" : "kv_offload_size";
  return cat(setting, " = ", in_memory(info.config) ? info.config.kv_offload_memory : info.config.kv_offload_size,
             " is less than the KV of one request with session_len = ", info.config.session_len, " tokens, ",
             bytes_text(bytes), ": a long prompt is computed again. Raise ", setting, ", or lower session_len");
}

// As far as both were measured. Sometimes it returns true in any case, because the speed of a disk changes.
bool KvOffload::is_faster(std::int64_t tokens, std::int64_t bytes, bool shares) {
  constexpr int kProbe = 16;
  auto seconds = files_->read_s(static_cast<std::size_t>(bytes));
  // Between two steps of other sequences, few bytes are copied.
  if (shares) seconds = std::max(seconds, static_cast<double>(bytes) / kBytesPerStep * load_.step_s());
  const bool faster = seconds * load_.prefill_per_s() <= static_cast<double>(tokens);
  if (!faster && ++skipped_ < kProbe) return false;
  skipped_ = 0;
  return true;
}

// The first block whose unit a sequence reads after this many blocks.
std::int32_t KvOffload::first_needed(const cache::Units& kind, std::int32_t blocks) const {
  return kind.first_needed(blocks * block_len_);
}

// Whether the units are stored that a sequence reads after `end` blocks. It has the units before block `first`.
bool KvOffload::has_units(const KvFiles::Prefix& prefix, std::int32_t first, std::int32_t end) const {
  return std::ranges::all_of(blocks_.kinds(), [&](const cache::Units& kind) {
    for (auto i = end; i-- > std::max(first, first_needed(kind, end));) {
      if (!files_->has(prefix, {kind.kind(), i})) return false;
    }
    return true;
  });
}

schedule::Offload::Found KvOffload::find(const std::string& scope, std::span<const cache::TokenId> tokens,
                                         std::int32_t first, bool shares) {
  // A slow disk may delay a sequence by this many times the time of computing, and by the time below in any case.
  constexpr double kMostRatio = 3, kLeastWait_s = 1, kUnknown_s = 10;
  query_tokens_ += static_cast<std::int64_t>(tokens.size()) - std::int64_t{first} * block_len_;
  auto prefix = files_->prefix(scope, tokens);
  const auto stored = first + static_cast<std::int32_t>(files_->count(*prefix, static_cast<std::size_t>(first)));
  auto end = stored;
  while (end > first && !has_units(*prefix, first, end)) --end;
  Found out{.load = nullptr, .branch = end < stored ? stored : 0};
  if (end == first) return out;
  std::vector<PrefixPart> parts;
  for (std::int32_t i = 0; i < end; ++i) parts.push_back({CacheKind::full, i});
  std::int64_t bytes = (std::int64_t{end} - first) * static_cast<std::int64_t>(block_bytes_.full);
  for (const auto& kind : blocks_.kinds()) {
    for (auto i = std::max(first, first_needed(kind, end)); i < end; ++i) {
      parts.push_back({kind.kind(), i});
      bytes += static_cast<std::int64_t>(block_bytes_[kind.kind()]);
    }
  }
  const auto count = (std::int64_t{end} - first) * block_len_;
  if (!is_faster(count, bytes, shares)) return out;
  files_->use(*prefix, parts);
  parts.erase(parts.begin(), parts.begin() + first);
  const auto per_s = load_.prefill_per_s();
  const auto wait_s = per_s > 0 ? kMostRatio * static_cast<double>(count) / per_s : kUnknown_s;
  const auto until = files_->now() + std::chrono::duration_cast<Clock::duration>(
                                         duration<double>(std::clamp(wait_s, kLeastWait_s, 600.0)));
  out.load = std::make_unique<Reader>(*this, std::move(prefix), end, parts, until);
  return out;
}

void KvOffload::offer(const std::string& scope, std::span<const cache::TokenId> tokens,
                      const std::vector<cache::PrefixNode>& nodes, std::span<const std::int32_t> hit_ends) {
  if (nodes.empty() || offered_blocks_ + nodes.size() > kMostOfferedBlocks) return;
  offered_blocks_ += nodes.size();
  std::vector<PrefixPart> parts;
  for (std::int32_t i = 0; i < std::ssize(nodes); ++i) {
    parts.push_back({CacheKind::full, i});
    for (const auto& kind : blocks_.kinds()) {
      const auto is_read = [&](std::int32_t end) { return i < end && first_needed(kind, end) <= i; };
      if (std::ranges::any_of(hit_ends, is_read)) parts.push_back({kind.kind(), i});
    }
  }
  const auto whole = tokens.first(nodes.size() * static_cast<std::size_t>(block_len_));
  fresh_.push_back({files_->prefix(scope, whole, std::move(parts)), nodes});
}

void KvOffload::settled(bool in_flight) {
  ready_.insert(ready_.end(), std::move_iterator(launched_.begin()), std::move_iterator(launched_.end()));
  launched_ = std::exchange(fresh_, {});
  if (!in_flight && !launched_.empty()) settled(true);
}

cache::BlockId KvOffload::block_of(CacheKind kind, const cache::PrefixNode& node) const {
  if (!blocks_.is_indexed(node)) return -1;
  if (kind == CacheKind::full) return node.block;
  std::size_t k = 0;
  while (blocks_.kinds()[k].kind() != kind) ++k;
  return blocks_.unit_of(k, node);
}

std::int64_t KvOffload::store_next() {
  if (ready_.empty()) return -1;
  auto& [prefix, nodes, next] = ready_.front();
  const auto& parts = prefix->stored;
  for (; next < parts.size(); ++next) {
    const auto part = parts[next];
    if (files_->has(*prefix, part)) continue;
    const auto block = block_of(part.kind, nodes[static_cast<std::size_t>(part.index)]);
    if (block < 0 && part.kind != CacheKind::full) continue;
    if (block < 0) break;  // the blocks after it are not found without it
    if (!files_->has_room()) return -1;
    auto data = std::make_unique_for_overwrite<std::byte[]>(block_bytes_[part.kind]);
    executor_.read_block(part.kind, block, data.get());
    files_->put(prefix, part, std::move(data));
    ++next;
    return files_->file_bytes(part.kind);
  }
  files_->use(*prefix, std::span(parts).first(next));
  offered_blocks_ -= nodes.size();
  ready_.pop_front();
  return 0;
}

void KvOffload::work(bool idle) {
  const auto until = Clock::now() + kIdleSlice;
  try {
    for (auto left = kBytesPerStep; idle ? Clock::now() < until : left > 0;) {
      const auto stored = store_next();
      if (stored < 0) return;
      left -= stored;
    }
  } catch (const std::bad_alloc&) {
    lose("the machine has no more memory");
  }
}

void KvOffload::flush() {
  if (files_->in_memory()) return drop();
  const auto until = Clock::now() + kFlush;
  try {
    settled(false);
    while (!ready_.empty() && Clock::now() < until) {
      if (store_next() < 0 && !ready_.empty() && !files_->wait_for_room(until)) break;
    }
  } catch (const std::exception& error) {  // also of a device that has stopped working
    lose(error.what());
  }
  if (!files_->flush(until)) lose("the disk is slow");
}

void KvOffload::lose(const std::string& why) {
  drop();
  log({LogLevel::warning, cat("KV offload: the last KV was not stored: ", why), "", {}});
}

void KvOffload::drop() {
  for (auto* const offers : {&fresh_, &launched_, &ready_}) offers->clear();
  offered_blocks_ = 0;
}

void KvOffload::forget(const std::string& scope, std::span<const cache::TokenId> tokens, std::size_t known_good) {
  files_->forget(*files_->prefix(scope, tokens), known_good / static_cast<std::size_t>(blocks_.block_len()));
}

}  // namespace charonia::runtime
