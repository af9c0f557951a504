#include "model/manifest.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <limits>
#include <numeric>
#include <set>
#include <utility>

#include "base/json.h"
#include "base/safetensors.h"
#include "base/text.h"
#include "charonia/error.h"

namespace charonia::model {
namespace {

using nlohmann::json;

constexpr int kFormatVersion = 3;
constexpr std::string_view kMtp = "mtp.";
// Limit for all tensors of a rank. It exceeds every machine's memory, and byte counts below it do not overflow.
constexpr std::int64_t kMaxElements = std::int64_t{1} << 48;

[[noreturn]] void refuse_folder(const std::filesystem::path& dir, const std::string& what, int ranks) {
  throw Error(ErrorCode::invalid_argument, cat("the workspace at ", dir.string(), " cannot be used: ", what,
                                               ". Create it again with: charonia convert MODEL --dst-path WORKSPACE ",
                                               ranks > 1 ? cat("--tp ", ranks, " ") : "", "--force"));
}

// Describes an invalid value of manifest.json. The caller adds its place in the file.
struct Invalid {
  std::string what;
};

// nlohmann's library would convert fractions and numbers that are too large silently.
template <class T>
T number(const json& value, const char* key) {
  if (value.is_number_integer()) {
    if (value.is_number_unsigned()) {
      if (const auto wide = value.get<std::uint64_t>(); std::in_range<T>(wide)) return static_cast<T>(wide);
    } else if (const auto wide = value.get<std::int64_t>(); std::in_range<T>(wide)) {
      return static_cast<T>(wide);
    }
  }
  throw Invalid{cat(key, " = ", json_text(value), ", expected a whole number from ", std::numeric_limits<T>::min(),
                    " to ", std::numeric_limits<T>::max())};
}

constexpr DType kFloats[] = {DType::f32, DType::f16, DType::bf16};

DType dtype_of(const json& value, std::span<const DType> allowed, const char* expected) {
  const auto type = value.is_string() ? SafetensorsFile::type_named(value.get<std::string>()) : std::nullopt;
  if (!type || std::ranges::find(allowed, *type) == allowed.end()) {
    throw Invalid{cat("dtype = ", json_text(value), ", expected ", expected)};
  }
  return *type;
}

DType dtype_of(const json& value) { return dtype_of(value, kFloats, "F32, F16 or BF16"); }

// A name and the value that it means.
template <class T>
struct Named {
  const char* name;
  T value;
};

template <class T, std::size_t n>
T choice(const json& value, const char* key, const Named<T> (&names)[n]) {
  std::string all;
  for (std::size_t i = 0; i < n; ++i) {
    if (value == names[i].name) return names[i].value;
    all += cat(i == 0 ? "" : i + 1 == n ? " or " : ", ", names[i].name);
  }
  throw Invalid{cat(key, " = ", json_text(value), ", expected ", all)};
}

// A number from `least` to `greatest`, or `otherwise` if the key is absent.
std::int64_t number_in(const json& object, const char* key, std::int64_t least, std::int64_t greatest,
                       std::int64_t otherwise) {
  const auto found = object.find(key);
  if (found == object.end()) return otherwise;
  const auto value = number<std::int64_t>(*found, key);
  if (value < least || value > greatest) {
    throw Invalid{cat(key, " = ", value, ", expected ", least, " to ", greatest)};
  }
  return value;
}

constexpr Named<ops::Code> kCodes[] = {
    {"U4", ops::Code::u4}, {"I8", ops::Code::i8}, {"F8_E4M3", ops::Code::f8_e4m3}, {"F4_E2M1", ops::Code::f4_e2m1}};
constexpr Named<QuantLayout> kLayouts[] = {{"rows", QuantLayout::rows},
                                           {"packed-rows", QuantLayout::packed_rows},
                                           {"awq", QuantLayout::awq},
                                           {"gptq", QuantLayout::gptq},
                                           {"mxfp4", QuantLayout::mxfp4},
                                           {"gguf", QuantLayout::gguf}};
constexpr Named<ops::Activations> kActivations[] = {{"int8-token", ops::Activations::i8_token},
                                                    {"int8-tensor", ops::Activations::i8_tensor},
                                                    {"fp8-token", ops::Activations::f8_token},
                                                    {"fp8-tensor", ops::Activations::f8_tensor}};

// The codes that a layout can store, by their names in the manifest.
std::vector<std::string_view> codes_of(QuantLayout layout) {
  switch (layout) {
    case QuantLayout::rows:
      return {"I8", "F8_E4M3"};
    case QuantLayout::packed_rows:
    case QuantLayout::gptq:
      return {"U4", "I8"};
    case QuantLayout::awq:
      return {"U4"};
    case QuantLayout::mxfp4:
      return {"F4_E2M1"};
    case QuantLayout::gguf:
      return {"U4", "I8", "F4_E2M1"};
    case QuantLayout::rounded:
      break;  // not in a manifest
  }
  return {};
}

// Reads the `quantization` of a tensor.
Quantization quantization_of(const json& value, const json& dtype) {
  if (!value.is_object()) throw Invalid{cat("quantization = ", json_text(value), ", expected an object")};
  Quantization out;
  out.code = choice(dtype, "dtype", kCodes);
  out.layout = choice(value.at("layout"), "layout", kLayouts);
  const auto codes = codes_of(out.layout);
  if (std::ranges::find(codes, dtype.get_ref<const std::string&>()) == codes.end()) {
    throw Invalid{cat("dtype = ", json_text(dtype), " in layout ", to_string(out.layout), ", expected ", codes.front(),
                      codes.size() > 1 ? cat(" or ", codes.back()) : "")};
  }
  constexpr std::int64_t kMxGroup = 32;
  const bool mx = out.layout == QuantLayout::mxfp4;
  out.group_size = number_in(value, "group_size", mx ? kMxGroup : 1, mx ? kMxGroup : kMaxElements, 0);
  if (mx && out.group_size == 0) throw Invalid{"no group_size, expected 32 in layout mxfp4"};
  if (out.layout == QuantLayout::gguf) {
    if (out.group_size == 0) throw Invalid{"no group_size, expected 16 or 32 in layout gguf"};
    out.minimums = value.value("minimums", false);
  }
  out.group_rows = number_in(value, "group_rows", 1, out.layout == QuantLayout::rows ? kMaxElements : 1, 1);
  const bool has_offset = out.layout == QuantLayout::gptq;
  out.zero_offset = static_cast<int>(number_in(value, "zero_offset", has_offset ? 0 : 1, 1, 1));
  if (const auto zeros = value.find("zeros"); zeros != value.end()) {
    const bool can = out.layout == QuantLayout::packed_rows || out.layout == QuantLayout::awq || has_offset;
    if (!zeros->is_boolean() || (zeros->get<bool>() && !can)) {
      throw Invalid{cat("zeros = ", json_text(*zeros),
                        can ? ", expected true or false"
                            : cat(" in layout ", to_string(out.layout), ", expected none: it has no zeros"))};
    }
    out.zeros = zeros->get<bool>();
  }
  if (const auto how = value.find("activations"); how != value.end()) {
    out.activations = choice(*how, "activations", kActivations);
  }
  return out;
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

// Reads an entry of `layers`. An attribute that is absent has its default.
class LayerReader {
 public:
  explicit LayerReader(const json& entry) : entry_(entry) {
    if (!entry.is_object()) throw Invalid{cat("the value ", json_text(entry), ", expected an object")};
  }
  LayerAttributes operator()() {
    LayerAttributes out;
#include "model/generated/layer_keys.inc"
    for (const auto& [key, value] : entry_.items()) {
      if (std::ranges::find(known_, key) != known_.end()) continue;
      throw Invalid{cat(key, " = ", json_text(value), ", which is not an attribute of a layer")};
    }
    return out;
  }

 private:
  void read(const char* key, int& member, int least) {
    known_.emplace_back(key);
    member = static_cast<int>(number_in(entry_, key, least, std::numeric_limits<int>::max(), member));
  }
  void read(const char* key, std::string& member, std::initializer_list<std::string_view> choices) {
    known_.emplace_back(key);
    const auto found = entry_.find(key);
    if (found == entry_.end()) return;
    std::string all;
    for (const auto choice : choices) {
      if (*found == choice) {
        member = choice;
        return;
      }
      all += cat(all.empty() ? "" : ", ", choice);
    }
    throw Invalid{cat(key, " = ", json_text(*found), ", expected one of ", all)};
  }

  const json& entry_;
  std::vector<std::string_view> known_;
};

// Reads the tensors that accompany a quantised part's codes.
template <class FileOf>
void read_side_tensors(const json& part, const Quantization& how, const FileOf& file_of, Manifest::Part& out) {
  constexpr DType kExponents[] = {DType::u8, DType::f8_e8m0}, kWhole[] = {DType::i32};
  const auto read = [&](const char* key, bool there, const std::string& why, std::span<const DType> types,
                        const char* names, bool optional = false) -> std::optional<Manifest::SideTensor> {
    const auto found = part.find(key);
    if (found == part.end()) {
      if (there && !optional) throw Invalid{cat("a part, ", out.name, ", without ", key, ", expected with ", why)};
      return {};
    }
    if (!there) throw Invalid{cat("a part, ", out.name, ", with ", key, ", expected only with ", why)};
    try {
      return Manifest::SideTensor{file_of(*found), found->at("name").template get<std::string>(),
                                  dtype_of(found->at("dtype"), types, names)};
    } catch (const Invalid& invalid) {
      throw Invalid{cat(key, " with ", invalid.what)};
    }
  };
  if (how.layout == QuantLayout::gguf) {
    const auto& type = part.at("type").get_ref<const std::string&>();
    out.block = find_block_type(type);
    if (out.block == nullptr) throw Invalid{cat("type = ", type, ", which is not a quantised type of GGUF")};
    return;
  }
  const bool mx = how.layout == QuantLayout::mxfp4;
  out.scales = mx ? read("scales", true, "a quantisation", kExponents, "U8 or F8_E8M0")
                  : read("scales", true, "a quantisation", kFloats, "F32, F16 or BF16");
  out.zeros = read("zeros", how.zeros, "zeros = true", kWhole, "I32");
  const bool can_have_order = how.layout == QuantLayout::gptq || how.layout == QuantLayout::packed_rows;
  out.order = read("order", can_have_order, "layout gptq or packed-rows", kWhole, "I32", true);
  out.input_scale = read("input_scale", how.has_input_scale(), "activations = int8-tensor or fp8-tensor", kFloats,
                         "F32, F16 or BF16");
}

// Reads `modules` and `module_prefixes`.
void read_modules(const json& manifest, const std::map<std::string, Manifest::Tensor, std::less<>>& tensors,
                  std::string& place, Modules& out) {
  if (const auto prefixes = manifest.find("module_prefixes"); prefixes != manifest.end()) {
    place = "module_prefixes";
    out.prefixes = prefixes->get<std::vector<std::pair<std::string, std::string>>>();
  }
  const auto modules = manifest.find("modules");
  if (modules == manifest.end()) return;
  for (const auto& [name, entries] : modules->items()) {
    place = cat("module ", name);
    for (const auto& entry : entries) {
      ModulePlace one;
      one.tensor = entry.at("tensor").get<std::string>();
      const auto tensor = tensors.find(one.tensor);
      if (tensor == tensors.end()) continue;  // the loader reports it
      one.rank = tensor->second.rank;
      const auto& shape = entry.at("shape");
      one.shape = {number<std::int64_t>(shape.at(0), "shape"), number<std::int64_t>(shape.at(1), "shape")};
      one.rows = range_of(entry, "rows").value_or(std::pair{std::int64_t{0}, one.shape.first});
      one.cols = range_of(entry, "cols").value_or(std::pair{std::int64_t{0}, one.shape.second});
      one.row_step = number_in(entry, "row_step", 1, kMaxElements, 1);
      one.first_row = number_in(entry, "first_row", 0, tensor->second.rows, 0);
      const auto within = [](const auto& range, std::int64_t size) {
        return 0 <= range.first && range.first < range.second && range.second <= size;
      };
      if (!within(one.rows, one.shape.first) || !within(one.cols, one.shape.second)) {
        throw Invalid{cat("a range of tensor ", one.tensor, " that is not within its shape")};
      }
      out.places[name].push_back(std::move(one));
    }
  }
}

// Bytes of codes, scales and zeros in the devices' layouts. Without parts the type of the scales is unknown; the usual
// one is assumed.
std::int64_t quantised_bytes(const Manifest::Tensor& tensor) {
  const auto& how = *tensor.quantization;
  const bool four_bits = ops::bits_of(how.code) == 4;
  const auto groups = tensor.cols / tensor.format().group;
  DType scale = four_bits ? DType::bf16 : DType::f32;
  if (how.layout == QuantLayout::gguf) {
    scale = tensor.parts.empty() ? DType::f32 : tensor.parts.front().block->scale_type;
    for (const auto& part : tensor.parts) scale = part.block->scale_type == scale ? scale : DType::f32;
  } else if (how.layout == QuantLayout::rounded) {
    scale = tensor.dtype;
  } else if (!tensor.parts.empty() && how.layout != QuantLayout::mxfp4) {
    scale = tensor.parts.front().scales->dtype;
  }
  auto group_bytes = static_cast<std::int64_t>(size_of(scale)) + (how.zeros ? 1 : 0);  // a group's scale and zero
  const bool integers = how.code == ops::Code::i8 && (how.activations == ops::Activations::i8_token ||
                                                      how.activations == ops::Activations::i8_tensor);
  if (how.minimums) group_bytes += 4;
  // The CPU's integer GEMMs have a scale, a correction and a zero of 32 bits each (ops/cpu/kernels.h).
  if (integers) group_bytes = how.zeros ? 12 : 8;
  return (tensor.rows * tensor.cols + (four_bits ? 1 : 0)) / (four_bits ? 2 : 1) + tensor.rows * groups * group_bytes;
}

// The only rank that has the tensor; empty: all ranks have it, or parts of it.
std::optional<int> rank_of(const json& entry, int ranks) {
  const auto stored = entry.find("rank");
  if (stored == entry.end()) return std::nullopt;
  const auto rank = number<int>(*stored, "rank");
  if (rank < 0 || rank >= ranks) throw Invalid{cat("rank = ", rank, ", expected 0 to ", ranks - 1)};
  return rank;
}

}  // namespace

ops::QuantFormat Manifest::Tensor::format() const {
  const auto& how = *quantization;
  // If the last group is short, devices use smaller groups (QuantPart::find_groups()).
  const bool whole = how.group_size == 0 || how.group_size >= cols;
  return {.code = how.code,
          .group = whole ? cols : std::gcd(how.group_size, cols),
          .zeros = how.zeros,
          .activations = how.activations,
          .minimums = how.minimums};
}

std::string Manifest::Tensor::shape() const { return vector ? cat("[", rows, "]") : cat("[", rows, ", ", cols, "]"); }

Manifest::Manifest(std::filesystem::path weights_dir, int ranks) : dir_(std::move(weights_dir)), ranks_(ranks) {
  std::ifstream in(dir_ / "manifest.json");
  if (!in) refuse_folder(dir_, "manifest.json is missing", 1);
  std::string place = "manifest.json";
  try {
    const auto manifest = json::parse(in);
    if (const auto version = number<std::int64_t>(manifest.at("format_version"), "format_version");
        version != kFormatVersion) {
      refuse(cat("its format_version is ", version, ", but this engine reads ", kFormatVersion));
    }
    if (const auto stored = number<std::int64_t>(manifest.at("ranks"), "ranks"); stored != ranks) {
      refuse(cat("it was converted for tensor_para_size = ", stored, ", but the setting is now ", ranks));
    }
    std::map<std::string, std::size_t, std::less<>> index;
    for (const auto& [path, entry] : manifest.at("files").items()) {
      place = cat("file ", path);
      index.emplace(path, files_.size());
      const auto tensors = entry.find("tensors");
      files_.push_back({path, number<std::uint64_t>(entry.at("bytes"), "bytes"),
                        tensors == entry.end() ? std::string() : tensors->dump()});
    }
    for (const auto& entry : manifest.at("layers")) {
      place = cat("layer ", layers_.size());
      layers_.push_back(LayerReader(entry)());
    }
    place = "mtp_layers";
    for (const auto& entry : manifest.value("mtp_layers", json::array())) mtp_layers_.push_back(LayerReader(entry)());
    for (const auto& [name, entry] : manifest.at("tensors").items()) {
      place = cat("tensor ", name);
      const bool of_mtp = name.starts_with(kMtp);
      auto& tensor = of_mtp ? mtp_tensors_[name.substr(kMtp.size())] : tensors_[name];
      read_shape(entry.at("shape"), tensor);
      auto& dtype = tensor.dtype;
      if (const auto quantization = entry.find("quantization"); quantization != entry.end()) {
        tensor.quantization = quantization_of(*quantization, entry.at("dtype"));
        dtype = tensor.quantization->codes_dtype();
        if (tensor.vector) {
          throw Invalid{cat("shape = ", tensor.shape(), " and is quantised, expected [rows, columns]")};
        }
      } else {
        dtype = dtype_of(entry.at("dtype"));
      }
      tensor.rank = rank_of(entry, ranks);
      const auto parts = entry.find("parts");
      if (parts == entry.end()) continue;
      const auto file_of = [&](const json& in) {
        const auto& path = in.at("file").get_ref<const std::string&>();
        const auto file = index.find(path);
        if (file == index.end()) throw Invalid{cat("file = ", path, ", which `files` does not list")};
        return file->second;
      };
      for (const auto& part : *parts) {
        auto& added = tensor.parts.emplace_back();
        added.file = file_of(part);
        added.name = part.at("name").get<std::string>();
        added.dtype = dtype;
        added.rows = range_of(part, "rows");
        added.cols = range_of(part, "cols");
        const auto own = part.find("dtype");
        added.row_step = number_in(part, "row_step", 1, kMaxElements, 1);
        if (!tensor.quantization) {
          if (own != part.end()) added.dtype = dtype_of(*own);
          continue;
        }
        if (own != part.end() && *own != entry.at("dtype")) {
          throw Invalid{cat("dtype = ", json_text(*own), " in a part, expected ", json_text(entry.at("dtype")),
                            ": all parts must have the same quantisation")};
        }
        read_side_tensors(part, *tensor.quantization, file_of, added);
      }
    }
    read_modules(manifest, tensors_, place, modules_);
  } catch (const Invalid& invalid) {
    refuse(cat(place, " has ", invalid.what));
  } catch (const json::exception& error) {
    refuse(cat(place, place.ends_with(".json") ? "" : " of manifest.json", " is not valid (", error.what(), ")"));
  }
}

const std::vector<ModulePlace>* Modules::find(const std::string& name) const {
  if (const auto found = places.find(name); found != places.end()) return &found->second;
  for (const auto& [theirs, ours] : prefixes) {
    if (!name.starts_with(theirs)) continue;
    if (const auto found = places.find(ours + name.substr(theirs.size())); found != places.end()) return &found->second;
  }
  return nullptr;
}

std::optional<Manifest> Manifest::mtp() const {
  if (!has_mtp()) return std::nullopt;
  auto out = *this;
  out.layers_ = mtp_layers_;
  out.tensors_ = mtp_tensors_;
  out.modules_ = {};
  out.is_mtp_ = true;
  return out;
}

const Manifest::Tensor& Manifest::tensor(std::string_view name) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) refuse(cat("tensor ", name, " is missing"));
  return found->second;
}

