#include "runtime/mask_thread.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <iterator>
#include <utility>

#include "base/text.h"
#include "charonia/error.h"

namespace charonia::runtime {

SequenceMask::SequenceMask(std::shared_ptr<TokenMaskProvider> provider, int vocab_size)
    : provider_(std::move(provider)),
      vocab_size_(vocab_size),
      words_((static_cast<std::size_t>(vocab_size) + 31) / 32) {}

std::span<const std::uint32_t> SequenceMask::wait() const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return known_; });
  if (!error_.empty()) throw Error(ErrorCode::internal, error_);
  return words_;
}

void SequenceMask::work() {
  std::ranges::fill(words_, 0U);
  std::string error;
  try {
    provider_->fill(output_, words_);
    // Bits past the vocabulary stand for no token.
    if (const int rest = vocab_size_ % 32; rest != 0) words_.back() &= (1U << rest) - 1;
    if (std::ranges::all_of(words_, [](auto word) { return word == 0; })) {
      error = cat("the token mask allows no token after ", output_.size(), " tokens of output");
    }
  } catch (const std::exception& failure) {
    error = cat("the token mask provider failed after ", output_.size(), " tokens of output: ", failure.what());
  } catch (...) {
    error = cat("the token mask provider failed after ", output_.size(), " tokens of output");
  }
  {
    const std::lock_guard lock(mutex_);
    error_ = std::move(error);
    known_ = true;
  }
  changed_.notify_all();
}

MaskThread::~MaskThread() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void MaskThread::begin(std::shared_ptr<SequenceMask> mask) { begun_.push_back(std::move(mask)); }

void MaskThread::next(std::shared_ptr<SequenceMask> mask, TokenId accepted) {
  {
    const std::lock_guard lock(mask->mutex_);
    mask->known_ = false;
  }
  mask->output_.push_back(accepted);
  begun_.push_back(std::move(mask));
}

void MaskThread::hand_over() {
  if (begun_.empty()) return;
  {
    const std::lock_guard lock(mutex_);
    std::ranges::move(begun_, std::back_inserter(asked_));
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  }
  begun_.clear();
  wake_.notify_one();
}

void MaskThread::run() {
  Masks masks;
  while (true) {
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [this] { return stop_ || !asked_.empty(); });
      if (asked_.empty()) return;
      std::swap(masks, asked_);
    }
    for (auto& mask : masks) {
      const auto begun = std::chrono::steady_clock::now();
      mask->work();
      worked_(std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count());
      // The last reference may be this one: then the sequence has ended, and the provider is destroyed here.
      mask.reset();
    }
    masks.clear();
  }
}

}  // namespace charonia::runtime
