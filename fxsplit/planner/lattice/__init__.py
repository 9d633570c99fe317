"""From costs to the ideals of the graph in sequence, and smaller graphs and lighter orders if they are too many."""
