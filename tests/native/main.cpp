// native_tests DRIVER [FILTER]: runs the tests whose names contain FILTER; prints one line each and a closing count.
#include <cstdio>
#include <cstring>

#include "check.h"
#include "fake_cuda.h"

namespace check {

std::vector<Test> &tests() {
  static std::vector<Test> all;
  return all;
}

static std::string chosen = "host";
const std::string &driver() { return chosen; }

}  // namespace check

// A real device's context takes a third of a second to make: it is kept from test to test.
class Kept {
 public:
  Kept() {
    if (check::driver() == "cuda" && tp_device_open("cuda", 0, 0, &device_, nullptr) != TP_OK) device_ = nullptr;
    if (device_ != nullptr && fake_cuda::page_locked() >= 0) close();
  }
  ~Kept() { close(); }

 private:
  void close() {
    if (device_ != nullptr) tp_device_close(device_, nullptr);
    device_ = nullptr;
  }
  tp_device *device_ = nullptr;
};

int main(int argc, char **argv) {
  if (argc > 1) check::chosen = argv[1];
  const Kept kept;
  const char *filter = argc > 2 ? argv[2] : "";
  int passed = 0, failed = 0, skipped = 0;
  for (const check::Test &test : check::tests()) {
    if (std::strstr(test.name, filter) == nullptr) continue;
    try {
      test.body();
      ++passed;
      std::printf("ok    %s\n", test.name);
    } catch (const check::Skip &reason) {
      ++skipped;
      std::printf("skip  %s: %s\n", test.name, reason.what());
    } catch (const std::exception &error) {
      ++failed;
      std::printf("FAIL  %s: %s\n", test.name, error.what());
    }
    std::fflush(stdout);
  }
  std::printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
  return failed == 0 && passed > 0 ? 0 : 1;
}
