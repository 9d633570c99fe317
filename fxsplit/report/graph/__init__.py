"""The graph of a plan for people: nodes folded by module, and the values that cross each cut."""
