// The chunks that a subscription has to send, encoded as the messages of client/charonia_client/delivery.proto. Does
// not use Triton's API.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "charonia/types.h"

namespace charonia::triton {

struct TokenName {
  std::string_view bytes;  // also of a special token
  bool special = false;    // not part of a text
};

// Fields of a response that are not part of the engine's result.
struct Extras {
  std::string_view echo{};                      // precedes the text
  std::span<const TokenId> prompt_ids{};        // empty unless log probabilities of the prompt were requested
  std::vector<std::string_view> token_bytes{};  // of each token of the result; only for subscriptions
  // Names the most likely tokens and the tokens of the prompt; only for subscriptions.
  std::function<TokenName(TokenId)> name_of{};
  bool in_reasoning = false;  // the prompt ends within the reasoning; only for subscriptions
  std::string_view lora_adapters{};  // JSON; only in the response to a request about adapters
};

// Returns the ids and the log probabilities of the most likely tokens, row after row.
std::pair<std::vector<TokenId>, std::vector<float>> flattened(const std::vector<std::vector<TokenLogprob>>& rows);

// Limits for deliveries that the reader has not read. Unread deliveries wait in the server's memory. If there are too
// many, new chunks wait in the outbox, where the chunks of one sequence are joined.
struct OutboxLimits {
  std::size_t deliveries = 256;              // unread deliveries
  std::size_t bytes = std::size_t{4} << 20;  // their size; also, a delivery ends with the chunk that reaches this size
  std::size_t held = std::size_t{64} << 20;  // size of the chunks that wait in the outbox
  // How long `held` may be exceeded while the size of the waiting chunks does not decrease. Many responses may end at
  // the same time, each with megabytes of log probabilities.
  std::chrono::seconds overflow_time{5};
  std::chrono::seconds stall_time{60};  // how long a reader may read nothing after it has reached a limit
};

// Not thread-safe.
class Outbox {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Outbox(const OutboxLimits& limits = {}) : limits_(limits) {}

  // Adds a result without an error of the request with this key. After the last result of a sequence, the key may
  // belong to another request.
  void add(std::uint64_t key, const Result& result, const Extras& extras);
  // Ends the request with this key. Nothing may be added to it afterwards.
  void add_error(std::uint64_t key, std::string_view text);

  // Whether a delivery can be sent: chunks wait, and the reader is not too far behind.
  bool due() const { return !waiting_.empty() && !behind(); }
  // Returns the next delivery with all waiting chunks that fit, in the order in which they were added. It has at most
  // one chunk of each sequence, and an error is a chunk of its own. A delivery may be empty. `arithmetic`,
  // `deterministic`: of EngineInfo, for the first delivery.
  std::string take(std::string_view arithmetic = {}, bool deterministic = false);
  // The reader has read all deliveries up to this number. A smaller number than before changes nothing. Throws
  // Error(invalid_argument) for a delivery that was not sent.
  void acknowledge(std::uint64_t number);

  bool empty() const { return waiting_.empty(); }

  // Turns the limits off while readers cannot acknowledge deliveries.
  void set_flow_control(bool on) { unlimited_ = !on; }

  // Says why the reader is too far behind to go on, or returns nullptr. Call it periodically.
  const char* overflow(Clock::time_point now);

 private:
  struct Chunk {
    int text_begin = 0, text_end = 0;
    bool in_reasoning = false;
    std::string scalars;   // encoded scalar fields of the last result
    std::string repeated;  // encoded repeated fields of all results
    std::size_t size() const { return scalars.size() + repeated.size(); }
  };

  // Memory of a chunk and of its node in places_, without the encoded fields. Three of its parts are allocated.
  static constexpr std::size_t kChunkMemory =
      sizeof(Chunk) + sizeof(std::pair<std::pair<std::uint64_t, int>, std::size_t>) + 3 * 32;

  bool behind() const {
    return !unlimited_ && (unread_.size() >= limits_.deliveries || unread_bytes_ >= limits_.bytes);
  }
  std::size_t held() const { return waiting_bytes_ + waiting_.size() * kChunkMemory; }

  OutboxLimits limits_;
  std::vector<Chunk> waiting_;
  std::map<std::pair<std::uint64_t, int>, std::size_t> places_;  // index in waiting_, by key and sequence
  std::size_t waiting_bytes_ = 0;                                // sum of size() over waiting_
  std::uint64_t number_ = 0;                                     // of the last delivery
  std::deque<std::size_t> unread_;                               // sizes of the unread deliveries
  std::size_t unread_bytes_ = 0;
  bool unlimited_ = false;
  std::optional<Clock::time_point> stalled_since_;
  std::optional<Clock::time_point> over_since_;  // when limits_.held was exceeded, or when held() last became less
  std::size_t least_held_ = 0;                   // smallest held() since then
};

}  // namespace charonia::triton
