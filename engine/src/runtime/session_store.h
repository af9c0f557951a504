// The sessions: histories by name. The KV blocks of each session are pinned softly. A lock protects the histories, so
// that any thread may list or end sessions. Only the engine thread pins and unpins blocks.
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
    double ttl_s = 0;       // 0: sessions are off
    double pinned = 0;  // maximum over all sessions, as a share of the blocks of each kind
    int max_sessions = 0;
  };

  // files: null if histories are kept only in memory.
  SessionStore(Limits limits, cache::BlockManager& blocks, std::unique_ptr<SessionFiles> files);

  bool enabled() const { return limits_.ttl_s > 0; }
  // Reads the histories from disk. Called at the start. If there are more than max_sessions, forgets the sessions that
  // were idle longest.
  void restore(std::vector<std::string>& warnings);

  // Thread-safe.
  bool forget(std::string_view id);
  std::vector<SessionInfo> list() const;  // by name
  int count() const;                      // of sessions with a history
  void flush() const;                     // waits until the histories are on disk, if they have a folder

  // Engine thread. enter(): a request of the session begins to wait for its turn. leave(): the request has ended.
  // Between them the session is busy: it does not expire, and is not forgotten to make space for other sessions.
  void enter(const std::string& id);
  void leave(const std::string& id);
  // The state of a session when a turn begins. keep() compares the number: a session that is ended gets a new number.
  struct Turn {
    std::uint64_t session = 0;
    std::shared_ptr<const History> history;  // never null; empty for a new session
  };
  Turn begin(const std::string& id);
  // Stores the history after a turn. nodes: the nodes of the prefix index that hold its blocks. Does nothing if the
  // session was ended since the turn began.
  void keep(const std::string& id, const Turn& turn, History history, std::vector<cache::PrefixNode> nodes);

  // Engine thread. Forgets expired sessions, and unpins the blocks of forgotten sessions.
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
  // Call it with the lock. Moves the pinned nodes to released_. at_once: as in SessionFiles::erase().
  void forget(Sessions::iterator at, bool at_once);
  // Returns the least recently used idle session that `which` accepts, or the end.
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
  std::vector<std::vector<cache::PrefixNode>> released_;  // the nodes of each forgotten session, still pinned
  std::uint64_t next_number_ = 1;
};

}  // namespace charonia::runtime
