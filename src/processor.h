// Whether this processor can run the code that the CPU backend was compiled to.
#pragma once

namespace guild {

// Throws Error where it cannot. Asked once, then remembered.
void require_processor();

}  // namespace guild
