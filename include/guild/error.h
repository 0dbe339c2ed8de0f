// Errors. One exception type, one function, no macros.
#pragma once
#include <sstream>
#include <stdexcept>
#include <string>

namespace guild {

// Thrown for an invalid argument, with its name, its value and what was expected, and for a failed
// CUDA call, with its purpose and CUDA's name and description of the error.
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
