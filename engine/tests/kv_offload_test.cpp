// Decides which KV is loaded from files, and survives errors while KV is stored.
#include "runtime/kv_offload.h"

#include <atomic>
#include <future>
#include <new>
#include <numeric>
#include <thread>

#include "engine_fixture.h"
#include "runtime/settings.h"

namespace charonia::runtime {
namespace {

using Next = schedule::Load::Next;

class KvOffloadTest : public testing::EngineFixtureBase {
 protected:
  static constexpr int kBlocks = 3, kBlockLen = 4;

  void SetUp() override {
    EngineFixtureBase::SetUp();
    wrap_devices(false);
    testing::write_tiny_workspace(weights());
    auto settings = read_settings(weights(), {{"cache_block_seq_len", "4"}, {"cache_max_entry_count", "16"}, place()});
    info_.model = std::move(settings.model);
    info_.config = std::move(settings.config);
    executor_ = std::make_unique<Executor>(weights(), info_.model, info_.config);
    executor_->commit_blocks(CacheKind::full, kBlocks);
    info_.device = executor_->device();
    info_.instruction_set = executor_->instruction_set();
    load_ = std::make_unique<LoadTracker>(info_.config);
    std::iota(tokens_.begin(), tokens_.end(), 1);
    ASSERT_TRUE(blocks_.allocate(kBlocks, ids_));
    cache::PrefixNode node;
    for (int i = 0; i < kBlocks; ++i) {
      node = blocks_.insert(node, ids_[static_cast<std::size_t>(i)],
                            std::span(tokens_).subspan(static_cast<std::size_t>(i * kBlockLen), kBlockLen));
      nodes_.push_back(node);
    }
    KvFiles::Options options;
    options.now = [this] { return KvFiles::Clock::time_point(std::chrono::seconds(now_s_)); };
    options.before_io = [this](bool writes) {
      if (!writes) now_s_ += read_s_, readable_.wait(false);
      return 0;
    };
    std::vector<std::string> warnings;
    offload_ = std::make_unique<KvOffload>(weights(), info_, info_.config.session_len, *executor_, blocks_, *load_,
                                           std::move(options), warnings);
  }
  virtual std::pair<std::string, std::string> place() const { return {"kv_offload_path", (dir_ / "kv").string()}; }
  void TearDown() override {
    offload_.reset();
    EngineFixtureBase::TearDown();
  }
  void offer() {
    offload_->offer("", tokens_, nodes_, {});
    offload_->settled(false);
  }
  auto find(bool shares = false) { return offload_->find("", tokens_, 0, shares).load; }
  Next next(schedule::Load& load) {
    auto out = Next::waits;
    while ((out = load.next(ids_[0])) == Next::waits) std::this_thread::yield();
    return out;
  }

  EngineInfo info_;
  std::unique_ptr<Executor> executor_;
  std::unique_ptr<LoadTracker> load_;
  cache::BlockManager blocks_{16, kBlockLen, true};
  std::vector<cache::BlockId> ids_;
  std::vector<cache::PrefixNode> nodes_;
  std::vector<std::int32_t> tokens_ = std::vector<std::int32_t>(kBlocks * kBlockLen);
  std::atomic<int> now_s_{0}, read_s_{0};
  std::atomic<bool> readable_{true};
  std::unique_ptr<KvOffload> offload_;
};

TEST_F(KvOffloadTest, AnErrorWhileStoringLosesOnlyTheFiles) {
  faults_->on_download = [] { throw std::bad_alloc(); };
  offer();
  EXPECT_NO_THROW(offload_->work(true));
  EXPECT_FALSE(offload_->has_work());
  faults_->on_download = [] { throw Error(ErrorCode::internal, "the test fails this copy"); };
  offer();
  EXPECT_NO_THROW(offload_->flush()) << "a shutdown must not fail";
  offer();
  EXPECT_THROW(offload_->work(true), Error) << "the engine must learn that the device has failed";
  faults_->on_download = [] {};
  offer();
  offload_->flush();
  EXPECT_NE(find(), nullptr);
}

class KvOffloadInMemoryTest : public KvOffloadTest {
  std::pair<std::string, std::string> place() const override { return {"kv_offload_memory", "1MiB"}; }
};

TEST_F(KvOffloadInMemoryTest, AShutdownCopiesNothing) {
  offer();
  offload_->work(true);
  EXPECT_NE(find(), nullptr);
  bool copies = false;
  faults_->on_download = [&] { copies = true; };
  tokens_.front() = 9;
  offer();
  EXPECT_TRUE(offload_->has_work());
  offload_->flush();
  EXPECT_FALSE(copies);
  EXPECT_FALSE(offload_->has_work());
}

TEST_F(KvOffloadTest, SlowFilesAreLoadedOnlySometimes) {
  offer();
  offload_->flush();
  read_s_ = 2;
  const auto first = find();
  for (int i = 0; i < kBlocks; ++i) EXPECT_EQ(next(*first), Next::copied);
  load_->step(1000, 0, 1);  // 12 tokens take 12 ms
  for (int i = 1; i < 16; ++i) EXPECT_EQ(find(), nullptr) << i;
  EXPECT_NE(find(), nullptr) << "the speed is measured again";
  load_->step(10, 0, 1000);
  EXPECT_NE(find(), nullptr);
}

TEST_F(KvOffloadTest, BlocksAreComputedIfTheyWaitTooLongForTheirCopies) {
  offer();
  offload_->flush();
  load_->step(1000, 0, 1);
  load_->step(0, 1, 1e6);
  EXPECT_EQ(find(true), nullptr) << "other sequences have slow steps";
  EXPECT_NE(find(false), nullptr);
}

TEST_F(KvOffloadTest, ALoadFailsWhenTheDiskTakesMuchLongerThanComputing) {
  offer();
  offload_->flush();
  load_->step(1000, 0, 1);
  readable_ = false;
  const auto load = find();
  EXPECT_EQ(load->next(ids_[0]), Next::waits);
  now_s_ += 2;
  EXPECT_EQ(load->next(ids_[0]), Next::failed);
  readable_ = true;
  readable_.notify_all();
}

TEST_F(KvOffloadTest, TheIdentityDoesNotDependOnTheSizeOfTheCache) {
  auto other = info_;
  info_.device = other.device = "cuda";
  other.config.session_len -= 1;  // as the engine lowers it
  EXPECT_EQ(kv_identity(weights(), info_, 100), kv_identity(weights(), other, 100));
  EXPECT_NE(kv_identity(weights(), info_, 100), kv_identity(weights(), info_, 99));
}

}  // namespace
}  // namespace charonia::runtime
