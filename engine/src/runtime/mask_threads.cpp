#include "runtime/mask_threads.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <exception>
#include <utility>

#include "base/text.h"
#include "charonia/error.h"

namespace charonia::runtime {
namespace {

// One thread computes the masks of eight sequences in about a millisecond. Most cores are left to the forward pass.
unsigned num_threads() { return std::clamp(std::thread::hardware_concurrency() / 8, 1U, 4U); }

// Whether one core more or less matters to a forward pass on the CPU.
bool small_machine() { return std::thread::hardware_concurrency() < 8; }

}  // namespace

SequenceMask::SequenceMask(std::shared_ptr<TokenMaskProvider> provider, int vocab_size, bool lazy,
                           std::function<void(double)> computed)
    : provider_(std::move(provider)),
      vocab_size_(vocab_size),
      lazy_(lazy && small_machine()),
      computed_(std::move(computed)),
      words_((static_cast<std::size_t>(vocab_size) + 31) / 32) {}

std::span<const std::uint32_t> SequenceMask::wait() const {
  compute_once();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return known_; });
  if (!error_.empty()) throw Error(ErrorCode::internal, error_);
  return words_;
}

void SequenceMask::add_forced(std::vector<TokenId>& tokens) const {
  const std::lock_guard lock(mutex_);
  if (!known_ || forced_.empty() || forced_.front() != tokens.back()) return;
  tokens.insert(tokens.end(), forced_.begin() + 1, forced_.end());
}

// The first forced token must be the only token of the mask.
std::string SequenceMask::check_forced() const {
  if (forced_.empty()) return {};
  const auto first = static_cast<std::uint32_t>(forced_.front());
  int allowed = 0;
  for (const auto word : words_) allowed += std::popcount(word);
  const bool known = std::ranges::all_of(forced_, [&](auto id) { return id >= 0 && id < vocab_size_; });
  if (known && allowed == 1 && (words_[first / 32] >> (first % 32) & 1) != 0) return {};
  return cat("the token mask provider forces token ", forced_.front(), " and ", forced_.size() - 1, " more; its mask allows ",
             allowed, " tokens, and the vocabulary has ", vocab_size_);
}

void SequenceMask::advance(std::span<const TokenId> accepted) {
  {
    const std::lock_guard lock(mutex_);
    known_ = false;
  }
  output_.insert(output_.end(), accepted.begin(), accepted.end());
  begun_ = false;
}

void SequenceMask::compute_once() const {
  if (begun_.exchange(true)) return;
  const auto begun = std::chrono::steady_clock::now();
  auto error = compute();
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begun;
  {
    const std::lock_guard lock(mutex_);
    error_ = std::move(error);
    known_ = true;
  }
  changed_.notify_all();
  if (computed_) computed_(took.count());
}

// Returns an error, or an empty text.
std::string SequenceMask::compute() const {
  std::ranges::fill(words_, 0U);
  forced_.clear();
  try {
    provider_->fill(output_, words_);
    const auto forced = provider_->forced();
    forced_.assign(forced.begin(), forced.end());
    // Clear the bits beyond the vocabulary.
    if (const int rest = vocab_size_ % 32; rest != 0) words_.back() &= (1U << rest) - 1;
    if (std::ranges::all_of(words_, [](auto word) { return word == 0; })) {
      return cat("the token mask allows no token after ", output_.size(), " tokens of output");
    }
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

void MaskThreads::begin(std::shared_ptr<SequenceMask> mask) {
  if (!mask->lazy_) begun_.push_back(std::move(mask));
}

void MaskThreads::next(std::shared_ptr<SequenceMask> mask, std::span<const TokenId> accepted) {
  mask->advance(accepted);
  begin(std::move(mask));
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
