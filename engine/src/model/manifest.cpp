#include "model/manifest.h"

#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/json_text.h"
#include "base/safetensors.h"
#include "base/text.h"
#include "charonia/error.h"

namespace charonia::model {
namespace {

using nlohmann::json;

constexpr int kFormatVersion = 2;
// Of all tensors of a rank: far more than a machine has, and few enough that no count of bytes overflows.
constexpr std::int64_t kMaxElements = std::int64_t{1} << 48;

[[noreturn]] void refuse_folder(const std::filesystem::path& dir, const std::string& what, int ranks) {
  throw Error(ErrorCode::invalid_argument, cat("the workspace at ", dir.string(), " cannot be used: ", what,
                                               ". Make it anew with: charonia convert MODEL --dst-path WORKSPACE ",
                                               ranks > 1 ? cat("--tp ", ranks, " ") : "", "--force"));
}

// What is wrong with a value of manifest.json, which the caller says the place of.
struct Invalid {
  std::string what;
};

// nlohmann would convert fractions and numbers that are too large silently.
template <class T>
T number(const json& value, const char* key) {
  if (value.is_number_integer()) {
    if (value.is_number_unsigned()) {
      if (const auto wide = value.get<std::uint64_t>(); std::in_range<T>(wide)) return static_cast<T>(wide);
    } else if (const auto wide = value.get<std::int64_t>(); std::in_range<T>(wide)) {
      return static_cast<T>(wide);
    }
  }
  throw Invalid{cat(key, " = ", json_text(value), ", expected a whole number from ", std::numeric_limits<T>::min(), " to ",
                    std::numeric_limits<T>::max())};
}

DType dtype_of(const json& value) {
  const auto type = value.is_string() ? SafetensorsFile::type_named(value.get<std::string>()) : std::nullopt;
  if (!type || (*type != DType::f32 && *type != DType::f16 && *type != DType::bf16)) {
    throw Invalid{cat("dtype = ", json_text(value), ", expected F32, F16 or BF16")};
  }
  return *type;
}

Manifest::Range range_of(const json& part, const char* key) {
  const auto found = part.find(key);
  if (found == part.end()) return {};
  if (!found->is_array() || found->size() != 2) {
    throw Invalid{cat(key, " = ", json_text(*found), ", expected [begin, end]")};
  }
  return {{number<std::int64_t>((*found)[0], key), number<std::int64_t>((*found)[1], key)}};
}

void read_shape(const json& value, Manifest::Tensor& out) {
  std::int64_t elements = 0;
  if (value.is_array() && (value.size() == 1 || value.size() == 2)) {
    out.vector = value.size() == 1;
    out.rows = number<std::int64_t>(value[0], "shape");
    out.cols = out.vector ? 1 : number<std::int64_t>(value[1], "shape");
    if (out.rows > 0 && out.cols > 0 && !__builtin_mul_overflow(out.rows, out.cols, &elements) &&
        elements <= kMaxElements) {
      return;
    }
  }
  throw Invalid{cat("shape = ", json_text(value), ", expected [rows, columns] or [size], at least 1 each")};
}

}  // namespace

std::string Manifest::Tensor::shape() const { return vector ? cat("[", rows, "]") : cat("[", rows, ", ", cols, "]"); }

std::string Manifest::read(const std::filesystem::path& weights_dir) {
  std::ifstream in(weights_dir / "manifest.json");
  if (!in) refuse_folder(weights_dir, "manifest.json is missing", 1);
  return {std::istreambuf_iterator<char>(in), {}};
}

Manifest::Manifest(std::filesystem::path weights_dir, int ranks)
    : Manifest(weights_dir, ranks, read(weights_dir)) {}

Manifest::Manifest(std::filesystem::path weights_dir, int ranks, const std::string& text)
    : dir_(std::move(weights_dir)), ranks_(ranks) {
  std::string place = "manifest.json";
  try {
    const auto manifest = json::parse(text);
    if (const auto version = number<std::int64_t>(manifest.at("format_version"), "format_version");
        version != kFormatVersion) {
      refuse(cat("its format_version is ", version, ", this engine reads ", kFormatVersion));
    }
    if (const auto stored = number<std::int64_t>(manifest.at("ranks"), "ranks"); stored != ranks) {
      refuse(cat("it was converted for tensor_para_size = ", stored, ", and that is now ", ranks));
    }
    std::map<std::string, std::size_t, std::less<>> index;
    for (const auto& [path, entry] : manifest.at("files").items()) {
      place = cat("file ", path);
      index.emplace(path, files_.size());
      files_.push_back({path, number<std::uint64_t>(entry.at("bytes"), "bytes")});
    }
    for (const auto& [name, entry] : manifest.at("tensors").items()) {
      place = cat("tensor ", name);
      auto& tensor = tensors_[name];
      read_shape(entry.at("shape"), tensor);
      const auto dtype = dtype_of(entry.at("dtype"));
      if (const auto rank = entry.find("rank"); rank != entry.end()) {
        tensor.rank = number<int>(*rank, "rank");
        if (*tensor.rank < 0 || *tensor.rank >= ranks) {
          throw Invalid{cat("rank = ", *tensor.rank, ", expected 0 to ", ranks - 1)};
        }
      }
      const auto parts = entry.find("parts");
      if (parts == entry.end()) continue;
      for (const auto& part : *parts) {
        const auto& path = part.at("file").get_ref<const std::string&>();
        const auto file = index.find(path);
        if (file == index.end()) throw Invalid{cat("file = ", path, ", which `files` does not list")};
        const auto own = part.find("dtype");
        tensor.parts.push_back({file->second, part.at("name").get<std::string>(),
                                own == part.end() ? dtype : dtype_of(*own), range_of(part, "rows"),
                                range_of(part, "cols")});
      }
    }
  } catch (const Invalid& invalid) {
    refuse(cat(place, " has ", invalid.what));
  } catch (const json::exception& error) {
    refuse(cat(place, place.ends_with(".json") ? "" : " of manifest.json", " is not valid (", error.what(), ")"));
  }
}

const Manifest::Tensor& Manifest::tensor(std::string_view name) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) refuse(cat("tensor ", name, " is missing"));
  return found->second;
}

Manifest::Elements Manifest::elements(int rank) const {
  Elements out;
  for (const auto& [name, tensor] : tensors_) {
    if (tensor.rank.value_or(rank) != rank) continue;
    (tensor.vector ? out.vectors : out.matrices) += tensor.rows * tensor.cols;
    if (out.vectors + out.matrices > kMaxElements) refuse(cat("its tensors up to ", name, " have too many elements"));
  }
  return out;
}

void Manifest::refuse(const std::string& what) const { refuse_folder(dir_, what, ranks_); }

}  // namespace charonia::model
