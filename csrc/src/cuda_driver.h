// NVIDIA devices through the virtual memory functions of their driver.
#pragma once

#include <cstdint>
#include <memory>

#include "driver.h"

namespace torpor {

// TP_UNSUPPORTED, with the reason, where there is no driver or the device cannot do it.
std::unique_ptr<Driver> make_cuda_driver(int32_t ordinal);

}  // namespace torpor
