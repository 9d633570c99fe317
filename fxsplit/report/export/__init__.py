"""Plans for the viewers of graphs that people have: Graphviz, and Model Explorer."""
