"""Watch what Python values forward() reads and writes: those are not in a graph, which holds what they were."""
