"""The facts: the nouns that passes learn."""
