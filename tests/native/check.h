// A test is a function that throws; the program runs all of them against one driver.
#pragma once

#include <cstdint>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "torpor/torpor.h"

namespace check {

struct Test {
  const char *name;
  std::function<void()> body;
};
std::vector<Test> &tests();
// The driver under test, from the command line.
const std::string &driver();

struct Register {
  Register(const char *name, std::function<void()> body) { tests().push_back({name, std::move(body)}); }
};

struct Skip : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] inline void fail(const char *file, int line, const std::string &what) {
  std::ostringstream text;
  text << file << ":" << line << ": " << what;
  throw std::runtime_error(text.str());
}

template <typename A, typename B>
void equal(const A &a, const B &b, const char *text, const char *file, int line) {
  if (a == b) return;
  std::ostringstream what;
  what << text << ": " << a << " is not " << b;
  fail(file, line, what.str());
}

inline void status(tp_status got, tp_status wanted, const tp_error &error, const char *text, const char *file, int line) {
  if (got == wanted) return;
  std::ostringstream what;
  what << text << ": status " << got << ", not " << wanted << " (" << error.message << ")";
  fail(file, line, what.str());
}

}  // namespace check

#define TEST(name)                                             \
  static void name();                                          \
  static const check::Register register_##name(#name, name);   \
  static void name()

#define CHECK(condition) \
  do {                   \
    if (!(condition)) check::fail(__FILE__, __LINE__, #condition); \
  } while (0)
#define CHECK_EQ(a, b) check::equal((a), (b), #a " == " #b, __FILE__, __LINE__)
// A call of the C interface; `err` is its tp_error.
#define CHECK_STATUS(call, wanted)                                             \
  do {                                                                         \
    tp_error err{};                                                            \
    const tp_status got_ = (call);                                             \
    check::status(got_, wanted, err, #call, __FILE__, __LINE__);               \
  } while (0)
#define OK(call) CHECK_STATUS(call, TP_OK)
