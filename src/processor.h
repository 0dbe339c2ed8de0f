// Whether this processor can run the code that the CPU backend was compiled to.
#pragma once

namespace guild {

// Throws Error if it cannot. Checked once per process.
void require_processor();

}  // namespace guild
