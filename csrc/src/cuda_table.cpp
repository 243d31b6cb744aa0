#include "cuda_table.h"

#include <dlfcn.h>

#include <mutex>

namespace torpor::cuda {
namespace {

constexpr const char *kLibrary = "libcuda.so.1";

Table loaded;  // written once, by load()
bool ready = false;
std::mutex loading;

void *symbol(void *library, const char *name) {
  void *found = dlsym(library, name);
  if (found == nullptr) throw Error::unsupported(std::string("the CUDA driver is too old: ") + kLibrary + " has no " + name);
  return found;
}

// The library is never closed: the driver does not bear it.
void load() {
  void *library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw Error::unsupported(std::string("no CUDA driver: ") + dlerror());
  Table table;
#define TORPOR_CUDA_LOAD(name, arguments) table.name = reinterpret_cast<CUresult(*) arguments>(symbol(library, #name));
  TORPOR_CUDA_FUNCTIONS(TORPOR_CUDA_LOAD)
#undef TORPOR_CUDA_LOAD
  loaded = table;
  if (const CUresult result = loaded.cuInit(0)) {
    const char *name = nullptr;
    loaded.cuGetErrorName(result, &name);
    throw Error::unsupported(std::string("the CUDA driver does not start: ") + (name != nullptr ? name : "unknown error"));
  }
}

}  // namespace

const Table &table() {
  std::lock_guard<std::mutex> lock(loading);
  if (!ready) {
    load();
    ready = true;
  }
  return loaded;
}

void check(CUresult result, int op, const char *function) {
  if (result == kSuccess) return;
  const char *name = nullptr;
  loaded.cuGetErrorName(result, &name);
  Error error(TP_DRIVER, std::string(function) + ": " + (name != nullptr ? name : "unknown error"));
  error.op = op;
  error.code = result;
  if (result == kOutOfMemory && op != kNoOp) error.status = memory_status(static_cast<tp_op>(op));
  throw error;
}

}  // namespace torpor::cuda
