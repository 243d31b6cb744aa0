#include <dlfcn.h>

#include "fake_cuda.h"

namespace fake_cuda {

// The fake, once loaded, is never unloaded, so what dlsym gives stays good.
static void *symbol(const char *name) {
  void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) return nullptr;
  void *found = dlsym(library, name);
  dlclose(library);
  return found;
}

void check_nothing_left() {
  auto *left = reinterpret_cast<const char *(*)()>(symbol("fake_cuda_left"));
  if (left != nullptr) CHECK_EQ(std::string(left()), std::string());
}

static int64_t number(const char *name) {
  auto *function = reinterpret_cast<int64_t (*)()>(symbol(name));
  return function != nullptr ? function() : -1;
}

int64_t page_locked() { return number("fake_cuda_page_locked"); }
int64_t pulls() { return number("fake_cuda_pulls"); }
int64_t created() { return number("fake_cuda_created"); }

void refuse(const char *call, int64_t nth, int result) {
  auto *function = reinterpret_cast<void (*)(const char *, int64_t, int)>(symbol("fake_cuda_refuse"));
  if (function != nullptr) function(call, nth, result);
}

bool reached() { return number("fake_cuda_calls_to_refusal") == 0; }

bool refused() {
  const bool was = reached();
  refuse("", 0);
  return was;
}

void refuse_buffers(bool refuse) {
  auto *refuse_them = reinterpret_cast<void (*)(bool)>(symbol("fake_cuda_refuse_buffers"));
  if (refuse_them != nullptr) refuse_them(refuse);
}

}  // namespace fake_cuda
