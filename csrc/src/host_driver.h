// Memory of this machine as a device: physical memory is a memfd, mapping it is mmap at a fixed address.
//
// Pages are allocated when an extent is created, not when they are touched: what was created is really there. A forked child does
// not inherit the mappings; the descriptors close on exec, so a child that forks without exec keeps the memory until it ends.
#pragma once

#include <memory>

#include "driver.h"

namespace torpor {

std::unique_ptr<Driver> make_host_driver();

}  // namespace torpor
