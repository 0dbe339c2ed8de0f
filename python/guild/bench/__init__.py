"""What `guild bench` measures: whole layers, their steps, memory, token rounding, random shapes."""
