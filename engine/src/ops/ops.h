// The complete interface of a device for the decoder. ops/cpu, ops/cuda and ops/null implement it; nothing else depends
// on the device.
#pragma once

#include "ops/collectives.h"
#include "ops/device.h"
#include "ops/operations.h"
#include "ops/step.h"

namespace charonia::ops {

class Ops : public Device, public Steps, public Operations, public Collectives {};

}  // namespace charonia::ops
