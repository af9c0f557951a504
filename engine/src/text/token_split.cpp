#include "text/token_split.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <unordered_set>

#include "base/json_strings.h"
#include "base/text.h"
#include "charonia/error.h"

namespace charonia::text {
namespace {

bool is_letter(char byte) { return (byte >= 'a' && byte <= 'z') || (byte >= 'A' && byte <= 'Z'); }
bool is_ascii(char byte) { return static_cast<unsigned char>(byte) < 0x80; }
bool is_blank(std::string_view text) { return text.find_first_not_of(" \t\n\v\f\r") == std::string_view::npos; }

constexpr std::size_t kAscii = 128;

std::uint64_t key_of(std::int32_t first, std::int32_t second) {
  return static_cast<std::uint64_t>(static_cast<std::uint32_t>(first)) << 32 | static_cast<std::uint32_t>(second);
}

}  // namespace

std::unique_ptr<const TokenSplit> TokenSplit::load(const std::filesystem::path& file, const TokenTable& table,
                                                   std::string& why) {
  if (!std::filesystem::exists(file)) {
    why = cat("there is no ", file.string(), ": convert the model again");
    return nullptr;
  }
  const auto tensors = SafetensorsFile::open(file);
  const auto refuse = [&](std::string_view what) {
    throw Error(ErrorCode::invalid_argument,
                cat(file.string(), " cannot be used: ", what, ". Convert the model again"));
  };
  const auto text_of = [&](std::string_view name) -> const std::string& {
    const auto found = tensors.metadata().find(name);
    if (found == tensors.metadata().end()) refuse(cat("its metadata has no ", name));
    return found->second;
  };
  if (why = text_of("unsupported"); !why.empty()) return nullptr;

  std::unique_ptr<TokenSplit> out(new TokenSplit);
  out->table_ = &table;
  const auto merges = tensors.tensor("merges");
  if (merges.dtype != DType::i32 || merges.shape.size() != 2 || merges.shape[1] != 3) {
    refuse("merges must have the type i32 and the shape [merges, 3]");
  }
  std::vector<std::int32_t> ids(merges.data.size() / sizeof(std::int32_t));
  std::memcpy(ids.data(), merges.data.data(), merges.data.size());
  if (std::ranges::any_of(ids, [&](auto id) { return id < 0 || id >= table.size(); })) {
    refuse(cat("merges has a token id of at least ", table.size()));
  }
  out->merges_.reserve(ids.size() / 3);
  for (std::size_t i = 0; i < ids.size(); i += 3) {
    out->merges_[key_of(ids[i], ids[i + 1])] = {static_cast<std::int32_t>(i / 3), ids[i + 2]};
  }
  try {
    for (const auto& stage : json_strings(text_of("stages"))) {
      out->stages_.emplace_back(stage, std::regex::ECMAScript | std::regex::optimize);
    }
    out->added_ = json_strings(text_of("added"));
  } catch (const std::exception& error) {
    refuse(error.what());
  }
  const bool whole = text_of("ignore_merges") == "1";
  out->of_byte_.assign(256, -1);
  const std::unordered_set<std::string_view> added(out->added_.begin(), out->added_.end());
  for (std::int32_t id = 0; id < table.size(); ++id) {
    const auto bytes = table.raw_bytes(id);
    out->apart_.push_back(table.is_special(id) || added.contains(bytes));
    if (out->apart_.back() || bytes.empty()) continue;
    if (bytes.size() == 1) out->of_byte_[static_cast<unsigned char>(bytes[0])] = id;
    if (whole) out->of_piece_.emplace(bytes, id);
  }
  if (tensors.has("characters")) out->read_sentence_piece(tensors);
  if (std::ranges::any_of(out->of_byte_.begin(), out->of_byte_.begin() + 128, [](auto id) { return id < 0; })) {
    why = "the tokenizer has no token for some byte of ASCII";
    return nullptr;
  }
  return out;
}

void TokenSplit::read_sentence_piece(const SafetensorsFile& tensors) {
  const auto read = [&](std::string_view name, const std::vector<std::int64_t>& shape) {
    const auto tensor = tensors.tensor(name);
    const bool fits = tensor.dtype == DType::i32 && std::ranges::equal(tensor.shape, shape, [](auto is, auto asked) {
                        return asked < 0 || is == asked;
                      });
    std::vector<std::int32_t> values(tensor.data.size() / sizeof(std::int32_t));
    if (fits && !values.empty()) std::memcpy(values.data(), tensor.data.data(), tensor.data.size());
    const auto bound = name == "joined" ? static_cast<std::int32_t>(kAscii) : table_->size();
    if (!fits || std::ranges::any_of(values, [&](auto value) { return value < 0 || value >= bound; })) {
      throw Error(ErrorCode::invalid_argument, cat(tensors.path().string(), " cannot be used: ", name,
                                                   " has a wrong type, shape or range. Convert the model again"));
    }
    return values;
  };
  of_byte_ = read("characters", {static_cast<std::int64_t>(kAscii)});
  of_byte_.resize(256, -1);
  joined_.assign(kAscii * kAscii, false);
  const auto joined = read("joined", {-1, 2});
  for (std::size_t i = 0; i < joined.size(); i += 2) {
    joined_[static_cast<std::size_t>(joined[i]) * kAscii + static_cast<std::size_t>(joined[i + 1])] = true;
  }
}

// Whether the text is split between two ASCII characters in every context. Every known pattern splits between a letter
// and a character that is not a letter.
bool TokenSplit::cuts(char before, char after) const {
  if (joined_.empty()) return is_letter(before) && !is_letter(after);
  return !joined_[static_cast<std::size_t>(before) * kAscii + static_cast<std::size_t>(after)];
}

// The pieces that merges cannot cross, in order; together they are the whole text. They come from the pre-tokenizers,
// or, for SentencePiece, from the cuts.
std::vector<TokenSplit::Piece> TokenSplit::pieces(std::string_view text) const {
  std::vector<Piece> out{{0, text.size()}}, before;
  if (!joined_.empty()) {
    for (std::size_t i = 1; i < text.size(); ++i) {
      if (!cuts(text[i - 1], text[i])) continue;
      out.back().second = i;
      out.emplace_back(i, text.size());
    }
    return out;
  }
  for (const auto& stage : stages_) {
    before.swap(out);
    out.clear();
    for (const auto& [begin, end] : before) {
      auto at = begin;
      const std::cregex_iterator last;
      for (std::cregex_iterator match(text.data() + begin, text.data() + end, stage); match != last; ++match) {
        const auto first = begin + static_cast<std::size_t>(match->position());
        const auto behind = first + static_cast<std::size_t>(match->length());
        if (at < first) out.emplace_back(at, first);
        if (first < behind) out.emplace_back(first, behind);
        at = behind;
      }
      if (at < end) out.emplace_back(at, end);
    }
  }
  return out;
}

// The position where the text may begin to be part of an added token. Added tokens are found before the text is split.
std::size_t TokenSplit::added_begins(std::string_view text) const {
  auto out = text.size();
  for (const auto& added : added_) {
    out = std::min(out, text.find(added));
    for (auto length = std::min(added.size(), text.size()); length > 0; --length) {
      if (!text.ends_with(std::string_view(added).substr(0, length))) continue;
      out = std::min(out, text.size() - length);
      break;
    }
  }
  return out;
}

// Repeatedly joins the adjacent pair with the lowest rank; the leftmost pair first.
void TokenSplit::merge(std::string_view piece, std::vector<std::int32_t>& out) const {
  if (const auto found = of_piece_.find(piece); found != of_piece_.end()) return out.push_back(found->second);
  std::vector<std::int32_t> tokens;
  for (const char byte : piece) tokens.push_back(of_byte_[static_cast<unsigned char>(byte)]);
  while (true) {
    Merge best{std::numeric_limits<std::int32_t>::max(), -1};
    std::size_t place = 0;
    for (std::size_t i = 0; i + 1 < tokens.size(); ++i) {
      const auto found = merges_.find(key_of(tokens[i], tokens[i + 1]));
      if (found == merges_.end() || found->second.rank >= best.rank) continue;
      best = found->second;
      place = i;
    }
    if (best.token < 0) break;
    tokens[place] = best.token;
    tokens.erase(tokens.begin() + static_cast<std::ptrdiff_t>(place) + 1);
  }
  out.insert(out.end(), tokens.begin(), tokens.end());
}

// Following text may extend the last piece. With patterns it may also extend blanks before it, because a piece of
// blanks takes all blanks that follow. A contraction is at most three bytes from its apostrophe. Every other piece of
// the known patterns ends where the next byte cannot belong to it, whatever follows that byte.
std::vector<std::int32_t> TokenSplit::settled(std::string_view text) const {
  constexpr std::size_t kContraction = 3;
  text = text.substr(0, added_begins(text));
  auto all = pieces(text);
  const auto piece = [&](const Piece& one) { return text.substr(one.first, one.second - one.first); };
  if (!joined_.empty()) all.pop_back();
  bool blank = joined_.empty();
  while (!all.empty() && blank) {
    blank = is_blank(piece(all.back()));
    all.pop_back();
    blank = blank && !all.empty() && is_blank(piece(all.back()));
  }
  std::vector<std::int32_t> out;
  for (const auto& one : all) {
    const bool contraction = joined_.empty() && text[one.first] == '\'' && text.size() - one.first < kContraction;
    if (contraction) break;
    merge(piece(one), out);
  }
  return out;
}

std::vector<std::int32_t> TokenSplit::forced(std::span<const std::int32_t> before, std::string_view text) const {
  text = text.substr(0, kMostText);
  text = text.substr(0, static_cast<std::size_t>(std::ranges::find_if_not(text, is_ascii) - text.begin()));
  if (text.empty()) return {};
  // The ASCII text before it, as far back as this function looks.
  auto begin = before.size();
  bool begins = true;
  while (begin > 0) {
    const auto token = before[begin - 1];
    if (token < 0 || token >= table_->size() || apart_[static_cast<std::size_t>(token)]) break;
    const auto bytes = table_->text_bytes(token);
    begins = before.size() - begin < kContext && std::ranges::all_of(bytes, is_ascii);
    if (!begins) break;
    --begin;
  }
  std::string joined;
  std::vector<std::size_t> ends;
  for (const auto token : before.subspan(begin)) ends.push_back((joined += table_->text_bytes(token)).size());
  const auto own = joined.size();
  joined += text;
  joined.resize(std::max(own, added_begins(joined)));  // also removes an added token that begins before the cut
  auto context = before.subspan(begin);
  // SentencePiece may add a space before a text.
  if (!begins || !joined_.empty()) {
    const auto cut =
        std::ranges::find_if(ends, [&](auto end) { return end > 0 && cuts(joined[end - 1], joined[end]); });
    if (cut == ends.end()) return {};
    context = context.subspan(static_cast<std::size_t>(cut - ends.begin()) + 1);
    joined.erase(0, *cut);
  }
  auto out = settled(joined);
  if (out.size() < context.size() || !std::equal(context.begin(), context.end(), out.begin())) return {};
  out.erase(out.begin(), out.begin() + std::ssize(context));
  return out;
}

}  // namespace charonia::text
