# Asks the Python environments at hand for the packages that Guild builds against: wheels carry
# Eigen (cmeel-eigen), CUTLASS (nvidia-cutlass) and torch.
#
# -DPython3_EXECUTABLE names the one to ask; otherwise the active virtual environment, the source
# tree's .venv and PATH's python3 are asked in turn. Every run of CMake asks again and caches
# nothing, so that packages installed meanwhile are found.
#
# Sets guild_pythons, the Pythons asked, and GUILD_FOUND_EIGEN, _CUTLASS, _TORCH, _TORCH_VERSION
# from the first of them that has each; empty where none has.

set(guild_pythons "")
if(Python3_EXECUTABLE)
  set(candidates "${Python3_EXECUTABLE}")
else()
  find_program(path_python NAMES python3 python NO_CACHE)
  set(candidates "${CMAKE_CURRENT_SOURCE_DIR}/.venv/bin/python3" "${path_python}")
  if(DEFINED ENV{VIRTUAL_ENV})
    list(PREPEND candidates "$ENV{VIRTUAL_ENV}/bin/python3")
  endif()
endif()

foreach(name EIGEN CUTLASS TORCH TORCH_VERSION)
  set(GUILD_FOUND_${name} "")
endforeach()
foreach(python IN LISTS candidates)
  execute_process(COMMAND "${python}" "${CMAKE_CURRENT_LIST_DIR}/python_packages.py"
    RESULT_VARIABLE status OUTPUT_VARIABLE lines ERROR_QUIET)
  if(NOT status EQUAL 0)
    continue()
  endif()
  list(APPEND guild_pythons "${python}")
  foreach(name EIGEN CUTLASS)
    string(TOLOWER ${name} lower)
    if(NOT GUILD_FOUND_${name} AND lines MATCHES "(^|\n)${lower}=([^\n]+)")
      set(GUILD_FOUND_${name} "${CMAKE_MATCH_2}")
    endif()
  endforeach()
  if(NOT GUILD_FOUND_TORCH AND lines MATCHES "(^|\n)torch_version=([^\n]+)")
    set(GUILD_FOUND_TORCH_VERSION "${CMAKE_MATCH_2}")
    if(GUILD_FOUND_TORCH_VERSION VERSION_GREATER_EQUAL 2.10 AND lines MATCHES "\ntorch=([^\n]+)")
      set(GUILD_FOUND_TORCH "${CMAKE_MATCH_1}")
    endif()
  endif()
endforeach()
if(Python3_EXECUTABLE AND NOT guild_pythons)
  message(FATAL_ERROR
    "Python3_EXECUTABLE: expected a Python 3, '${Python3_EXECUTABLE}' does not run")
endif()

# For messages: which Pythons were asked, and a pip command whose packages will be found.
list(REMOVE_DUPLICATES guild_pythons)
if(guild_pythons)
  list(GET guild_pythons 0 python)
  list(JOIN guild_pythons ", " guild_asked)
  set(guild_pip "${python} -m pip install")
else()
  set(guild_asked "no Python, since none was found")
  set(guild_pip "pip install")
endif()
