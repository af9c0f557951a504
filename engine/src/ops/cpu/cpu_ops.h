// The operations on the CPU. What each does to a row stands in kernels/; here work is checked and spread over threads.
#pragma once

#include <deque>
#include <memory>
#include <string_view>
#include <vector>

#include "base/huge_memory.h"
#include "base/thread_pool.h"
#include "ops/cpu/dispatch.h"
#include "ops/cpu/local_group.h"
#include "ops/cpu/sample.h"
#include "ops/ops.h"

namespace charonia::ops::cpu {

class CpuOps : public Ops {
 public:
  CpuOps(int threads, const InstructionSet& isa, std::shared_ptr<LocalGroup> group = nullptr, int rank = 0);

  std::string_view device() const override { return "cpu"; }
  std::string_view instruction_set() const override { return isa_.name; }
  Precision precision(DType weight) const override;
  std::size_t free_memory() const override;

  std::unique_ptr<Buffer> allocate(std::size_t bytes) override;
  void upload(void* device, const void* host, std::size_t bytes) override;
  void download(void* host, const void* device, std::size_t bytes) override;

  std::unique_ptr<Linear> make_linear(std::span<const HostMatrix> parts, std::span<const HostMatrix> bias,
                                      DType weight) override;
  std::unique_ptr<Embedding> make_embedding(const HostMatrix& table, DType weight) override;
  std::size_t kv_block_bytes(const KvLayout& layout) const override;
  std::unique_ptr<KvCache> make_kv_cache(const KvLayout& layout, int num_blocks) override;

  void begin_step(const StepInput& input) override;
  void run_step(const Issue& issue) override;
  std::vector<Sampled> collect() override;

  void embed(const Tensor& out, const Embedding& table) override;
  void rms_norm(const Tensor& out, const Tensor& residual, const Tensor& delta, const float* weight,
                float eps) override;
  void linear(const Tensor& out, const Tensor& in, const Linear& weight) override;
  void rotary_store(const Tensor& qkv, const float* cos_sin, KvCache& cache, int layer, int heads) override;
  void attention(const Tensor& out, const Tensor& qkv, const KvCache& cache, int layer, int heads,
                 float scale) override;
  void silu_mul(const Tensor& out, const Tensor& gate_up) override;
  void gather_rows(const Tensor& out, const Tensor& in) override;
  void sample(const Tensor& logits) override;

  int ranks() const override { return group_ ? group_->ranks() : 1; }
  int rank() const override { return rank_; }
  void all_reduce(const Tensor& tensor) override;
  void all_gather(const Tensor& out, const Tensor& in) override;
  void abort_exchange(std::string_view why) noexcept override;
  void resume_exchange() override;

 private:
  // fn(row) for every row: inline when rows * elements is little work.
  template <class Fn>
  void for_rows(std::int64_t rows, std::int64_t elements, Fn fn);

  // A piece of attention for one thread: queries [begin, end) of (row, head of the group) of a sequence and a k/v head.
  struct AttentionItem {
    std::int32_t sequence = 0, kv_head = 0, begin = 0, end = 0;
  };

  InstructionSet isa_;
  const Kernels& kernels_;
  ThreadPool pool_;
  HugeArena weights_;
  std::shared_ptr<LocalGroup> group_;  // null: alone
  int rank_ = 0;
  StepInput input_;  // of the step begun last
  bool begun_ = false;
  std::vector<std::int32_t> ids_;              // its token ids, those that the step before sampled filled in
  std::vector<std::int32_t> sampled_ids_;      // of the step run last; -1: that row failed
  std::vector<Sampled> sampled_;               // of the step in progress
  std::deque<std::vector<Sampled>> results_;   // of the steps not collected
  std::vector<AttentionItem> items_;           // of the call in progress
  std::vector<std::int32_t> sequence_of_row_;  // of the step begun last
};

}  // namespace charonia::ops::cpu
