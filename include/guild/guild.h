// All of Guild's C++ API. cpu.h and cuda.h declare the functions of steps.h, routing.h, float8.h
// and float8_chunks.h; the other headers declare their own, in both namespaces.
#pragma once
#include "guild/cpu.h"
#include "guild/cuda.h"
#include "guild/error.h"
#include "guild/exchange.h"
#include "guild/float8.h"
#include "guild/float8_chunks.h"
#include "guild/microscaling.h"
#include "guild/peer_layer.h"
#include "guild/router_logits.h"
#include "guild/routing.h"
#include "guild/steps.h"
#include "guild/types.h"
