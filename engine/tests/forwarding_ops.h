// Operations that forward all calls to other operations; tests derive from it to change one of them.
#pragma once

#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "ops/ops.h"

namespace charonia::testing {

class ForwardingOps : public ops::Ops {
 public:
  explicit ForwardingOps(std::unique_ptr<ops::Ops> to) : to_(std::move(to)) {}

  std::string_view device() const override { return to_->device(); }
  std::string_view instruction_set() const override { return to_->instruction_set(); }
  std::string warning() const override { return to_->warning(); }
  std::vector<std::string> report() const override { return to_->report(); }
  std::int64_t gemms_rejected() const override { return to_->gemms_rejected(); }
  bool asynchronous() const override { return to_->asynchronous(); }
  ops::Precision precision(DType weight) const override { return to_->precision(weight); }
  std::size_t free_memory() const override { return to_->free_memory(); }

  std::unique_ptr<ops::Buffer> allocate(std::size_t bytes) override { return to_->allocate(bytes); }
  void upload(void* device, const void* host, std::size_t bytes) override { to_->upload(device, host, bytes); }
  void download(void* host, const void* device, std::size_t bytes) override { to_->download(host, device, bytes); }

  void share_linear(const ops::Linear& weight) override { to_->share_linear(weight); }
  bool has_adapter_slots() const override { return to_->has_adapter_slots(); }
  void make_adapter_slots(const ops::AdapterSlots& slots) override { to_->make_adapter_slots(slots); }
  std::unique_ptr<ops::Buffer> allocate_host(std::size_t bytes) override { return to_->allocate_host(bytes); }
  void fill_adapter_slot(int slot, const ops::Buffer& image) override { to_->fill_adapter_slot(slot, image); }

  std::unique_ptr<ops::Linear> make_linear(std::span<const ops::HostMatrix> parts,
                                           std::span<const ops::HostMatrix> bias, DType weight) override {
    return to_->make_linear(parts, bias, weight);
  }
  std::unique_ptr<ops::Embedding> make_embedding(const ops::HostMatrix& table, DType weight,
                                                 bool in_host_memory) override {
    return to_->make_embedding(table, weight, in_host_memory);
  }
  std::unique_ptr<ops::Embedding> make_embedding(const ops::Linear& weight) override {
    return to_->make_embedding(weight);
  }
  std::unique_ptr<ops::KvCache> make_kv_cache(const ops::KvLayout& layout, const PerKind<int>& num_blocks,
                                              const std::optional<PerKind<int>>& committed) override {
    return to_->make_kv_cache(layout, num_blocks, committed);
  }

  void prepare(const ops::StepLimits& limits, const Issue& issue) override { to_->prepare(limits, issue); }
  void begin_step(const ops::StepInput& input) override { to_->begin_step(input); }
  void run_step(const Issue& issue) override { to_->run_step(issue); }
  std::vector<ops::Sampled> collect() override { return to_->collect(); }

