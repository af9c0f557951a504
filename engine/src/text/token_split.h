// Splits forced text into the tokenizer's own tokens, for jump-forward decoding. Supports SentencePiece's BPE and
// byte-level BPE with the pre-tokenizers that charonia/text/token_split.py knows. Only ASCII text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <regex>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/safetensors.h"
#include "text/token_table.h"

namespace charonia::text {

class TokenSplit {
 public:
  // Loads token_split.safetensors. Returns null, with the reason in `why`, if the file does not exist or the file says
  // that the split is not supported. Throws Error(invalid_argument) for a damaged file. The table must outlive the
  // split.
  static std::unique_ptr<const TokenSplit> load(const std::filesystem::path& file, const TokenTable& table,
                                                std::string& why);

  // The most tokens of `before` that forced() looks at. If it receives fewer, they must be the whole sequence.
  static constexpr std::size_t kContext = 16;
  // The most bytes of the text that forced() looks at: std::regex recurses as deep as a piece is long.
  static constexpr std::size_t kMostText = 512;

  // The tokens that follow `before` if `text` comes next: the tokens that the tokenizer produces whatever comes after
  // the text. Empty if the tokenizer would have split the earlier text differently. Safe to call from any thread.
  std::vector<std::int32_t> forced(std::span<const std::int32_t> before, std::string_view text) const;

  // The first tokens that are common to the splits of all texts that begin with this one (ASCII).
  std::vector<std::int32_t> settled(std::string_view text) const;

 private:
  using Piece = std::pair<std::size_t, std::size_t>;  // begin, end
  struct Merge {
    std::int32_t rank, token;
  };

  TokenSplit() = default;
  void read_sentence_piece(const SafetensorsFile& tensors);
  bool cuts(char before, char after) const;
  std::vector<Piece> pieces(std::string_view text) const;
  std::size_t added_begins(std::string_view text) const;
  void merge(std::string_view piece, std::vector<std::int32_t>& out) const;

  const TokenTable* table_ = nullptr;
  std::unordered_map<std::uint64_t, Merge> merges_;              // by the two ids
  std::vector<std::int32_t> of_byte_;                            // [256]
  std::unordered_map<std::string_view, std::int32_t> of_piece_;  // pieces that are tokens as a whole and are not merged
  std::vector<std::regex> stages_;
  // [128, 128]: pairs of characters that are adjacent within a token. Empty for byte-level BPE.
  std::vector<bool> joined_;
  std::vector<std::string> added_;
  std::vector<bool> apart_;  // [tokens]: special or added tokens: the text after them is split on its own
};

}  // namespace charonia::text
