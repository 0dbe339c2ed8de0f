// Right calls of a small layer, spoilt in one thing each, and the errors that they must give.
#pragma once
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include "guild/guild.h"

namespace guild::test {

// Right calls, over memory that a wrong one must not reach.
struct Calls {
  char memory[8] = {};
  int32_t index[8] = {};
  Sizes sizes{4, 16, 8, 2, 2};
  Routing routing{index, index, index, memory, memory};
  ConstWeight weight{memory, 128, 16, 1};
  Activation activation;

  UpProjection up() {
    return {sizes,    DType::float32,   activation, GateUp::concatenated, routing,
            {memory}, {weight, weight}, {memory},   {memory, 0},          {memory, 0}};
  }
  DownProjection down() {
    return {sizes, DType::float32, routing, {memory}, {memory, 128, 8, 1}, {memory}, {memory, 0}};
  }
  Combine combine() {
    Routing rows = routing;
    rows.slot_score = nullptr;
    return {sizes, DType::float32, rows, {memory}, {memory, 0}, {}, {{memory}, index, {memory}}};
  }
  DownGradient down_gradient() {
    DownGradient d;
    d.sizes = sizes, d.dtype = DType::float16, d.routing = routing;
    d.dout = d.h = {memory}, d.w_down = {memory, 128, 8, 1}, d.dh = {memory, 0};
    d.db_up = d.db_down = {memory, 0}, d.db_dtype = DType::float32, d.workspace = memory;
    return d;
  }
  UpWeightGradient dw() {
    Weight const w{memory, 128, 16, 1};
    return {sizes,   DType::float32, DType::float32, false, true, GateUp::concatenated,
            routing, {memory},       {memory},       {w, w}};
  }
  BiasGradient db() {
    return {8, 16, 2, DType::bfloat16, DType::float32, false, routing, {memory}, {memory, 0}, 4};
  }
  Route route() { return {4, 8, 2, DType::float32, {}, {memory}, nullptr, index, memory, nullptr}; }
  RouterGradient router_gradient() {
    return {4, 8, 2, DType::float32, {}, index, memory, nullptr, memory, {}, {memory, 0}};
  }
  Sort sort() {
    return {4, 8, 2, DType::float32, false, index, memory, index, index, index, memory, memory};
  }
  TokenRounding rounding() {
    return {4,     8,       2,     DType::float32, {},     Rounding::nearest, 128,   {memory},
            index, nullptr, index, index,          memory, nullptr,           memory};
  }
  BalanceSums balance() {
    return {4,     8,       2,      1,      DType::float32, Score::softmax, {memory},
            index, nullptr, memory, memory, index,          memory};
  }
  BalanceGradient balance_gradient() {
    return {4,        8,       1,      DType::float32, Score::softmax,
            {memory}, nullptr, memory, memory,         {memory, 0}};
  }
  GroupedGemm gemm() {
    GroupedGemm g;
    g.m = 4, g.n = 8, g.k = 16, g.groups = 2, g.offsets = index;
    g.a = {memory, 0, 16, 1}, g.b = {memory, 128, 8, 1}, g.d = {memory, 0, 8, 1};
    return g;
  }
  MoeForward forward() {
    MoeForward f;
    f.sizes = sizes, f.dtype = DType::float32, f.routing = routing, f.x = {memory};
    f.w_up = {weight, weight}, f.w_down = {memory, 128, 8, 1}, f.o = {memory, 0};
    f.workspace = memory;
    return f;
  }
  MoeBackward backward() {
    MoeBackward b;
    b.sizes = sizes, b.dtype = b.dw_dtype = DType::float32, b.routing = routing;
    b.dout = b.x = b.h = {memory};
    b.w_up = {weight, weight}, b.w_down = {memory, 128, 8, 1}, b.workspace = memory;
    return b;
  }
};

struct WrongCall {
  char const* name;
  char const* message;  // all of it
  std::function<void(Calls&)> call;
};

// A wrong call: what `make` gives, after `spoil` changed one thing in it.
template <class Args>
WrongCall wrong(char const* name, Args (Calls::*make)(), void (*run)(Args const&),
                std::type_identity_t<void (*)(Args&)> spoil, char const* message) {
  return {name, message, [=](Calls& calls) {
            Args args = (calls.*make)();
            spoil(args);
            run(args);
          }};
}

inline void expect_errors(std::vector<WrongCall> const& calls) {
  for (WrongCall const& c : calls) {
    SCOPED_TRACE(c.name);
    Calls fresh;
    try {
      c.call(fresh);
      ADD_FAILURE() << "no error";
    } catch (Error const& error) {
      EXPECT_STREQ(error.what(), c.message);
    }
  }
}

}  // namespace guild::test
