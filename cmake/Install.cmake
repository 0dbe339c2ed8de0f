# Installs headers, library and CMake package; in a wheel, all of them go into the Python package's
# folder, beside the torch binding.
include(CMakePackageConfigHelpers)

set(root "")
if(SKBUILD)
  set(root "guild/")
  include(Commit)
  if(TARGET guild_torch)
    install(TARGETS guild_torch LIBRARY DESTINATION guild)
  endif()
elseif(TARGET guild_torch)
  install(TARGETS guild_torch LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()

set(library_dir ${root}${CMAKE_INSTALL_LIBDIR})
if(SKBUILD)
  set(library_dir ${root}lib)
endif()
set(package_dir ${library_dir}/cmake/guild)

install(DIRECTORY include/guild DESTINATION ${root}include)
install(TARGETS guild EXPORT guildTargets
  ARCHIVE DESTINATION ${library_dir} INCLUDES DESTINATION ${root}include)
install(EXPORT guildTargets NAMESPACE guild:: DESTINATION ${package_dir})
configure_package_config_file(cmake/guildConfig.cmake.in
  ${CMAKE_CURRENT_BINARY_DIR}/guildConfig.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/guildConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/guildConfig.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/guildConfigVersion.cmake DESTINATION ${package_dir})
