// Generated from definitions/layer_attributes.toml by `make generate`; do not edit.
#pragma once

#include <string>

namespace charonia::model {

// Properties of one layer. `charonia convert` writes them to manifest.json.
struct LayerAttributes {
  // number of tokens that attention reads, the token itself included; 0: all; >= 0
  int window = 0;
  // rotary embedding of q and k; local: with rope_local_theta, and without scaling; global | local | none
  std::string rotation = "global";
  // the feed-forward block; dense | experts
  std::string ffn = "dense";
};

}  // namespace charonia::model
