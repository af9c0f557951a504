// The tokenizer's own split of text that is to come, for jump-forward: BPE, byte-level with the pre-tokenizers that
// charonia/text/token_split.py knows, or SentencePiece's. Of ASCII text alone.
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
  // The file token_split.safetensors. Null where it says that the split is not known, or where there is no file: `why`
  // says so. Throws Error(invalid_argument) for a file that is damaged. The table must outlive the split.
  static std::unique_ptr<const TokenSplit> load(const std::filesystem::path& file, const TokenTable& table,
                                                std::string& why);

  // How many of the last tokens forced() looks at, at most. Where it gets fewer, they are all that there are.
  static constexpr std::size_t kContext = 16;
  // How many bytes of the text it looks at: std::regex goes as deep as a piece is long.
  static constexpr std::size_t kMostText = 512;

  // The tokens that follow `before` where `text` comes next: those that the tokenizer would give whatever comes after
  // the text. None where it would have split what is before in another way. From any thread.
  std::vector<std::int32_t> forced(std::span<const std::int32_t> before, std::string_view text) const;

  // The first tokens of the split of all texts that begin with this one, which is ASCII.
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
  std::unordered_map<std::string_view, std::int32_t> of_piece_;  // where pieces that are tokens are not merged
  std::vector<std::regex> stages_;
  std::vector<bool> joined_;  // [128, 128]: two characters that stand side by side in a token. Empty: byte-level
  std::vector<std::string> added_;
  std::vector<bool> apart_;  // [tokens]: special or added, so that what is behind it is split on its own
};

}  // namespace charonia::text
