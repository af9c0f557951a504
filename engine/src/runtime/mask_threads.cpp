#include "runtime/mask_threads.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <exception>
#include <utility>

#include "base/text.h"
#include "base/thread_time.h"
#include "charonia/error.h"

namespace charonia::runtime {
namespace {

// One thread computes the masks of eight sequences in about a millisecond. Most cores are left to the forward pass.
unsigned num_threads() { return std::clamp(std::thread::hardware_concurrency() / 8, 1U, 4U); }

// Whether one core more or less matters to a forward pass on the CPU.
bool small_machine() { return std::thread::hardware_concurrency() < 8; }

// CPU time of the masks of a sequence in a step with proposals. After a step that took longer there are no more.
constexpr double kMaxRowsSeconds = 0.05;

}  // namespace

SequenceMask::SequenceMask(std::shared_ptr<TokenMaskProvider> provider, int vocab_size, bool lazy,
                           std::function<void(double)> computed)
    : provider_(std::move(provider)),
      vocab_size_(vocab_size),
      lazy_(lazy && small_machine()),
      computed_(std::move(computed)) {
  rows_.emplace_back(*this);
}

std::span<const std::uint32_t> SequenceMask::Row::wait() const {
  sequence.compute_once();
  std::unique_lock lock(sequence.mutex_);
  sequence.changed_.wait(lock, [this] { return sequence.known_; });
  if (!error.empty()) throw Error(ErrorCode::internal, error);
  return words;
}

void SequenceMask::add_forced(std::vector<TokenId>& tokens) const {
  const std::lock_guard lock(mutex_);
  if (!known_ || forced_.empty() || forced_.front() != tokens.back()) return;
  tokens.insert(tokens.end(), forced_.begin() + 1, forced_.end());
}

std::vector<TokenId> SequenceMask::propose(std::span<const TokenId> guess, int most) const {
  try {
    {
      const std::lock_guard lock(mutex_);
      if (slow_) return {};
    }
    auto out = provider_->propose(output_, guess, most);
    const auto known = [this](TokenId id) { return id >= 0 && id < vocab_size_; };
    out.erase(std::ranges::find_if_not(out, known), out.end());
    out.resize(std::min(out.size(), static_cast<std::size_t>(std::max(most, 0))));
    return out;
  } catch (const std::exception&) {
    return {};  // fill() will report an error, if the mask cannot be computed either
  }
}

// The first forced token must be the only token of the mask.
std::string SequenceMask::check_forced() const {
  if (forced_.empty()) return {};
  const auto& words = rows_.front().words;
  const auto first = static_cast<std::uint32_t>(forced_.front());
  int allowed = 0;
  for (const auto word : words) allowed += std::popcount(word);
  const bool known = std::ranges::all_of(forced_, [&](auto id) { return id >= 0 && id < vocab_size_; });
  if (known && allowed == 1 && (words[first / 32] >> (first % 32) & 1) != 0) return {};
  return cat("the token mask provider forces token ", forced_.front(), " and ", forced_.size() - 1,
             " more; its mask allows ", allowed, " tokens, and the vocabulary has ", vocab_size_);
}

void SequenceMask::request(std::span<const TokenId> proposed) {
  requested_ = true;
  proposed_.assign(proposed.begin(), proposed.end());
  while (rows_.size() <= proposed_.size()) rows_.emplace_back(*this);
  begun_ = false;
}

void SequenceMask::advance(std::span<const TokenId> accepted) {
  {
    const std::lock_guard lock(mutex_);
    known_ = false;
  }
  begun_ = true;
  requested_ = false;
  output_.insert(output_.end(), accepted.begin(), accepted.end());
}

void SequenceMask::compute_once() const {
  if (begun_.exchange(true)) return;
  const auto begun = thread_seconds();
  compute();
  {
    const std::lock_guard lock(mutex_);
    known_ = true;
    slow_ |= !proposed_.empty() && thread_seconds() - begun > kMaxRowsSeconds;
  }
  changed_.notify_all();
}

// After a proposal that its mask does not allow, no token is accepted.
void SequenceMask::compute() const {
  bool possible = true;
  const auto size = output_.size();
  for (std::size_t i = 0; i <= proposed_.size(); ++i) {
    auto& row = rows_[i];
    if (!possible) {
      row.error = "the token mask allows no token before this row";
      continue;
    }
    const auto begun = std::chrono::steady_clock::now();
    row.error = compute(row);
    if (computed_) computed_(std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count());
    if (i == proposed_.size()) break;
    const auto id = static_cast<std::size_t>(proposed_[i]);
    possible = row.error.empty() && (row.words[id / 32] >> (id % 32) & 1) != 0;
    output_.push_back(proposed_[i]);
  }
  output_.resize(size);
}

// Returns an error, or an empty text.
std::string SequenceMask::compute(Row& row) const {
  if (&row == &rows_.front()) forced_.clear();
  row.words.assign((static_cast<std::size_t>(vocab_size_) + 31) / 32, 0U);
  try {
    provider_->fill(output_, row.words);
    // Clear the bits beyond the vocabulary.
    if (const int rest = vocab_size_ % 32; rest != 0) row.words.back() &= (1U << rest) - 1;
    if (std::ranges::all_of(row.words, [](auto word) { return word == 0; })) {
      return cat("the token mask allows no token after ", output_.size(), " tokens of output");
    }
    if (&row != &rows_.front()) return {};
    const auto forced = provider_->forced();
    forced_.assign(forced.begin(), forced.end());
    return check_forced();
  } catch (const std::exception& failure) {
    return cat("the token mask provider failed after ", output_.size(), " tokens of output: ", failure.what());
  } catch (...) {
    return cat("the token mask provider failed after ", output_.size(), " tokens of output");
  }
}

MaskThreads::~MaskThreads() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void MaskThreads::begin(std::shared_ptr<SequenceMask> mask, std::span<const TokenId> proposed) {
  if (mask->requested_) return;
  mask->request(proposed);
  if (!mask->lazy_) begun_.push_back(std::move(mask));
}

void MaskThreads::next(std::shared_ptr<SequenceMask> mask, std::span<const TokenId> accepted, bool wanted) {
  mask->advance(accepted);
  if (wanted) begin(std::move(mask));
}

void MaskThreads::hand_over() {
  if (begun_.empty()) return;
  {
    const std::lock_guard lock(mutex_);
    std::ranges::move(begun_, std::back_inserter(waiting_));
  }
  begun_.clear();
  for (auto left = num_threads() - threads_.size(); left > 0; --left) threads_.emplace_back([this] { run(); });
  wake_.notify_all();
}

void MaskThreads::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return stop_ || !waiting_.empty(); });
    if (stop_) return;  // devices that still wait compute their masks
    auto mask = std::move(waiting_.front());
    waiting_.pop_front();
    lock.unlock();
    if (mask.use_count() > 1) mask->compute_once();  // otherwise the sequence has ended
    mask.reset();
    lock.lock();
  }
}

}  // namespace charonia::runtime
