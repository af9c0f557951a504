// Session histories on disk, so that they survive a restart. Each session has one small file. A thread writes the
// files.
//
// The name of a file contains the session's id and the model, so that engines of several models may share a folder.
// Only one engine of a model writes: it holds a lock. A second engine reads the files when it starts, and queues its
// changes until the first engine has ended. This happens when a server loads a model again. The second engine skips a
// queued change if the first engine has changed the session later.
//
// A file contains (little-endian): "CHSESS1\n"; u32 length and bytes of the id; i64 seconds since 1970 when the last
// turn ended; u32 count and i32 begins of the turns; u32 count and i32 tokens; u64 FNV-1a of all bytes before.
#pragma once

#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <vector>

#include "runtime/session_history.h"

namespace charonia::runtime {

class SessionFiles {
 public:
  struct Stored {
    std::string id;
    std::shared_ptr<const History> history;
    double idle_s = 0;  // seconds since its last turn ended
  };

  // Throws Error(invalid_argument) if the folder cannot be created. removal_delay: see read().
  SessionFiles(std::filesystem::path folder, std::string_view model_name, int vocab_size,
               std::chrono::milliseconds removal_delay = std::chrono::hours(1));
  // Writes the queued changes, unless another engine holds the lock.
  ~SessionFiles();
  SessionFiles(const SessionFiles&) = delete;
  SessionFiles& operator=(const SessionFiles&) = delete;

  // Returns the sessions of this model that were idle for at most ttl_s. Ignores the files of older sessions. If they
  // are still too old after removal_delay, they are removed; the delay exists because a machine's clock may be wrong
  // when it starts. Ignores a damaged file with a warning.
  std::vector<Stored> read(double ttl_s, std::vector<std::string>& warnings);

  // write() and erase() queue a change. They do not wait for the thread, and do not fail. If a file cannot be written,
  // no file of the session is left, and a warning is logged; there are no further warnings until a write succeeds. The
  // last call for a session wins. at_once: erase() waits for the file system, and the file is gone when it returns,
  // unless the thread is writing the file.
  void write(const std::string& id, std::shared_ptr<const History> history);
  void erase(const std::string& id, bool at_once);
  // Waits until all queued changes are on disk. Does not wait for them while another engine holds the lock.
  void flush();

 private:
  struct Change {
    std::shared_ptr<const History> history;  // null: erase
    std::int64_t asked_s = 0;  // when it was queued, in seconds since 1970
    bool owned = false;        // value of owned_ when it was queued
  };
  struct Decoded;
  static std::optional<Decoded> decode(std::string_view bytes, int vocab_size);
  std::filesystem::path file_of(std::string_view id) const;
  std::optional<Decoded> read_file(const std::filesystem::path& path) const;
  template <class Take>  // calls take(path) for each file whose name ends with `ending`
  void each_path(std::string_view ending, std::error_code& error, Take take) const;
  bool try_lock();  // under mutex_
  void remove_old() const;
  void remove_unfinished() const;  // only with the file lock
  void apply(const std::string& id, const Change& change);
  template <class Work>
  void guarded(Work work);
  void warn(const std::string& message);  // logs nothing after the first warning, until a write succeeds
  void run();

  const std::filesystem::path folder_;
  const std::string suffix_;  // of the names of this model's files
  const int vocab_size_;
  const std::chrono::milliseconds removal_delay_;
  int lock_ = -1;  // descriptor of the lock file
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable written_;
  std::map<std::string, Change> changes_;
  bool locked_ = false;  // this engine holds the lock
  bool owned_ = false;   // this engine may write: it holds the lock, or locks do not work here
  double ttl_s_ = 0;     // from read()
  std::optional<std::chrono::steady_clock::time_point> remove_old_at_;
  bool writing_ = false;
  bool stop_ = false;
  bool warned_ = false;  // used only by the thread
  std::thread thread_;
};

}  // namespace charonia::runtime
