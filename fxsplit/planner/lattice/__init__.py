"""From costs to the ideals of a graph in sequence. If they are too many: those of a smaller graph, or of one order."""
