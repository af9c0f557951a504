#include "text/text_stream.h"

#include <algorithm>
#include <utility>

namespace charonia::text {

TextStream::TextStream(const TokenTable& table, std::shared_ptr<const StopWords> stop_words, bool strip_leading_space,
                       std::shared_ptr<const StopWords> stop_until)
    : table_(&table),
      stop_words_(std::move(stop_words)),
      matched_(stop_words_ == nullptr ? 0 : stop_words_->size()),
      stop_until_(std::move(stop_until)),
      until_matched_(stop_until_ == nullptr ? 0 : stop_until_->size()),
      strip_(strip_leading_space && table.strip_leading_space()) {}

std::size_t TextStream::follow(char byte) {
  std::size_t longest = 0;
  for (std::size_t word = 0; word < matched_.size(); ++word) {
    if (stop_words_->push(word, matched_[word], byte)) longest = std::max(longest, stop_words_->length(word));
  }
  return longest;
}

void TextStream::follow_marks(char byte, std::size_t length, std::size_t end) {
  bool whole = false;
  std::size_t longest = 0;  // longest match of all marks, finished or begun
  for (std::size_t mark = 0; mark < until_matched_.size(); ++mark) {
    const bool ends = stop_until_->push(mark, until_matched_[mark], byte);
    longest = std::max<std::size_t>(longest, ends ? stop_until_->length(mark) : until_matched_[mark]);
    whole |= ends;
  }
  if (waiting_) ++waiting_->length;
  if (waiting_ && waiting_->length > longest) {  // the stop word does not lie within a mark
    end_ = waiting_->begin;
  } else if (length > longest) {  // the stop word begins before the mark
    end_ = end - std::min(end, length);
  } else if (length > 0 && !waiting_) {
    waiting_ = {end - std::min(end, length), length};
  }
  if (end_ || whole) waiting_.reset();
  if (!end_ && whole) {
    matched_.clear();
    until_matched_.clear();
  }
}

bool TextStream::push(std::int32_t token, bool match_stop) {
  if (end_) {
    push_silent(token);
    return false;
  }
  if (table_->is_special(token)) {
    for (const char byte : table_->raw_bytes(token)) {
      if (!end_) follow_marks(byte, 0, pending_.size());
    }
  }
  const auto bytes = table_->text_bytes(token);
  const auto begin = pending_.size();
  pending_ += bytes;
  for (std::size_t i = begin; i < pending_.size() && !end_; ++i) {
    if (std::exchange(strip_, false) && pending_[i] == ' ') {
      dropped_ = 1;
      continue;
    }
    utf8_.push(static_cast<unsigned char>(pending_[i]));
    const auto length = follow(pending_[i]);
    follow_marks(pending_[i], match_stop ? length : 0, i + 1);
  }
  held_.push_back({pending_.size(), utf8_.between_characters()});

  // The beginning of a possible stop word never moves back, so each token is examined once.
  std::size_t may_stop = 0;
  for (const auto matched : matched_) may_stop = std::max<std::size_t>(may_stop, matched);
  may_stop = std::min(may_stop, pending_.size());  // it may begin in tokens of skip()
  const auto limit = end_.value_or(std::min(waiting_ ? waiting_->begin : pending_.size(), pending_.size() - may_stop));
  while (examined_ < held_.size() && held_[examined_].end <= limit) {
    if (held_[examined_++].between_characters) settled_ = examined_;
  }
  return end_.has_value();
}

void TextStream::push_silent(std::int32_t token) {
  if (!end_) end_ = waiting_ ? waiting_->begin : pending_.size();
  pending_ += table_->text_bytes(token);
  held_.push_back({pending_.size(), false});
}

TextChunk TextStream::take() { return cut(settled_, settled_ == 0 ? 0 : held_[settled_ - 1].end); }

TextChunk TextStream::finish() {
  return cut(held_.size(), end_.value_or(waiting_ ? waiting_->begin : pending_.size()));
}

TextChunk TextStream::cut(std::size_t num_tokens, std::size_t text_end) {
  TextChunk chunk;
  if (num_tokens == 0) return chunk;
  const auto bytes = held_[num_tokens - 1].end;
  // A special token may come before the dropped space.
  const auto text_begin = bytes == 0 ? 0 : std::exchange(dropped_, 0);
  chunk.num_tokens = static_cast<int>(num_tokens);
  chunk.text_begin = static_cast<int>(text_begin);
  chunk.text_end = static_cast<int>(text_end);
  chunk.text = to_valid_utf8(std::string_view(pending_).substr(text_begin, text_end - text_begin));

  held_.erase(held_.begin(), held_.begin() + static_cast<std::ptrdiff_t>(num_tokens));
  pending_.erase(0, bytes);
  for (auto& token : held_) token.end -= bytes;
  if (end_) *end_ -= std::min(*end_, bytes);
  if (waiting_) waiting_->begin -= std::min(waiting_->begin, bytes);
  settled_ -= std::min(settled_, num_tokens);
  examined_ -= std::min(examined_, num_tokens);
  return chunk;
}

}  // namespace charonia::text
