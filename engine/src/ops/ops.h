// All that the decoder needs of a device. ops/cpu and ops/cuda implement it, and nothing else differs between devices.
#pragma once

#include "ops/collectives.h"
#include "ops/device.h"
#include "ops/operations.h"
#include "ops/step.h"

namespace charonia::ops {

class Ops : public Device, public Steps, public Operations, public Collectives {};

}  // namespace charonia::ops
