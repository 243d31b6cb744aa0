// A libcuda.so.1 that needs no GPU, for the cuda driver's own logic: tests load it by putting its folder on the library path.
#pragma once

#include "check.h"

namespace fake_cuda {

// How often the kernel that reads host memory was launched; -1 where the fake is not loaded.
int64_t pulls();

// Grows by one with every piece of memory that is created; -1 where the fake is not loaded.
int64_t created();

inline constexpr int kBroken = 719, kNoMemory = 2;
// The nth of these calls to the driver fails, and no other. Nothing where the fake is not loaded.
void refuse(const char *call, int64_t nth, int result = kBroken);
bool reached();  // Was that call?
// The same, and no refusal is left.
bool refused();

// Nothing created, mapped, reserved, page-locked or pushed is left, and no call was out of order. Passes where the fake is not
// loaded.
void check_nothing_left();

// Bytes page-locked now; -1 where the fake is not loaded.
int64_t page_locked();

// While true, the device has no memory left for what torpor keeps there for itself.
void refuse_buffers(bool refuse);

}  // namespace fake_cuda
