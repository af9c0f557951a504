#include "runtime/session_store.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/duration.h"

namespace charonia::runtime {

SessionStore::SessionStore(Limits limits, cache::BlockManager& blocks, std::unique_ptr<SessionFiles> files)
    : limits_(limits), blocks_(blocks), files_(std::move(files)) {}

void SessionStore::restore(std::vector<std::string>& warnings) {
  if (!enabled() || !files_) return;
  auto stored = files_->read(limits_.ttl_s, warnings);
  const auto now = Clock::now();
  const std::lock_guard lock(mutex_);
  for (auto& one : stored) {
    auto& session = open(one.id);
    session.history = std::move(one.history);
    session.used = now - duration_of(one.idle_s);
  }
  make_space();
}

SessionStore::Clock::time_point SessionStore::expiry_of(const Session& session) const {
  return session.used + duration_of(limits_.ttl_s);
}

bool SessionStore::expired(const Session& session, Clock::time_point now) const {
  return session.requests == 0 && expiry_of(session) <= now;
}

SessionStore::Session& SessionStore::open(const std::string& id) {
  auto [at, is_new] = sessions_.try_emplace(id);
  if (is_new) {
    at->second.number = next_number_++;
    at->second.used = Clock::now();
  }
  return at->second;
}

void SessionStore::forget(Sessions::iterator at, bool at_once) {
  released_.push_back(std::move(at->second.nodes));
  if (files_ && !at->second.history->tokens.empty()) files_->erase(at->first, at_once);
  sessions_.erase(at);
}

bool SessionStore::forget(std::string_view id) {
  const std::lock_guard lock(mutex_);
  const auto found = sessions_.find(id);
  if (found == sessions_.end() || expired(found->second, Clock::now())) return false;
  auto& session = found->second;
  if (session.requests == 0) {
    forget(found, true);
    return true;
  }
  // The requests of the session stay. The running one stores no history, and the waiting ones begin a new session.
  released_.push_back(std::exchange(session.nodes, {}));
  if (files_) files_->erase(found->first, true);
  session.history = std::make_shared<const History>();
  session.number = next_number_++;
  return true;
}

std::vector<SessionInfo> SessionStore::list() const {
  const auto now = Clock::now();
  std::vector<SessionInfo> out;
  const std::lock_guard lock(mutex_);
  for (const auto& [id, session] : sessions_) {
    if (expired(session, now)) continue;
    out.push_back({.id = id,
                   .num_tokens = static_cast<int>(session.history->tokens.size()),
                   .num_turns = static_cast<int>(session.history->turns.size()),
                   .num_pinned_blocks = static_cast<int>(session.nodes.size()),
                   .idle_s = session.requests > 0 ? 0 : std::chrono::duration<double>(now - session.used).count(),
                   .busy = session.requests > 0});
  }
  return out;
}

int SessionStore::count() const {
  const auto now = Clock::now();
  const std::lock_guard lock(mutex_);
  return static_cast<int>(std::ranges::count_if(
      sessions_, [&](const auto& one) { return !one.second.history->tokens.empty() && !expired(one.second, now); }));
}

void SessionStore::flush() const {
  if (files_) files_->flush();
}

void SessionStore::enter(const std::string& id) {
  const std::lock_guard lock(mutex_);
  const auto found = sessions_.find(id);
  if (found != sessions_.end() && expired(found->second, Clock::now())) forget(found, false);
  ++open(id).requests;
}

void SessionStore::leave(const std::string& id) {
  const std::lock_guard lock(mutex_);
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) return;
  auto& session = found->second;
  --session.requests;
  session.used = Clock::now();
  if (session.requests == 0 && session.history->tokens.empty()) forget(found, false);
}

SessionStore::Turn SessionStore::begin(const std::string& id) {
  const std::lock_guard lock(mutex_);
  const auto& session = open(id);
  return {session.number, session.history};
}

void SessionStore::keep(const std::string& id, const Turn& turn, History history,
                        std::vector<cache::PrefixNode> nodes) {
  auto kept = std::make_shared<const History>(std::move(history));
  const std::lock_guard lock(mutex_);
  const auto found = sessions_.find(id);
  if (found == sessions_.end() || found->second.number != turn.session) return;
  auto& session = found->second;
  session.history = kept;
  session.used = Clock::now();
  blocks_.pin(nodes);
  std::swap(session.nodes, nodes);
  blocks_.unpin(nodes);
  unpin_released();
  keep_quota(session);
  make_space();
  if (files_) files_->write(id, std::move(kept));
}

template <class Which>
SessionStore::Sessions::iterator SessionStore::longest_idle(Which which) {
  auto longest = sessions_.end();
  for (auto at = sessions_.begin(); at != sessions_.end(); ++at) {
    if (at->second.requests > 0 || !which(at->second)) continue;
    if (longest == sessions_.end() || at->second.used < longest->second.used) longest = at;
  }
  return longest;
}

void SessionStore::make_space() {
  while (static_cast<int>(sessions_.size()) > limits_.max_sessions) {
    const auto longest = longest_idle([](const Session&) { return true; });
    if (longest == sessions_.end()) return;  // all are busy
    forget(longest, false);
  }
}

void SessionStore::keep_quota(Session& newest) {
  while (blocks_.excess_pins(limits_.pinned) > 0) {
    const auto longest = longest_idle([](const Session& session) { return !session.nodes.empty(); });
    if (longest == sessions_.end()) break;
    blocks_.unpin(longest->second.nodes);
    longest->second.nodes.clear();
  }
  // The session alone exceeds the quota. Keep its beginning, which is the most useful part. Few blocks have a state, so
  // that the excess may be smaller than the number of blocks to unpin: each round unpins at least twice as many.
  std::size_t fewer = 0;
  for (int excess; (excess = blocks_.excess_pins(limits_.pinned)) > 0 && !newest.nodes.empty();) {
    fewer = std::max(2 * fewer, static_cast<std::size_t>(excess));
    blocks_.unpin(newest.nodes);
    newest.nodes.resize(newest.nodes.size() - std::min(newest.nodes.size(), fewer));
    blocks_.pin(newest.nodes);
  }
}

void SessionStore::unpin_released() {
  for (const auto& nodes : released_) blocks_.unpin(nodes);
  released_.clear();
}

void SessionStore::tidy() {
  const auto now = Clock::now();
  const std::lock_guard lock(mutex_);
  for (auto at = sessions_.begin(); at != sessions_.end();) {
    const auto next = std::next(at);
    if (expired(at->second, now)) forget(at, false);
    at = next;
  }
  unpin_released();
}

std::optional<SessionStore::Clock::time_point> SessionStore::next_expiry() const {
  const std::lock_guard lock(mutex_);
  std::optional<Clock::time_point> out;
  for (const auto& [id, session] : sessions_) {
    if (session.requests == 0 && (!out || expiry_of(session) < *out)) out = expiry_of(session);
  }
  return out;
}

}  // namespace charonia::runtime
