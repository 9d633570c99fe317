"""Random numbers: generators, draws that depend on no order, and dropout."""
