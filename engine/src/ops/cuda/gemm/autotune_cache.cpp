#include "ops/cuda/gemm/autotune_cache.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <system_error>

#include "base/json.h"
#include "base/text.h"
#include "ops/cuda/gemm/gemm_runner.h"

namespace charonia::cuda {
namespace {

using nlohmann::json;

// Increased when the meaning of a tactic changes, when kernels change so much that old times mislead, or when
// candidates are added, which would not be measured where a choice is stored.
constexpr int kFormat = 7;

// Reads the file's results, {key: {shape: {rows: candidate}}}; empty if the file does not exist.
json read(const std::filesystem::path& path) {
  std::ifstream file(path);
  if (!file) return json::object();
  auto all = json::parse(file, nullptr, false);
  if (!all.is_object() || all["format"] != kFormat || !all["measured"].is_object()) return json::object();
  return all["measured"];
}

json encode(const GemmCandidate& tactic) {
  const auto& own = tactic.own;
  json out{{"microseconds", tactic.microseconds},
           {"own",
            {{"kernel", static_cast<int>(own.kernel)},
             {"tile_rows", own.tile_rows},
             {"tile_columns", own.tile_columns},
             {"stages", own.stages},
             {"k_blocks", own.k_blocks},
             {"sums", static_cast<int>(own.sums)}}}};
  if (tactic.blas)
    out["blas"] = {{"algorithm", tactic.blas->algorithm}, {"workspace_bytes", tactic.blas->workspace_bytes}};
  if (tactic.dequantised_rows > 0) out["dequantised_rows"] = tactic.dequantised_rows;
  if (tactic.integer_rows > 0) out["integer_rows"] = tactic.integer_rows;
  if (tactic.padded_rows > 0) out["padded_rows"] = tactic.padded_rows;
  if (tactic.apart) out["apart"] = true;
  return out;
}

// Throws json::exception if it is not a candidate.
GemmCandidate decode(const json& from) {
  GemmCandidate tactic;
  tactic.microseconds = from.at("microseconds").get<double>();
  const auto& own = from.at("own");
  tactic.own = {static_cast<GemmTactic::Kernel>(own.at("kernel").get<std::uint8_t>()),
                own.at("tile_rows").get<int>(),
                own.at("tile_columns").get<int>(),
                own.at("stages").get<int>(),
                own.at("k_blocks").get<int>(),
                static_cast<GemmTactic::Sums>(own.at("sums").get<std::uint8_t>())};
  if (from.contains("blas")) {
    const auto& blas = from.at("blas");
    const auto words = blas.at("algorithm").get<std::vector<std::uint64_t>>();
    tactic.blas.emplace();
    if (words.size() != tactic.blas->algorithm.size()) throw json::other_error::create(501, "no algorithm", &blas);
    std::copy(words.begin(), words.end(), tactic.blas->algorithm.begin());
    tactic.blas->workspace_bytes = blas.at("workspace_bytes").get<std::size_t>();
  }
  if (from.contains("dequantised_rows")) tactic.dequantised_rows = from.at("dequantised_rows").get<std::int64_t>();
  if (from.contains("integer_rows")) tactic.integer_rows = from.at("integer_rows").get<std::int64_t>();
  if (from.contains("padded_rows")) tactic.padded_rows = from.at("padded_rows").get<std::int64_t>();
  if (from.contains("apart")) tactic.apart = from.at("apart").get<bool>();
  return tactic;
}

}  // namespace

std::filesystem::path autotune_cache_path() {
  constexpr const char* kName = "gemms.json";
  const auto set = [](const char* name) -> const char* {
    const char* const value = std::getenv(name);
    return value != nullptr && *value != '\0' ? value : nullptr;
  };
  if (const char* const folder = set("CHARONIA_CACHE_DIR")) return std::filesystem::path(folder) / kName;
  if (const char* const home = set("HOME")) return std::filesystem::path(home) / ".cache" / "charonia" / kName;
  return {};
}

std::string to_string(const GemmShape& shape) {
  return cat("n ", shape.n, " k ", shape.k, " ", charonia::to_string(shape.type), " -> ",
             charonia::to_string(shape.out_type), shape.quant ? ", " : "",
             shape.quant ? ops::to_string(*shape.quant) : "",
             shape.gate == Gate::none   ? ""
             : shape.gate == Gate::silu ? ", silu gate"
                                        : ", gelu gate",
             shape.ordered ? ", one order" : "");
}

std::string autotune_key(const DeviceInfo& device, const std::string& library, Overlap overlap, bool unproven) {
  constexpr std::array kOverlaps{"off", "early", "late"};
  return cat(device.name, ", sm_", device.major, device.minor, ", ", device.sms, " SMs, ", driver_version(), ", ", library,
             ", overlap ", kOverlaps[static_cast<std::size_t>(overlap)], unproven ? ", unproven kernels" : "");
}

AutotuneCache::AutotuneCache(std::filesystem::path path, std::string key)
    : path_(std::move(path)), key_(std::move(key)) {
  if (path_.empty()) return;
  const auto all = read(path_);
  const auto mine = all.find(key_);
  if (mine == all.end() || !mine->is_object()) return;
  for (const auto& [shape, by_rows] : mine->items()) {
    if (!by_rows.is_object()) continue;
    for (const auto& [rows, tactic] : by_rows.items()) {
      try {
        if (const auto number = parse_number<int>(rows)) known_[{shape, *number}] = decode(tactic);
      } catch (const json::exception&) {  // skip a foreign entry
      }
    }
  }
}

std::optional<GemmCandidate> AutotuneCache::find_named(const std::string& name, int rows) const {
  const auto found = known_.find({name, rows});
  return found == known_.end() ? std::nullopt : std::optional(found->second);
}

void AutotuneCache::keep_named(const std::string& name, int rows, const GemmCandidate& tactic) {
  known_[{name, rows}] = tactic;
  added_[{name, rows}] = tactic;
}

std::string AutotuneCache::save() {
  if (path_.empty() || added_.empty()) return {};
  auto measured = read(path_);
  for (const auto& [place, tactic] : added_) {
    auto& mine = measured[key_];
    if (!mine.is_object()) mine = json::object();
    auto& by_rows = mine[place.first];
    if (!by_rows.is_object()) by_rows = json::object();
    by_rows[std::to_string(place.second)] = encode(tactic);
  }
  added_.clear();

  static std::atomic<int> count{0};
  auto temporary = path_;
  temporary += cat(".", static_cast<int>(getpid()), ".", count++);
  std::error_code error;
  std::filesystem::create_directories(path_.parent_path(), error);
  std::ofstream file(temporary);
  file << json{{"format", kFormat}, {"measured", std::move(measured)}}.dump(1) << '\n';
  file.close();
  const bool written = file.good();
  if (written) {
    std::filesystem::rename(temporary, path_, error);
    if (!error) return {};
  }
  std::error_code ignored;
  std::filesystem::remove(temporary, ignored);
  return cat("the measured times of kernels cannot be written to ", path_.string(),
             "; they will be measured again at the next start. Set CHARONIA_CACHE_DIR to a folder that can be written");
}

}  // namespace charonia::cuda
