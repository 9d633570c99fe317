"""Pictures: scenes of the graph with its stages, of loads and memory, of timelines and of curves."""
