// All of Guild's C++ API.
#pragma once
#include "guild/cpu.h"
#include "guild/cuda.h"
#include "guild/error.h"
#include "guild/microscaling.h"
#include "guild/router_logits.h"
#include "guild/steps.h"
#include "guild/types.h"
