#include "cuda_nvrtc.h"

#include <dlfcn.h>

#include <cstddef>
#include <vector>

#include "error.h"

namespace torpor::cuda {
namespace {

using Result = int;
using Program = struct ProgramOfNvrtc *;

// As in nvrtc.h since CUDA 11.2.
#define TORPOR_NVRTC_FUNCTIONS(F)                                                                                      \
  F(nvrtcCreateProgram, (Program * program, const char *source, const char *name, int headers, const char *const *texts, \
                         const char *const *names))                                                                    \
  F(nvrtcCompileProgram, (Program program, int count, const char *const *options))                                     \
  F(nvrtcDestroyProgram, (Program * program))                                                                          \
  F(nvrtcGetProgramLogSize, (Program program, size_t * bytes))                                                         \
  F(nvrtcGetProgramLog, (Program program, char *log))                                                                  \
  F(nvrtcGetCUBINSize, (Program program, size_t * bytes))                                                              \
  F(nvrtcGetCUBIN, (Program program, char *image))                                                                     \
  F(nvrtcGetPTXSize, (Program program, size_t * bytes))                                                                \
  F(nvrtcGetPTX, (Program program, char *image))

struct Compiler {
#define TORPOR_NVRTC_MEMBER(name, arguments) Result(*name) arguments = nullptr;
  TORPOR_NVRTC_FUNCTIONS(TORPOR_NVRTC_MEMBER)
#undef TORPOR_NVRTC_MEMBER
};

void *open_library() {
  for (const char *name : {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"}) {
    if (void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return library;
  }
  throw Error::unsupported("no CUDA run-time compiler (libnvrtc.so.13, .12): pip install nvidia-cuda-nvrtc");
}

// Left open: whoever else loaded it may use it.
Compiler load() {
  void *library = open_library();
  Compiler out;
#define TORPOR_NVRTC_LOAD(name, arguments)                                                 \
  out.name = reinterpret_cast<Result(*) arguments>(dlsym(library, #name));                 \
  if (out.name == nullptr) throw Error::unsupported("the CUDA run-time compiler has no " #name);
  TORPOR_NVRTC_FUNCTIONS(TORPOR_NVRTC_LOAD)
#undef TORPOR_NVRTC_LOAD
  return out;
}

class Compilation {
 public:
  Compilation(const Compiler &rtc, const char *source, const char *name) : rtc_(rtc) {
    if (rtc_.nvrtcCreateProgram(&program_, source, name, 0, nullptr, nullptr) != 0) {
      throw Error::unsupported("the CUDA run-time compiler does not start");
    }
  }
  Compilation(const Compilation &) = delete;
  Compilation &operator=(const Compilation &) = delete;
  ~Compilation() { rtc_.nvrtcDestroyProgram(&program_); }

  bool run(const std::string &architecture) {
    const std::string option = "--gpu-architecture=" + architecture;
    const char *options[] = {option.c_str(), "--std=c++17"};
    return rtc_.nvrtcCompileProgram(program_, 2, options) == 0;
  }
  std::string cubin() const { return text(rtc_.nvrtcGetCUBINSize, rtc_.nvrtcGetCUBIN); }
  std::string ptx() const { return text(rtc_.nvrtcGetPTXSize, rtc_.nvrtcGetPTX); }
  std::string log() const { return text(rtc_.nvrtcGetProgramLogSize, rtc_.nvrtcGetProgramLog); }

 private:
  template <typename Size, typename Get>
  std::string text(const Size &size, const Get &get) const {
    size_t bytes = 0;
    if (size(program_, &bytes) != 0) return {};
    std::string out(bytes, '\0');
    return get(program_, out.data()) == 0 ? out : std::string();
  }
  const Compiler &rtc_;
  Program program_ = nullptr;
};

}  // namespace

std::string compile(const char *source, const char *name, int major, int minor) {
  const Compiler rtc = load();
  {
    Compilation exact(rtc, source, name);
    if (exact.run("sm_" + std::to_string(10 * major + minor))) {
      if (std::string image = exact.cubin(); !image.empty()) return image;
    }
  }
  // A compiler older than the device: the driver translates what is meant for an older one, with which the newest kernels go.
  std::string log;
  for (const char *architecture : {major >= 9 ? "compute_90" : "compute_75", "compute_75"}) {
    Compilation portable(rtc, source, name);
    if (portable.run(architecture)) return portable.ptx();
    log = portable.log();
  }
  throw Error::unsupported("the CUDA run-time compiler refuses " + std::string(name) + ": " + log);
}

}  // namespace torpor::cuda
