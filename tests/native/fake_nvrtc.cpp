// A compiler whose code is the source text after a line with the architecture; fake_cuda_streams.cpp knows what to do with it. It knows
// no device exactly, and no more than FAKE_NVRTC_MOST (90), so that all ways of cuda_nvrtc.cpp are walked.
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {
struct Program {
  std::string source;
  bool compiled = false;
};
}  // namespace

#define FAKE extern "C" __attribute__((visibility("default")))

FAKE int nvrtcCreateProgram(Program **program, const char *source, const char *, int, const char *const *, const char *const *) {
  *program = new Program{source};
  return 0;
}
FAKE int nvrtcDestroyProgram(Program **program) {
  delete *program;
  *program = nullptr;
  return 0;
}
FAKE int nvrtcCompileProgram(Program *program, int count, const char *const *options) {
  const char *most = std::getenv("FAKE_NVRTC_MOST");
  for (int i = 0; i < count; ++i) {
    const char *found = std::strstr(options[i], "compute_");
    if (found == nullptr || std::atoi(found + 8) > (most != nullptr ? std::atoi(most) : 90)) continue;
    program->source = std::string(found) + "\n" + program->source;
    program->compiled = true;
  }
  return program->compiled ? 0 : 6;
}
FAKE int nvrtcGetProgramLogSize(Program *, size_t *bytes) {
  *bytes = 4;
  return 0;
}
FAKE int nvrtcGetProgramLog(Program *, char *log) {
  std::memcpy(log, "log", 4);
  return 0;
}
FAKE int nvrtcGetCUBINSize(Program *, size_t *) { return 1; }
FAKE int nvrtcGetCUBIN(Program *, char *) { return 1; }
FAKE int nvrtcGetPTXSize(Program *program, size_t *bytes) {
  *bytes = program->source.size() + 1;
  return 0;
}
FAKE int nvrtcGetPTX(Program *program, char *image) {
  std::memcpy(image, program->source.c_str(), program->source.size() + 1);
  return 0;
}
