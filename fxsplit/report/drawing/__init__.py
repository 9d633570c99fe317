"""Drawings: shapes on a sheet in pixels, the colours of two themes, and files of them as SVG, PNG and PDF."""
