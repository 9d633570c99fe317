"""The IR as text that reads back: its tokens, its values, the graph, the facts, and how they become an IR."""
