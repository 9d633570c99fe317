"""Tensors: layouts, values, memory (of accelerators too), and differences."""
