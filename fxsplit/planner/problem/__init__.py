"""The search problem: states, moves between states, and the time and memory of each stage."""
