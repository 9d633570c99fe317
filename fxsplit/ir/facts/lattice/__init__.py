"""The lattice of the places where a graph can be cut: blocks of nodes, sets of blocks, their order for a search."""
