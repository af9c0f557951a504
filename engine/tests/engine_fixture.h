// An engine with a very small model for tests, on a device that computes asynchronously or not.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>

#include "charonia/engine.h"
#include "engine_support.h"
#include "runtime/devices.h"
#include "runtime/proposals.h"
#include "test_folder.h"
#include "tiny_workspace.h"
#include "wrapped_ops.h"

namespace charonia::testing {

// While it lives, every policy chooses all proposals. So tests that need proposals do not depend on times.
struct AllProposals {
  AllProposals() { runtime::SpeculationPolicy::choose_all_for_tests(true); }
  AllProposals(const AllProposals&) = delete;
  ~AllProposals() { runtime::SpeculationPolicy::choose_all_for_tests(false); }
};

// For tests with any parameters. SetUp() of a derived class writes the model.
class EngineFixtureBase : public ::testing::Test {
 protected:
  void SetUp() override { dir_ = test_folder(); }
  void TearDown() override {
    runtime::wrap_devices_for_tests({});
    std::filesystem::remove_all(dir_);
  }
  // Wraps the devices of engines that are created after this call. faults_ controls them.
  void wrap_devices(bool asynchronous) {
    runtime::wrap_devices_for_tests([this, asynchronous](std::unique_ptr<ops::Ops> ops) {
      return std::make_unique<WrappedOps>(std::move(ops), asynchronous, faults_);
    });
  }

  std::filesystem::path weights() const { return dir_ / "weights"; }
  // Writes a model with a long context and makes each step of a wrapped device take 5 ms or more. A request for 15,000
  // tokens then takes longer than any test.
  void lengthen(int ranks = 1) {
    faults_->step_ms = 5;
    TinyModel model;
    model.ranks = ranks;
    model.positions = 20'000;
    write_tiny_workspace(weights(), model);
  }
  std::unique_ptr<Engine> engine(const Settings& settings = {}) const {
    return std::make_unique<Engine>(weights(), settings);
  }
  // The tokens that a request gets in a separate engine without sessions.
  std::vector<TokenId> alone(Request one) const {
    one.session_id.clear();
    const auto fresh = engine();
    Collector out;
    fresh->submit(std::move(one), out.callback());
    return out.tokens();
  }

  std::shared_ptr<Faults> faults_ = std::make_shared<Faults>();
  std::filesystem::path dir_;
};

// Parameter: whether the device computes asynchronously.
class EngineFixture : public EngineFixtureBase, public ::testing::WithParamInterface<bool> {
 protected:
  void SetUp() override {
    EngineFixtureBase::SetUp();
    wrap_devices(GetParam());
    write_tiny_workspace(weights());
  }
};

// Whether the device computes asynchronously.
inline const auto kDevices = ::testing::Bool();
inline std::string device_name(const ::testing::TestParamInfo<bool>& info) {
  return info.param ? "asynchronous" : "synchronous";
}

}  // namespace charonia::testing
