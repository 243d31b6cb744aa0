// A compiler whose code is the source text; fake_cuda.cpp knows what to do with it. It knows no device but the newest, so that both
// ways of cuda_nvrtc.cpp are walked.
#include <cstddef>
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
  for (int i = 0; i < count; ++i) program->compiled |= std::strstr(options[i], "compute_") != nullptr;
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
