"""Records of `guild bench` as tables for the terminal."""
