// Generated from definitions/sampling_parameters.toml by `make generate`; do not edit.
#pragma once

#include "charonia/generated/sampling.h"

namespace charonia {

// Whether the tokens of the row's sequence have to be counted.
inline bool has_penalties(const RowSampling& row) {
  return row.repetition_penalty != 1.0F || row.presence_penalty != 0.0F || row.frequency_penalty != 0.0F;
}

}  // namespace charonia
