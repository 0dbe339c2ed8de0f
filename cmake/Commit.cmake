# Puts the commit that a wheel is built from into it, as guild/commit.txt: an installed package has
# no checkout around it to ask. $GUILD_COMMIT takes precedence, for sources that travel without git;
# where neither is there, the wheel has no such file.
set(commit "$ENV{GUILD_COMMIT}")
set(git_here git -C "${CMAKE_CURRENT_SOURCE_DIR}")
set(git_output OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if(NOT commit AND EXISTS "${CMAKE_CURRENT_SOURCE_DIR}/.git")  # not a repository further up
  execute_process(COMMAND ${git_here} rev-parse HEAD OUTPUT_VARIABLE commit ${git_output})
  execute_process(COMMAND ${git_here} status --porcelain --untracked-files=no
    OUTPUT_VARIABLE edited ${git_output})
  if(commit AND edited)
    string(APPEND commit "+changes")
  endif()
endif()
if(commit)
  file(WRITE "${CMAKE_CURRENT_BINARY_DIR}/commit.txt" "${commit}\n")
  install(FILES "${CMAKE_CURRENT_BINARY_DIR}/commit.txt" DESTINATION guild)
endif()
