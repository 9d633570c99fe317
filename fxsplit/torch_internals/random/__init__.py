"""Random numbers: generators, draws that do not depend on execution order, and dropout."""
