// NVIDIA's run-time compiler, opened at first use: neither building nor loading torpor needs it.
#pragma once

#include <string>

namespace torpor::cuda {

// Code for a device of compute capability `major`.`minor`, as cuModuleLoadData takes it. TP_UNSUPPORTED, with the reason or the
// compiler's words, when there is no compiler or it refuses. A copy that the process has loaded already is found, whatever its folder.
std::string compile(const char *source, const char *name, int major, int minor);

}  // namespace torpor::cuda
