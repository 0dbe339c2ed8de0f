# Finds what Guild builds against: Eigen and CUTLASS headers, torch, CUDA, OpenMP.
#
# Eigen, CUTLASS and torch usually lie in a Python environment (Pythons.cmake); the options of
# CMakeLists.txt override each.

find_package(OpenMP REQUIRED COMPONENTS CXX)
set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)
include(Pythons)

# Makes an option AUTO, ON or OFF: ON, YES, Y, TRUE and 1 are alike, and so are their opposites.
function(guild_read_switch option)
  string(TOUPPER "${${option}}" value)
  if(value MATCHES "^(ON|YES|Y|TRUE|1)$")
    set(value ON)
  elseif(value MATCHES "^(OFF|NO|N|FALSE|0)$")
    set(value OFF)
  elseif(value STREQUAL "")
    set(value AUTO)
  elseif(NOT value STREQUAL "AUTO")
    message(FATAL_ERROR "${option}: expected AUTO, ON or OFF, got '${${option}}'")
  endif()
  set(${option} ${value} PARENT_SCOPE)
endfunction()
guild_read_switch(GUILD_CUDA)
guild_read_switch(GUILD_TORCH)

# ---- Eigen: the CPU backend's matrix products ----
if(NOT GUILD_EIGEN_DIR)
  find_package(Eigen3 3.4 QUIET NO_MODULE)
  if(GUILD_FOUND_EIGEN)
    set(eigen_dir "${GUILD_FOUND_EIGEN}")
  elseif(Eigen3_FOUND)
    get_target_property(eigen_dir Eigen3::Eigen INTERFACE_INCLUDE_DIRECTORIES)
  endif()
else()
  set(eigen_dir "${GUILD_EIGEN_DIR}")
endif()
if(NOT EXISTS "${eigen_dir}/Eigen/Core")
  message(FATAL_ERROR "Eigen 3.4 not found: expected Eigen/Core in '${eigen_dir}'. Looked in "
    "CMake's usual places and in the packages of ${guild_asked}. Any of these will do, then run "
    "CMake again:\n"
    "  ${guild_pip} --no-deps cmeel-eigen\n"
    "  apt-get install libeigen3-dev\n"
    "  cmake with -DPython3_EXECUTABLE=<a Python that has cmeel-eigen>\n"
    "  cmake with -DGUILD_EIGEN_DIR=<folder that holds Eigen/>")
endif()
add_library(guild_eigen INTERFACE)
target_include_directories(guild_eigen SYSTEM INTERFACE "${eigen_dir}")

# ---- CUDA and CUTLASS: the CUDA backend ----
set(GUILD_WITH_CUDA OFF)
if(NOT GUILD_CUDA STREQUAL "OFF")
  if(NOT CMAKE_CUDA_COMPILER)
    unset(CMAKE_CUDA_COMPILER CACHE)  # a compiler may have come since the last search
  endif()
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(GUILD_WITH_CUDA ON)
  elseif(GUILD_CUDA STREQUAL "ON")
    message(FATAL_ERROR "GUILD_CUDA=ON, but no nvcc was found. Put CUDA's bin folder on PATH, pass "
      "-DCMAKE_CUDA_COMPILER=<nvcc>, or build without the CUDA backend: -DGUILD_CUDA=OFF.")
  endif()
endif()
if(GUILD_WITH_CUDA)
  if(CMAKE_VERSION VERSION_LESS 3.26)
    message(FATAL_ERROR "The CUDA backend needs CMake 3.26, which knows C++20 in nvcc; this is "
      "${CMAKE_VERSION}. `${guild_pip} cmake` brings a newer one; -DGUILD_CUDA=OFF builds the CPU "
      "backend alone.")
  endif()
  set(cutlass_dir "${GUILD_CUTLASS_DIR}")
  if(NOT cutlass_dir)
    set(cutlass_dir "${GUILD_FOUND_CUTLASS}")
  endif()
  if(NOT EXISTS "${cutlass_dir}/cute/arch/mma_sm90_gmma.hpp")
    message(FATAL_ERROR "CUTLASS 4.2 headers not found, which the CUDA backend needs: expected "
      "cute/arch/mma_sm90_gmma.hpp in '${cutlass_dir}'. Looked in the packages of ${guild_asked}. "
      "Any of these will do, then run CMake again:\n"
      "  ${guild_pip} --no-deps nvidia-cutlass==4.2.0.0\n"
      "  cmake with -DPython3_EXECUTABLE=<a Python that has it>\n"
      "  cmake with -DGUILD_CUTLASS_DIR=<CUTLASS's include folder>\n"
      "  cmake with -DGUILD_CUDA=OFF, for the CPU backend alone")
  endif()
  set(CMAKE_CUDA_ARCHITECTURES OFF)  # -gencode is given by hand: sm_90a has no CMake name
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)
endif()

# ---- torch: the binding, linked by hand because find_package(Torch) wants torch's CUDA ----
set(GUILD_WITH_TORCH OFF)
if(NOT GUILD_TORCH STREQUAL "OFF")
  if(GUILD_FOUND_TORCH)
    set(GUILD_WITH_TORCH ON)
  elseif(GUILD_TORCH STREQUAL "ON")
    message(FATAL_ERROR "GUILD_TORCH=ON, but there is no torch >= 2.10 (found: "
      "'${GUILD_FOUND_TORCH_VERSION}'). Looked in the packages of ${guild_asked}. Install torch "
      "there, pass -DPython3_EXECUTABLE=<python>, or build without it: -DGUILD_TORCH=OFF.")
  endif()
endif()
if(GUILD_WITH_TORCH)
  add_library(guild_torch_libraries INTERFACE)
  target_include_directories(guild_torch_libraries SYSTEM INTERFACE "${GUILD_FOUND_TORCH}/include")
  target_compile_definitions(guild_torch_libraries INTERFACE
    TORCH_TARGET_VERSION=0x020a000000000000)  # the stable ABI of 2.10
  target_link_directories(guild_torch_libraries INTERFACE "${GUILD_FOUND_TORCH}/lib")
  target_link_options(guild_torch_libraries INTERFACE "LINKER:--no-as-needed")
  target_link_libraries(guild_torch_libraries INTERFACE torch torch_cpu)
endif()
