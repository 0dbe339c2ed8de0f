// Errors. One exception type, one function, no macros.
#pragma once
#include <sstream>
#include <stdexcept>
#include <string>

namespace guild {

// An argument has a wrong value: the message gives its name, its value and what was expected. Or a
// call of CUDA has failed: the message says what for, and CUDA's name and text of the error.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Throws Error with the concatenated message if the condition does not hold.
template <class... Message>
void require(bool condition, Message const&... message) {
  if (condition) return;
  std::ostringstream text;
  (text << ... << message);
  throw Error(text.str());
}

}  // namespace guild