Manifest::Elements Manifest::elements(int rank, bool dense_output) const {
  // The beginning of the names of a layer's experts; empty for other tensors.
  const auto layer_of_expert = [](std::string_view name) {
    const auto at = name.find(".experts.");
    return name.substr(0, at == std::string_view::npos ? 0 : at);
  };
  std::set<std::string_view> layers;  // whose experts are dequantised
  for (const auto& [name, tensor] : tensors_) {
    const bool own = tensor.rank.value_or(rank) == rank && tensor.quantization;
    if (own && ops::cuda_dequantises(tensor.format())) layers.insert(layer_of_expert(name));
  }
  layers.erase("");
  Elements out;
  for (const auto& [name, tensor] : tensors_) {
    if (tensor.rank.value_or(rank) != rank) continue;
    if (name.ends_with(".k_scale.weight") || name.ends_with(".v_scale.weight")) continue;
    // These are dequantised when they are loaded (mla.cpp, WeightLoader::embedding() and unit_rows()).
    const auto has = [&name](std::string_view word) { return name.find(word) != std::string::npos; };
    const bool dequantised = has(".wkv_b.") || has(".wk_b.") || has(".wv_b.") || name.ends_with("_embeddings.weight") ||
                             (dense_output && name.starts_with("output."));
    if (tensor.quantization && !dequantised) {
      const auto bytes = quantised_bytes(tensor);
      out.quantised_bytes += bytes;
      if (ops::cuda_dequantises(tensor.format()) || layers.contains(layer_of_expert(name))) {
        out.dequantised += tensor.rows * tensor.cols;
        out.dequantised_bytes += bytes;
      }
    } else {
      (tensor.vector ? out.vectors : out.matrices) += tensor.rows * tensor.cols;
    }
    if (out.vectors + out.matrices + out.quantised_bytes > kMaxElements) {
      refuse(cat("its tensors up to ", name, " have too many elements"));
    }
  }
  return out;
}

void Manifest::refuse(const std::string& what) const { refuse_folder(dir_, what, ranks_); }

}  // namespace charonia::model
