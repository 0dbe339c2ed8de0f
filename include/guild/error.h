// Errors. One exception type, one function, no macros.
#pragma once
#include <source_location>
#include <sstream>
#include <stdexcept>
#include <string>

namespace guild {

// An argument has a wrong value; the message gives its name, its value and what was expected.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Captures the caller's location, so that require() can be a function that takes a message pack.
struct Condition {
  bool holds;
  std::source_location where;
  constexpr Condition(bool holds, std::source_location where = std::source_location::current())
      : holds(holds), where(where) {}
};

// Throws Error with the concatenated message if the condition does not hold.
template <class... Message>
void require(Condition condition, Message const&... message) {
  if (condition.holds) return;
  std::ostringstream text;
  (text << ... << message);
  throw Error(text.str());
}

}  // namespace guild
