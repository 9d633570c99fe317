"""Search for the schedule with the shortest step, and prove how much shorter a step could be."""
