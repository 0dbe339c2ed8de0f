// Functions for host and device: GUILD_HD before the return type of one.
#pragma once

#ifdef __CUDACC__
#define GUILD_HD __host__ __device__ __forceinline__
#else
#define GUILD_HD inline
#endif
