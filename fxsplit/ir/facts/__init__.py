"""The facts that passes learn about a graph, such as its costs, its plan and its stages."""
