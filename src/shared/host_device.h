// GUILD_HD, before the return type, marks a function for host and device.
#pragma once

#ifdef __CUDACC__
#define GUILD_HD __host__ __device__ __forceinline__
#else
#define GUILD_HD inline
#endif
