"""Write an IR as text and read it back: tokens, values, the graph and the facts."""
