#include "runtime/mask_thread.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <exception>
#include <iterator>
#include <string_view>
#include <utility>

#include "base/text.h"
#include "base/thread_time.h"
#include "charonia/error.h"

namespace charonia::runtime {
namespace {

using Clock = std::chrono::steady_clock;

// Of all masks of a step, beyond its forward pass.
constexpr auto kMaxWait = std::chrono::milliseconds(100);
// Computing time of a mask from which on the sequence's masks are waited for outside of steps.
constexpr double kSlowSeconds = 0.02;
constexpr int kQuickInARow = 16;  // after which they are waited for in steps again
constexpr std::string_view kLate = "the token mask was not known in time";

}  // namespace

Clock::time_point MaskDeadline::get() {
  const std::lock_guard lock(mutex_);
  if (!deadline_) deadline_ = Clock::now() + kMaxWait;
  return *deadline_;
}

void MaskPace::took(double seconds) {
  if (seconds > kSlowSeconds) {
    quick_ = 0;
    slow_ = true;
  } else if (slow_ && ++quick_ >= kQuickInARow) {
    slow_ = false;
  }
}

bool is_late_mask(std::string_view error) { return error == kLate; }

SequenceMask::SequenceMask(std::shared_ptr<TokenMaskProvider> provider, int vocab_size, std::shared_ptr<MaskPace> pace)
    : provider_(std::move(provider)),
      vocab_size_(vocab_size),
      pace_(std::move(pace)),
      words_((static_cast<std::size_t>(vocab_size) + 31) / 32) {}

void SequenceMask::set_deadline(std::shared_ptr<MaskDeadline> deadline) {
  const std::lock_guard lock(mutex_);
  deadline_ = std::move(deadline);
}

std::span<const std::uint32_t> SequenceMask::wait() const {
  std::unique_lock lock(mutex_);
  const auto answered = [this] { return known_ || late_; };
  if (!answered() && deadline_) {
    if (!changed_.wait_until(lock, deadline_->get(), answered)) late_ = true;  // another rank may have said so
  } else {
    changed_.wait(lock, answered);
  }
  if (late_) throw Error(ErrorCode::internal, std::string(kLate));
  if (!error_.empty()) throw Error(ErrorCode::internal, error_);
  return words_;
}

bool SequenceMask::sit_out() {
  const std::lock_guard lock(mutex_);
  late_ = false;
  sits_out_ = !known_;
  return sits_out_;
}

bool SequenceMask::known() const {
  const std::lock_guard lock(mutex_);
  return known_;
}

void SequenceMask::add_forced(std::vector<TokenId>& tokens) const {
  const std::lock_guard lock(mutex_);
  if (!known_ || forced_.empty() || forced_.front() != tokens.back()) return;
  tokens.insert(tokens.end(), forced_.begin() + 1, forced_.end());
}

// What is forced is the mask's only token, and tokens behind it.
std::string SequenceMask::check_forced() const {
  if (forced_.empty()) return {};
  const auto first = static_cast<std::uint32_t>(forced_.front());
  int allowed = 0;
  for (const auto word : words_) allowed += std::popcount(word);
  const bool known = std::ranges::all_of(forced_, [&](auto id) { return id >= 0 && id < vocab_size_; });
  if (known && allowed == 1 && (words_[first / 32] >> (first % 32) & 1) != 0) return {};
  return cat("the token mask provider forces token ", forced_.front(), " and ", forced_.size() - 1, " behind it; its mask ",
             "allows ", allowed, " tokens, and the vocabulary has ", vocab_size_);
}

bool SequenceMask::work() {
  const double begun = thread_seconds();
  std::ranges::fill(words_, 0U);
  forced_.clear();
  std::string error;
  try {
    provider_->fill(output_, words_);
    const auto forced = provider_->forced();
    forced_.assign(forced.begin(), forced.end());
    // Bits past the vocabulary stand for no token.
    if (const int rest = vocab_size_ % 32; rest != 0) words_.back() &= (1U << rest) - 1;
    if (std::ranges::all_of(words_, [](auto word) { return word == 0; })) {
      error = cat("the token mask allows no token after ", output_.size(), " tokens of output");
    } else {
      error = check_forced();
    }
  } catch (const std::exception& failure) {
    error = cat("the token mask provider failed after ", output_.size(), " tokens of output: ", failure.what());
  } catch (...) {
    error = cat("the token mask provider failed after ", output_.size(), " tokens of output");
  }
  pace_->took(thread_seconds() - begun);
  bool sits_out = false;
  {
    const std::lock_guard lock(mutex_);
    error_ = std::move(error);
    known_ = true;
    sits_out = std::exchange(sits_out_, false);
  }
  changed_.notify_all();
  return sits_out;
}

MaskThread::~MaskThread() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  for (auto& lane : lanes_) lane.wake.notify_one();
  for (auto& lane : lanes_) {
    if (lane.thread.joinable()) lane.thread.join();
  }
}

void MaskThread::begin(std::shared_ptr<SequenceMask> mask) { begun_.push_back(std::move(mask)); }

void MaskThread::next(std::shared_ptr<SequenceMask> mask, std::span<const TokenId> accepted) {
  {
    const std::lock_guard lock(mask->mutex_);
    mask->known_ = false;
  }
  mask->output_.insert(mask->output_.end(), accepted.begin(), accepted.end());
  begun_.push_back(std::move(mask));
}

void MaskThread::hand_over() {
  if (begun_.empty()) return;
  {
    const std::lock_guard lock(mutex_);
    for (auto& mask : begun_) put(std::move(mask));
    for (auto& lane : lanes_) {
      if (!lane.asked.empty()) lane.wake.notify_one();
    }
  }
  begun_.clear();
}

void MaskThread::put(std::shared_ptr<SequenceMask> mask) {
  auto& lane = lanes_[mask->slow() ? 1 : 0];
  lane.asked.push_back(std::move(mask));
  if (!lane.thread.joinable()) lane.thread = std::thread([this, &lane] { run(lane); });
}

void MaskThread::run(Lane& lane) {
  Masks masks;
  while (true) {
    {
      std::unique_lock lock(mutex_);
      lane.wake.wait(lock, [&] { return stop_ || !lane.asked.empty(); });
      if (lane.asked.empty()) return;
      std::swap(masks, lane.asked);
    }
    for (auto& mask : masks) {
      // The last reference may be this one: then the sequence has ended, and the provider is destroyed here.
      if (mask.use_count() == 1) {
        mask.reset();
        continue;
      }
      // That of another sequence has told meanwhile.
      if (&lane == lanes_.data() && mask->slow()) {
        const std::lock_guard lock(mutex_);
        put(std::move(mask));
        lanes_[1].wake.notify_one();
        continue;
      }
      const auto begun = Clock::now();
      const bool sits_out = mask->work();
      worked_(std::chrono::duration<double>(Clock::now() - begun).count());
      if (sits_out) known_();
      mask.reset();
    }
    masks.clear();
  }
}

}  // namespace charonia::runtime
