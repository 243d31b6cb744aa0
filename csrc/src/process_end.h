// Threads of the library's own, and the end of the process.
#pragma once

#include <functional>

namespace torpor {

// A process that ends says goodbye first, so that no thread of ours calls a driver that is taken down: no work begins after that, and
// what is under way is waited for, a second at most, as a driver may not end it.
//
// False, with nothing done, after the goodbye. alone: one such work goes on at a time. What the work throws leaves here.
bool work_before_goodbye(bool alone, const std::function<void()> &work);

// Before the first work, and after the driver was loaded: its own end comes later then.
void say_goodbye_at_exit();

}  // namespace torpor
