#include "model/weights.h"

#include <array>
#include <cstring>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>

#include "base/text.h"
#include "charonia/error.h"

namespace charonia::model {
namespace {

constexpr int kFormatVersion = 1;

[[noreturn]] void refuse(const std::filesystem::path& dir, const std::string& what, int ranks = 1) {
  throw Error(ErrorCode::invalid_argument, cat("the workspace at ", dir.string(), " cannot be used: ", what,
                                               ". Make it anew with: charonia convert MODEL --dst-path WORKSPACE ",
                                               ranks > 1 ? cat("--tp ", ranks, " ") : "", "--force"));
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string out = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) out += cat(i == 0 ? "" : ", ", shape[i]);
  return out + "]";
}

// Unaligned: a file's data may begin anywhere.
template <class T>
T read(const std::byte* data) {
  T out;
  std::memcpy(&out, data, sizeof out);
  return out;
}

// [begin, end) of a dimension, or nothing for all of it.
WeightFiles::Range range_of(const nlohmann::json& part, const char* key) {
  const auto found = part.find(key);
  if (found == part.end()) return {};
  const auto ends = found->get<std::array<std::int64_t, 2>>();
  return {{ends[0], ends[1]}};
}

}  // namespace

ops::HostMatrix WeightFiles::view(std::string_view name, const Part& part) const {
  const auto tensor = part.file->tensor(part.name);
  const auto dimensions = tensor.shape.size();
  if (dimensions < 1 || dimensions > 3) {
    refuse(dir_, cat("tensor ", name, " (", part.name, ") has shape ", shape_text(tensor.shape)));
  }
  const std::int64_t rows = tensor.shape[0] * (dimensions == 3 ? tensor.shape[1] : 1);
  const std::int64_t cols = dimensions == 1 ? 1 : tensor.shape.back();
  const auto [first_row, last_row] = part.rows.value_or(std::pair{std::int64_t{0}, rows});
  const auto [first_col, last_col] = part.cols.value_or(std::pair{std::int64_t{0}, cols});
  const auto within = [](std::int64_t begin, std::int64_t end, std::int64_t size) {
    return 0 <= begin && begin < end && end <= size;
  };
  if (!within(first_row, last_row, rows) || !within(first_col, last_col, cols)) {
    refuse(dir_, cat("tensor ", name, " is rows [", first_row, ", ", last_row, ") and columns [", first_col, ", ",
                     last_col, ") of ", part.name, ", which has shape ", shape_text(tensor.shape)));
  }
  const auto first = static_cast<std::size_t>(first_row * cols + first_col) * size_of(tensor.dtype);
  return {tensor.data.data() + first, tensor.dtype, last_row - first_row, last_col - first_col, cols};
}

std::string WeightFiles::read_manifest(const std::filesystem::path& weights_dir) {
  std::ifstream in(weights_dir / "manifest.json");
  if (!in) refuse(weights_dir, "manifest.json is missing");
  return {std::istreambuf_iterator<char>(in), {}};
}

WeightFiles::WeightFiles(const std::filesystem::path& weights_dir, int ranks, const std::string& text, bool all_files)
    : dir_(weights_dir) {
  try {
    const auto manifest = nlohmann::json::parse(text);
    if (const int version = manifest.at("format_version").get<int>(); version != kFormatVersion) {
      refuse(dir_, cat("its format_version is ", version, ", this engine reads ", kFormatVersion));
    }
    if (const int stored = manifest.at("ranks").get<int>(); stored != ranks) {
      refuse(dir_, cat("it was converted for tensor_para_size = ", stored, ", and that is now ", ranks), ranks);
    }
    std::set<std::string> needed;
    for (const auto& parts : manifest.at("tensors")) {
      for (const auto& part : parts) needed.insert(part.at("file").get<std::string>());
    }
    for (const auto& [name, entry] : manifest.at("files").items()) {
      if (!all_files && !needed.contains(name)) continue;
      const std::filesystem::path path = dir_ / name;  // an absolute name replaces dir_
      std::error_code error;
      const auto bytes = std::filesystem::file_size(path, error);
      if (error) refuse(dir_, cat("its file ", path.string(), " is missing"));
      if (const auto expected = entry.at("bytes").get<std::uintmax_t>(); bytes != expected) {
        refuse(dir_, cat("its file ", path.string(), " has ", bytes, " bytes where ", expected, " were written"));
      }
      files_.emplace(name, std::make_unique<SafetensorsFile>(SafetensorsFile::open(path)));
    }
    for (const auto& [name, parts] : manifest.at("tensors").items()) {
      auto& list = tensors_[name];
      for (const auto& part : parts) {
        const auto file = files_.find(part.at("file").get<std::string>());
        if (file == files_.end()) refuse(dir_, cat("tensor ", name, " is in a file that manifest.json does not list"));
        list.push_back(
            {file->second.get(), part.at("name").get<std::string>(), range_of(part, "rows"), range_of(part, "cols")});
      }
    }
  } catch (const nlohmann::json::exception& error) {
    refuse(dir_, cat("manifest.json is not valid (", error.what(), ")"));
  }
}

bool WeightFiles::has(std::string_view name) const { return tensors_.contains(name); }

std::vector<ops::HostMatrix> WeightFiles::get(std::string_view name, std::int64_t rows, std::int64_t cols) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) refuse(dir_, cat("tensor ", name, " is missing"));
  std::vector<ops::HostMatrix> parts;
  std::int64_t stacked = 0;
  for (const auto& part : found->second) {
    parts.push_back(view(name, part));
    stacked += parts.back().rows;
    if (parts.back().cols != cols) {
      refuse(dir_, cat("tensor ", name, " (", part.name, ") has ", parts.back().cols, " columns, expected ", cols));
    }
  }
  if (stacked != rows) refuse(dir_, cat("tensor ", name, " has ", stacked, " rows, expected ", rows));
  return parts;
}

void WeightFiles::drop_pages() const {
  for (const auto& [name, file] : files_) file->drop_pages();
}

std::vector<float> WeightFiles::get_vector(std::string_view name, std::int64_t n) const {
  std::vector<float> out;
  out.reserve(static_cast<std::size_t>(n));
  for (const auto& part : get(name, n, 1)) {
    for (std::int64_t i = 0; i < part.rows; ++i) {
      switch (part.dtype) {
        case DType::f32:
          out.push_back(read<float>(part.row(i)));
          break;
        case DType::bf16:
          out.push_back(bf16_to_float(read<std::uint16_t>(part.row(i))));
          break;
        case DType::f16:
          out.push_back(f16_to_float(read<std::uint16_t>(part.row(i))));
          break;
        default:
          refuse(dir_, cat("tensor ", name, " has type ", to_string(part.dtype), ", expected a float type"));
      }
    }
  }
  return out;
}

}  // namespace charonia::model
