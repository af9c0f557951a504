// What a subscription has to send, packed into deliveries (docs/contracts.md, "Subscriptions"). Without Triton's API.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "charonia/types.h"

namespace charonia::triton {

// How far a subscription may be ahead of its reader. Deliveries that were sent and not read wait in the server's
// memory; what comes meanwhile waits in the outbox, where the chunks of a sequence become one.
struct OutboxLimits {
  std::size_t deliveries = 256;               // sent and not read
  std::size_t bytes = std::size_t{4} << 20;   // of these; one delivery ends with the chunk that reaches it
  std::size_t held = std::size_t{64} << 20;   // bytes that wait in the outbox
  // For a reader for which more than that waits and does not get less: many answers may end at once, each with
  // megabytes of log probabilities.
  std::chrono::seconds catching_up{5};
  std::chrono::seconds patience{60};          // for a reader that is that far behind and reads nothing
};

// Of the tokens of a result: how many bytes of text each has, and these bytes. text_begin and text_end of the result are
// places in them.
struct TokenBytes {
  std::vector<std::uint32_t> sizes;
  std::string joined;
};

// One thread at a time.
class Outbox {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Outbox(const OutboxLimits& limits = {}) : limits_(limits) {}

  // A result without an error, of the request with that key. `before` goes before its text. After the last one of a
  // sequence what comes with that key is another request's. With `tokens` the chunk has these in place of the text; all
  // results of a request have them, or none. `logprobs`: with its log probabilities, likewise. Throws Error(internal),
  // and adds nothing, where these are not those of its tokens.
  void add(std::uint64_t key, const Result& result, std::string_view before, const TokenBytes* tokens = nullptr,
           bool logprobs = false);
  // What the answers of the request with that key are read by, before anything else of it.
  void add_options(std::uint64_t key, std::string_view options);
  // The end of the request with that key, with the text for its client. Nothing of it may be added afterwards.
  void add_error(std::uint64_t key, std::string_view text);

  // Whether there is something to send, and the reader is not too far behind.
  bool due() const { return !waiting_.empty() && !behind(); }
  // The next delivery, with all that waits and fits: its number, from 1 on, and the chunks in the order in which they
  // came. Of one sequence there is one at most, but for an error. May be empty but for the number. What does not fit is
  // due when the reader has read, or at once where it is not heard.
  std::string take();

  // The reader has read all deliveries up to that one. An older number than before changes nothing. Throws
  // Error(invalid_argument) for one that was not sent.
  void read(std::uint64_t number);

  // Whether there is something that was not taken.
  bool waiting() const { return !waiting_.empty(); }

  // Whether the reader can say how far it is. While it cannot, nothing is held back.
  void bind(bool heard) { unbound_ = !heard; }

  // Why the reader gets no more, or nullptr: it lets too much wait, or for too long. For a caller that asks now and
  // then.
  const char* hopeless(Clock::time_point now);

 private:
  enum class Form { text, tokens, options };

  struct Chunk {
    std::uint64_t key = 0;
    Result result;                     // its text is the chunk's, the error's or the options
    std::vector<std::uint32_t> sizes;  // of its tokens, where their bytes are its text
    std::vector<TokenId> top_ids;      // the most likely tokens of each, in place of the result's: `tops` for each
    std::vector<float> top_logprobs;   // of these
    std::uint32_t tops = 0;
    bool logprobs = false;             // it has them
    Form form = Form::text;
  };

  // And its node in places_.
  static constexpr std::size_t kChunkMemory =
      sizeof(Chunk) + sizeof(std::pair<std::pair<std::uint64_t, int>, std::size_t>) + 32;

  bool behind() const {
    return !unbound_ && (sent_.size() >= limits_.deliveries || sent_bytes_ >= limits_.bytes);
  }
  // Bytes of memory that wait: a small chunk takes far more than it has in a delivery.
  std::size_t held() const { return packed_ + waiting_.size() * kChunkMemory; }
  // Bytes of a chunk in a delivery.
  static std::size_t packed_size(const Chunk& chunk);
  static void add_logprobs(Chunk& chunk, const Result& more);
  static void append(std::string& packed, const Chunk& chunk);

  OutboxLimits limits_;
  std::vector<Chunk> waiting_;
  std::map<std::pair<std::uint64_t, int>, std::size_t> places_;  // in waiting_, by key and sequence
  std::size_t packed_ = 0;                                       // bytes of their chunks in deliveries
  std::uint64_t number_ = 0;                                     // of the last delivery
  std::deque<std::size_t> sent_;                                 // sizes of those that are not read, the last ones
  std::size_t sent_bytes_ = 0;
  bool unbound_ = false;
  std::optional<Clock::time_point> behind_since_;
  std::optional<Clock::time_point> over_since_;  // when more than limits_.held waited first, or became less last
  std::size_t least_held_ = 0;                   // since then
};

}  // namespace charonia::triton
