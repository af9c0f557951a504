#include "text/token_table.h"

#include <cstring>

#include "base/safetensors.h"
#include "base/text.h"
#include "charonia/error.h"

namespace charonia::text {

TokenTable TokenTable::load(const std::filesystem::path& file) {
  const auto refuse = [&](const std::string& what) {
    throw Error(ErrorCode::invalid_argument,
                cat("the token table ", file.string(), " cannot be used: ", what,
                    ". Create it again with: charonia convert MODEL --dst-path WORKSPACE --force"));
  };
  const auto tensors = SafetensorsFile::open(file);
  const auto vector_of = [&](std::string_view name, DType type) {
    const auto tensor = tensors.tensor(name);
    if (tensor.dtype != type || tensor.shape.size() != 1) {
      refuse(cat(name, " must have one dimension and type ", to_string(type), "; it has ", tensor.shape.size(), " and ",
                 to_string(tensor.dtype)));
    }
    return tensor.data;
  };
  const auto offsets = vector_of("offsets", DType::i64);
  const auto bytes = vector_of("bytes", DType::u8);
  const auto special = vector_of("special", DType::u8);

  TokenTable table;
  table.offsets_.resize(offsets.size() / sizeof(std::int64_t));
  if (table.offsets_.size() != special.size() + 1) {
    refuse(cat("it has ", special.size(), " entries in special and ", table.offsets_.size(),
               " in offsets; offsets must have one more than special"));
  }
  std::memcpy(table.offsets_.data(), offsets.data(), offsets.size());
  std::int64_t before = 0;
  for (const auto offset : table.offsets_) {
    if (offset < before) refuse(cat("its offsets are not ascending: ", offset, " follows ", before));
    before = offset;
  }
  if (table.offsets_.front() != 0 || before != static_cast<std::int64_t>(bytes.size())) {
    refuse(
        cat("its offsets go from ", table.offsets_.front(), " to ", before, ", but must go from 0 to ", bytes.size()));
  }
  table.bytes_.assign(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  table.special_.resize(special.size());
  std::memcpy(table.special_.data(), special.data(), special.size());

  const auto strip = tensors.metadata().find("strip_leading_space");
  if (strip == tensors.metadata().end() || (strip->second != "0" && strip->second != "1")) {
    refuse(cat("its metadata strip_leading_space must be 0 or 1, and ",
               strip == tensors.metadata().end() ? "is missing" : cat("is '", strip->second, "'")));
  }
  table.strip_leading_space_ = strip->second == "1";
  return table;
}

TokenTable::TokenTable(std::vector<std::string> tokens, std::vector<std::uint8_t> special, bool strip_leading_space)
    : special_(std::move(special)), strip_leading_space_(strip_leading_space) {
  if (tokens.size() != special_.size()) {
    throw Error(ErrorCode::internal,
                cat("a token table of ", tokens.size(), " tokens with ", special_.size(), " entries in special"));
  }
  offsets_.reserve(tokens.size() + 1);
  offsets_.push_back(0);
  for (const auto& token : tokens) {
    bytes_ += token;
    offsets_.push_back(static_cast<std::int64_t>(bytes_.size()));
  }
}

std::string_view TokenTable::text_bytes(std::int32_t id) const {
  return is_special(id) ? std::string_view{} : raw_bytes(id);
}

std::string_view TokenTable::raw_bytes(std::int32_t id) const {
  if (id < 0 || id >= size()) return {};
  const auto index = static_cast<std::size_t>(id);
  const auto begin = static_cast<std::size_t>(offsets_[index]);
  return std::string_view(bytes_).substr(begin, static_cast<std::size_t>(offsets_[index + 1]) - begin);
}

bool TokenTable::is_special(std::int32_t id) const {
  return id >= 0 && id < size() && special_[static_cast<std::size_t>(id)] != 0;
}

}  // namespace charonia::text
