// All of Guild's C++ API.
#pragma once
#include "guild/cpu.h"
#include "guild/cuda.h"
#include "guild/error.h"
#include "guild/exchange.h"
#include "guild/microscaling.h"
#include "guild/peer_layer.h"
#include "guild/router_logits.h"
#include "guild/steps.h"
#include "guild/types.h"