  void commit_blocks(ops::KvCache& cache, const PerKind<int>& num_blocks) override {
    to_->commit_blocks(cache, num_blocks);
  }
  std::unique_ptr<ops::Experts> make_experts(std::span<const ops::ExpertSource> experts, DType weight) override {
    return to_->make_experts(experts, weight);
  }
  std::unique_ptr<ops::Linear> make_quantised_linear(std::span<const ops::QuantSource* const> parts,
                                                     std::span<const ops::HostMatrix> bias, DType data) override {
    return to_->make_quantised_linear(parts, bias, data);
  }
  std::unique_ptr<ops::Experts> make_quantised_experts(std::span<const ops::QuantExpertSource> experts,
                                                       DType data) override {
    return to_->make_quantised_experts(experts, data);
  }
  std::size_t experts_scratch_bytes(const ops::ExpertsShape& shape, std::int64_t rows) const override {
    return to_->experts_scratch_bytes(shape, rows);
  }
  void copy_blocks(ops::KvCache& cache, std::span<const BlockCopy> copies) override { to_->copy_blocks(cache, copies); }
  void embed(const ops::Tensor& out, const ops::Embedding& table, float scale) override {
    to_->embed(out, table, scale);
  }
  void add_embedding(const ops::Tensor& x, const ops::Embedding& table, const ops::EmbeddingSum& how) override {
    to_->add_embedding(x, table, how);
  }
  void rms_norm(const ops::Tensor& out, const ops::Tensor& residual, const ops::Tensor& delta,
                const ops::NormParams& how) override {
    to_->rms_norm(out, residual, delta, how);
  }
  void announce_linear(const ops::Linear& weight) override { to_->announce_linear(weight); }
  void linear(const ops::Tensor& out, const ops::Tensor& in, const ops::Linear& weight) override {
    to_->linear(out, in, weight);
  }
  void add_low_rank(const ops::Tensor& out, const ops::Tensor& in,
                    std::span<const ops::LowRankRows> changes) override {
    to_->add_low_rank(out, in, changes);
  }
  void add_adapters(const ops::Tensor& out, const ops::Tensor& in, int weight) override {
    to_->add_adapters(out, in, weight);
  }
  void qk_squares(const ops::Tensor& sums, const ops::Tensor& qkv, std::int64_t q_size, std::int64_t k_size) override {
    to_->qk_squares(sums, qkv, q_size, k_size);
  }
  void rotary_store(const ops::Tensor& qkv, const ops::RotaryParams& how, ops::KvCache& cache, int layer,
                    int heads) override {
    to_->rotary_store(qkv, how, cache, layer, heads);
  }
  void latent_store(const ops::Tensor& queries, const ops::Tensor& plain, const ops::Tensor& q,
                    const ops::Tensor& latent, const ops::LatentParams& how, ops::KvCache& cache, int layer,
                    int heads) override {
    to_->latent_store(queries, plain, q, latent, how, cache, layer, heads);
  }
  void heads_linear(const ops::Tensor& out, const ops::Tensor& in,
                    std::span<const std::unique_ptr<ops::Linear>> heads) override {
    to_->heads_linear(out, in, heads);
  }
  void attention(const ops::Tensor& out, const ops::Tensor& qkv, const ops::KvCache& cache, int layer, int heads,
                 const ops::AttentionParams& how) override {
    to_->attention(out, qkv, cache, layer, heads, how);
  }
  void delta_net(const ops::Tensor& qkv, const ops::Tensor& gates, const ops::DeltaNetParams& how, ops::KvCache& cache,
                 int layer) override {
    to_->delta_net(qkv, gates, how, cache, layer);
  }
  void sigmoid_gate(const ops::Tensor& x, const ops::Tensor& gate) override { to_->sigmoid_gate(x, gate); }
  void gated_norm(const ops::Tensor& out, const ops::Tensor& x, const ops::Tensor& gate, const float* weight, float eps,
                  int head_dim) override {
    to_->gated_norm(out, x, gate, weight, eps, head_dim);
  }
  void short_conv(const ops::Tensor& out, const ops::Tensor& in, const ops::ShortConvParams& how, ops::KvCache& cache,
                  int layer) override {
    to_->short_conv(out, in, how, cache, layer);
  }
  void gated_activation(const ops::Tensor& out, const ops::Tensor& gate_up, ops::Activation activation) override {
    to_->gated_activation(out, gate_up, activation);
  }
  void experts(const ops::Tensor& out, const ops::Tensor& in, const ops::Tensor& router, const ops::Experts& weights,
               const ops::RouterParams& how, ops::Activation activation, void* scratch,
               const ops::SharedExpert& shared) override {
    to_->experts(out, in, router, weights, how, activation, scratch, shared);
  }
  void scatter_logits(const ops::Tensor& out, const ops::Tensor& in, const std::int32_t* columns) override {
    to_->scatter_logits(out, in, columns);
  }
  void store_rows(const ops::Tensor& out, const ops::Tensor& in) override { to_->store_rows(out, in); }
  void load_rows(const ops::Tensor& out, const ops::Tensor& in) override { to_->load_rows(out, in); }
  void scale_logits(const ops::Tensor& logits, float scale, float cap) override {
    to_->scale_logits(logits, scale, cap);
  }
  void gather_rows(const ops::Tensor& out, const ops::Tensor& in) override { to_->gather_rows(out, in); }
  void sample(const ops::Tensor& logits) override { to_->sample(logits); }

  int ranks() const override { return to_->ranks(); }
  int rank() const override { return to_->rank(); }
  void all_reduce(const ops::Tensor& tensor) override { to_->all_reduce(tensor); }
  void all_gather(const ops::Tensor& out, const ops::Tensor& in) override { to_->all_gather(out, in); }
  void abort_collectives(std::string_view why) noexcept override { to_->abort_collectives(why); }

 private:
  std::unique_ptr<ops::Ops> to_;
};

}  // namespace charonia::testing
