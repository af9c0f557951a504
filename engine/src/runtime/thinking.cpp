#include "runtime/thinking.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "base/text.h"
#include "charonia/error.h"

namespace charonia::runtime {
namespace {

constexpr std::string_view kRecipient = "to=";

bool is_space(std::int32_t unit) { return unit == ' ' || unit == '\t' || unit == '\r' || unit == '\n'; }

}  // namespace

void Thinking::append_units(const text::TokenTable& table, TokenId token, std::vector<Unit>& to) {
  if (table.is_special(token)) to.push_back(kSpecial + token);
  for (const auto byte : table.text_bytes(token)) to.push_back(static_cast<unsigned char>(byte));
}

std::vector<Thinking::Unit> Thinking::units_of(const text::TokenTable& table, std::span<const TokenId> ids) {
  std::vector<Unit> out;
  for (const auto id : ids) append_units(table, id, out);
  out.erase(out.begin(), std::ranges::find_if_not(out, is_space));
  return out;
}

// The tokens that may begin to spell `word` after white space.
std::vector<TokenId> Thinking::beginnings(const text::TokenTable& table, std::string_view word) {
  std::vector<TokenId> out;
  for (TokenId token = 0; token < table.size(); ++token) {
    auto text = table.text_bytes(token);
    text.remove_prefix(static_cast<std::size_t>(std::ranges::find_if_not(text, is_space) - text.begin()));
    const bool is_longer = text.size() > word.size();
    if (text.empty() || (is_longer && !is_space(text[word.size()]))) continue;
    if (is_longer ? text.starts_with(word) : word.starts_with(text)) out.push_back(token);
  }
  return out;
}

Thinking::Rules::Rules(const SamplingParams& sampling, const text::TokenTable& vocabulary)
    : table(vocabulary), begin_ids(sampling.thinking_begin_ids), end_ids(sampling.thinking_end_ids),
      call_ids(sampling.thinking_call_ids), begin(units_of(table, begin_ids)), end(units_of(table, end_ids)) {
  const auto is_word = [](Unit unit) { return unit < kSpecial && !is_space(unit); };
  is_header = begin.size() > 2 && begin.front() >= kSpecial && begin.back() >= kSpecial &&
              std::all_of(begin.begin() + 1, begin.end() - 1, is_word) && table.is_special(end_ids.front());
  const auto check = [](std::string_view name, const std::vector<TokenId>& ids, const std::vector<Unit>& units) {
    if (ids.empty() || !units.empty()) return;
    throw Error(ErrorCode::invalid_argument, cat(name, " has only tokens of white space or without text, such as ",
                                                 ids.front(), ". Send the tokens of a mark"));
  };
  check("thinking_begin_ids", begin_ids, begin);
  check("thinking_end_ids", end_ids, end);
  const std::array marks{&call_begin, &call_end, &quote_begin, &quote_end};
  for (std::size_t i = 0; i < call_ids.size(); ++i) {
    *marks[i] = units_of(table, call_ids[i]);
    check("thinking_call_ids", call_ids[i], *marks[i]);
  }
  if (is_header) {
    banned = beginnings(table, std::string(begin.begin() + 1, begin.end() - 1));
    end.resize(1);
  } else if (begin_ids.size() == 1 || (!begin_ids.empty() && table.is_special(begin_ids.front()))) {
    banned = {begin_ids.front()};
  }
}

std::shared_ptr<const Thinking::Rules> ThinkingRules::of(const SamplingParams& sampling) {
  const std::lock_guard lock(mutex_);
  if (!last_ || last_->begin_ids != sampling.thinking_begin_ids || last_->end_ids != sampling.thinking_end_ids ||
      last_->call_ids != sampling.thinking_call_ids) {
    last_ = std::make_shared<Thinking::Rules>(sampling, table_);
  }
  return last_;
}

Thinking::Thinking(const SamplingParams& sampling, std::shared_ptr<const Rules> rules)
    : rules_(std::move(rules)),
      budget_(*sampling.thinking_budget),
      phase_(sampling.thinking_begun || rules_->begin.empty() ? Phase::inside : Phase::before) {}

void Thinking::push(TokenId token) {
  if (phase_ == Phase::over) return;
  if (forced()) {
    if (++num_written_ < rules_->end_ids.size()) return;
    count_ -= num_marked_;
    end_block();
    return;
  }
  bool counts = phase_ == Phase::inside;
  std::vector<Unit> units;
  append_units(rules_->table, token, units);
  for (std::size_t i = 0; i < units.size() && phase_ != Phase::over; ++i) {
    // The header of another message ends a block too, if the model leaves out the end mark.
    if (rules_->is_header && phase_ == Phase::inside && units[i] == rules_->begin.front()) end_block();
    if (phase_ == Phase::before && rules_->is_header) {
      push_header(units[i]);
    } else if (phase_ == Phase::before) {
      push_before(units[i]);
    } else if (phase_ == Phase::call) {
      push_call(units[i]);
    } else if (push_inside(units[i], i)) {
      counts = false;
    }
  }
  if (phase_ != Phase::inside) return;
  if (counts) ++count_;
  if (is_spent()) find_begun();
}

void Thinking::push_before(Unit unit) {
  const auto& begin = rules_->begin;
  const auto& call = rules_->call_begin;
  const auto count = std::max(matched_, call_matched_);
  if (count == 0 && is_space(unit)) return;
  const auto goes_on = [&](const std::vector<Unit>& mark, std::size_t matched) {
    return matched == count && count < mark.size() && mark[count] == unit;
  };
  const bool begins = goes_on(begin, matched_), calls = goes_on(call, call_matched_);
  if (!begins && !calls) {
    if (unit < kSpecial) phase_ = Phase::over;  // other text; a special token is not part of the text
    return;
  }
  matched_ += begins ? 1 : 0;
  call_matched_ += calls ? 1 : 0;
  if (begins && matched_ == begin.size()) phase_ = Phase::inside;
  if (calls && call_matched_ == call.size()) phase_ = Phase::call;
}

bool Thinking::ends_with(const std::vector<Unit>& mark) const {
  return !mark.empty() && recent_.size() >= mark.size() &&
         std::ranges::equal(std::span(recent_).last(mark.size()), mark, {}, &Recent::unit);
}

// The text between quotes of one byte may have it after a backslash.
void Thinking::push_call(Unit unit) {
  const auto& rules = *rules_;
  if (std::exchange(is_escaped_, false)) return;
  const bool is_byte = rules.quote_end.size() == 1 && rules.quote_end.front() < kSpecial;
  if (is_quoted_ && is_byte && unit == '\\') {
    is_escaped_ = true;
    return;
  }
  recent_.push_back({unit, false});
  if (recent_.size() > std::max({rules.call_end.size(), rules.quote_begin.size(), rules.quote_end.size()})) {
    recent_.erase(recent_.begin());
  }
  if (ends_with(is_quoted_ ? rules.quote_end : rules.quote_begin)) {
    is_quoted_ = !is_quoted_;
    recent_.clear();
  } else if (!is_quoted_ && ends_with(rules.call_end)) {
    end_block();
  }
}

void Thinking::push_header(Unit unit) {
  const auto& begin = rules_->begin;
  const std::size_t word_end = begin.size() - 1, after_word = begin.size();
  const bool in_word = matched_ > 0 && matched_ < after_word;
  if (unit == begin.back()) {  // a text begins
    const bool begins = !is_other_ && matched_ >= word_end && recipient_ < kRecipient.size();
    phase_ = begins ? Phase::inside : Phase::before;
    is_other_ = !begins;
    after_block_ = after_block_ && begins;
    matched_ = 0;
  } else if (unit == begin.front() && matched_ == 0) {
    if (is_other_) begin_header();
    matched_ = 1;
  } else if (unit >= kSpecial && std::ranges::count(rules_->end_ids, unit - kSpecial) > 0) {
    begin_header();
  } else if (is_other_ || (matched_ == 1 && is_space(unit))) {
    return;
  } else if (matched_ == word_end && (is_space(unit) || unit >= kSpecial)) {
    matched_ = after_word;
  } else if (in_word && matched_ < word_end && unit == begin[matched_]) {
    ++matched_;
  } else if (in_word) {  // another channel; a second one in the header does not count
    is_other_ = true;
    after_block_ = false;
  } else if (recipient_ < kRecipient.size()) {
    recipient_ = unit == kRecipient[recipient_] ? recipient_ + 1 : unit == kRecipient[0] ? 1 : 0;
  }
}

void Thinking::begin_header() {
  is_other_ = false;
  matched_ = recipient_ = 0;
}

bool Thinking::push_inside(Unit unit, std::size_t at) {
  recent_.push_back({unit, at == 0});
  if (recent_.size() > rules_->end.size()) recent_.erase(recent_.begin());
  if (std::ranges::equal(recent_, rules_->end, {}, &Recent::unit)) {
    // The tokens of the mark were counted, except the last one.
    const bool is_last = at < recent_.size();
    count_ -= static_cast<int>(std::ranges::count_if(recent_, &Recent::begins_token)) - (is_last ? 1 : 0);
    end_block();
    return true;
  }
  if (unit < kSpecial) {
    characters_.push(static_cast<unsigned char>(unit));
  } else {
    characters_ = {};
  }
  return false;
}

void Thinking::end_block() {
  phase_ = rules_->begin.empty() ? Phase::over : Phase::before;
  after_block_ = true;
  num_written_ = 0;
  num_marked_ = 0;
  recent_.clear();
  characters_ = {};
  call_matched_ = 0;
  begin_header();
}

// Finds the tokens of the end mark that the last units spell. The mark goes on after them.
void Thinking::find_begun() {
  num_written_ = 0;
  num_marked_ = 0;
  const auto& ids = rules_->end_ids;
  for (std::size_t count = ids.size() - 1; count > 0; --count) {
    const auto begun = units_of(rules_->table, std::span(ids).first(count));
    if (begun.empty() || begun.size() > recent_.size()) continue;
    const auto last = std::span(recent_).last(begun.size());
    if (!std::ranges::equal(begun, last, {}, {}, &Recent::unit)) continue;
    num_written_ = count;
    num_marked_ = static_cast<int>(std::ranges::count_if(last, &Recent::begins_token));
    return;
  }
}

std::optional<TokenId> Thinking::forced() const {
  if (phase_ != Phase::inside || !is_spent()) return std::nullopt;
  if (num_written_ == 0 && !characters_.between_characters()) return std::nullopt;
  return rules_->end_ids[num_written_];
}

std::span<const TokenId> Thinking::banned() const {
  const bool here =
      phase_ == Phase::before && after_block_ && is_spent() && call_matched_ == 0 &&
                    matched_ == (rules_->is_header ? 1U : 0U);
  return here ? std::span(rules_->banned) : std::span<const TokenId>();
}

bool Thinking::may_decide_next() const {
  if (phase_ == Phase::call) return is_spent();
  if (phase_ != Phase::before) return phase_ == Phase::inside && count_ + 1 >= budget_;
  if (rules_->is_header) return is_spent() && (after_block_ || matched_ + 1 >= rules_->begin.size());
  // One token has one special unit, or only other units.
  const auto rest = std::span(rules_->begin).subspan(matched_);
  const bool may_begin = rest.size() == 1 || std::ranges::none_of(rest, [](Unit unit) { return unit >= kSpecial; });
  return is_spent() && (after_block_ || may_begin);
}

}  // namespace charonia::runtime
