// Memory of this machine as a device. What others may be given, and what is small or guarded, is a memfd that is mapped at a fixed
// address. The rest is anonymous memory that is moved there: kernels give it huge pages, with which a sleep and a wake take a fraction.
//
// Pages are allocated when an extent is created, not when they are touched: what was created is really there. A forked child does
// not inherit the mappings; the descriptors close on exec, so a child that forks without exec keeps memory files until it ends.
#pragma once

#include <memory>

#include "driver.h"

namespace torpor {

std::unique_ptr<Driver> make_host_driver();

}  // namespace torpor
