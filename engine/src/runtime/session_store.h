// The sessions: histories by name, with a soft pin on the KV blocks of each. Histories are guarded by a lock, so that
// any thread may list or end sessions; blocks are pinned and unpinned on the engine thread alone.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cache/block_manager.h"
#include "charonia/engine.h"
#include "runtime/session_files.h"
#include "runtime/session_history.h"

namespace charonia::runtime {

class SessionStore {
 public:
  using Clock = std::chrono::steady_clock;
  struct Limits {
    double ttl_s = 0;       // 0: there are no sessions
    int pinned_blocks = 0;  // most in all
    int max_sessions = 0;
  };

  // files: null where histories live in memory alone.
  SessionStore(Limits limits, cache::BlockManager& blocks, std::unique_ptr<SessionFiles> files);

  bool enabled() const { return limits_.ttl_s > 0; }
  // Takes up what is on disk; at the start. Of more than max_sessions those that were idle longest are forgotten.
  void restore(std::vector<std::string>& warnings);

  // Any thread.
  bool forget(std::string_view id);
  std::vector<SessionInfo> list() const;  // by name
  int count() const;                      // with a history
  void flush() const;                     // returns when histories are on disk, where they have a folder

  // Engine thread. A request of a session begins to wait for its turn, and has ended: while there is one the session is
  // busy, and neither expires nor is forgotten for others.
  void enter(const std::string& id);
  void leave(const std::string& id);
  // A turn begins. Its number is what keep() knows the session by: one that is ended meanwhile gets another.
  struct Turn {
    std::uint64_t session = 0;
    std::shared_ptr<const History> history;  // empty where there is none
  };
  Turn begin(const std::string& id);
  // The turn has ended: this is the history now, and these nodes of the prefix index hold its blocks. Nothing happens
  // when the session was ended since.
  void keep(const std::string& id, const Turn& turn, History history, std::vector<cache::PrefixNode> nodes);

  // Engine thread: forgets what has expired, gives back the pins of what was forgotten.
  void tidy();
  std::optional<Clock::time_point> next_expiry() const;

 private:
  struct Session {
    std::uint64_t number = 0;
    std::shared_ptr<const History> history = std::make_shared<const History>();
    std::vector<cache::PrefixNode> nodes;  // pinned
    Clock::time_point used;                // when its last turn ended
    int requests = 0;
  };
  using Sessions = std::map<std::string, Session, std::less<>>;

  Clock::time_point expiry_of(const Session& session) const;
  bool expired(const Session& session, Clock::time_point now) const;
  Session& open(const std::string& id);
  // Under the lock; the pins go into released_. at_once: its file is removed before it returns, which the engine thread
  // does not wait for.
  void forget(Sessions::iterator at, bool at_once);
  // The idle session that was used longest ago and of which `which` holds, or the end.
  template <class Which>
  Sessions::iterator longest_idle(Which which);
  void make_space();
  void keep_quota(Session& newest);
  void unpin_released();

  const Limits limits_;
  cache::BlockManager& blocks_;
  const std::unique_ptr<SessionFiles> files_;
  mutable std::mutex mutex_;
  Sessions sessions_;
  std::vector<cache::PrefixNode> released_;  // of forgotten sessions, still pinned
  std::uint64_t next_number_ = 1;
};

}  // namespace charonia::runtime
